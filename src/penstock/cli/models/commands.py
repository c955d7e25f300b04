"""Defines the commands `penstock list | pull | show | rm | manifest | models`: their arguments and help.

Each command imports its code when it runs, so that the command line starts fast.
"""

from typing import Annotated

import typer

from penstock.cli.completion import all_model_names, model_names
from penstock.cli.usage import PlainUsage

REVISION = typer.Option(metavar="NAME", help="Branch, tag or commit of a Hugging Face model.")
MODEL = typer.Argument(
    metavar="MODEL",
    help="A name that penstock list prints, a folder or a GGUF file. Default: smollm2-135m.",
    autocompletion=model_names,
)
TO_PULL = typer.Argument(
    metavar="MODEL",
    help="A Hugging Face id: org/model, or org/model:Q4_K_M for a GGUF file of this quantisation.",
    autocompletion=all_model_names,
)
TO_REMOVE = typer.Argument(
    metavar="MODEL",
    help="A name that penstock list prints; org/model stands for all of its GGUF files.",
    autocompletion=all_model_names,
)


def add_model_commands(app: typer.Typer) -> None:
    """Adds the commands to `app`, the command line."""
    app.command("list", help="List the models on this machine.")(_list)
    app.command("pull", cls=PlainUsage, help="Download a model from Hugging Face, or continue a download.")(_pull)
    app.command("show", help="Show a local model's architecture, size and context. Loads no weights.")(_show)
    app.command(
        "manifest",
        short_help="Write the SHA-256 sums of a model's files.",
        help="Write the SHA-256 sums of a model's files to SHA256SUMS in the same folder. Every start checks them.",
    )(_manifest)
    app.command("models", help="Show the supported architectures and their features.")(_models)
    app.command("rm", cls=PlainUsage, help="Remove a model from Hugging Face's cache.")(_rm)


def _list(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    from penstock.cli.models.list import list_models

    list_models(as_json)


def _pull(model: Annotated[str, TO_PULL], revision: Annotated[str | None, REVISION] = None) -> None:
    from penstock.cli.models.pull import pull
    from penstock.config.texts import checked_flag

    pull(model, checked_flag("--revision", revision))


def _show(
    model: Annotated[str | None, MODEL] = None,
    revision: Annotated[str | None, REVISION] = None,
    template: Annotated[bool, typer.Option("--template", help="Print only the chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    from penstock.cli.models.show import show
    from penstock.config.texts import checked_flag

    show(model, checked_flag("--revision", revision), template, as_json)


def _manifest(
    model: Annotated[str | None, MODEL] = None,
    revision: Annotated[str | None, REVISION] = None,
    check: Annotated[bool, typer.Option("--check", help="Check the files now. Write nothing.")] = False,
) -> None:
    from penstock.cli.models.manifest import manifest
    from penstock.config.texts import checked_flag

    manifest(model, checked_flag("--revision", revision), check)


def _rm(
    model: Annotated[str, TO_REMOVE],
    revision: Annotated[str | None, REVISION] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove the model without asking.")] = False,
) -> None:
    from penstock.cli.models.rm import remove
    from penstock.config.texts import checked_flag

    remove(model, checked_flag("--revision", revision), yes)


def _models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/supported-models.md.")] = False,
) -> None:
    from penstock.cli.models.supported import print_supported

    print_supported(as_json, markdown)
