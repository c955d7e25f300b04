"""Defines the commands `penstock list | pull | show | rm | quantize | manifest | models`: their arguments and help.

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
TO_QUANTIZE = typer.Argument(
    metavar="MODEL",
    help="A folder in safetensors, a GGUF file, a name that penstock list prints, or a Hugging Face id.",
    autocompletion=model_names,
)


def add_model_commands(app: typer.Typer) -> None:
    app.command("list", help="List the models on this machine.")(_list)
    app.command("pull", cls=PlainUsage, help="Download a model from Hugging Face, or continue a download.")(_pull)
    app.command("show", help="Show a local model's architecture, size and context. Loads no weights.")(_show)
    app.command(
        "manifest",
        short_help="Write the SHA-256 sums of a model's files.",
        help="Write the SHA-256 sums of a model's files to SHA256SUMS in the same folder. Every start checks them.",
    )(_manifest)
    app.command(
        "quantize",
        cls=PlainUsage,
        short_help="Make a quantised checkpoint of a model.",
        help="Make a quantised checkpoint of a model: a folder of a safetensors folder, or a GGUF file of a GGUF file. "
        "An interrupted run goes on where it ended if the same command is given again.",
    )(_quantize)
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


def _quantize(
    model: Annotated[str, TO_QUANTIZE],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The folder to make, or a file that ends in .gguf.")],
    *,
    scheme: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="int8, int4, int3: codes in groups. w8a8: int8 weights for int8 activations. fp8. gguf:TYPE, such as "
            "gguf:Q4_K_M.",
        ),
    ] = "int4",
    group: Annotated[
        int | None, typer.Option(metavar="N", help="Weights that share a scale; 0: a whole row. Default: 32.")
    ] = None,
    zero_points: Annotated[bool, typer.Option("--zero-points", help="Give each group a zero point, too.")] = False,
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="NAME", help="compressed-tensors, gptq or gguf. Default: by scheme."),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="rtn: round. mse: round on the best grid. awq, gptq: with calibration. auto: the best of them.",
        ),
    ] = "auto",
    calibration: Annotated[
        str, typer.Option(metavar="FILE", help="UTF-8 text like that of your users. Default: builtin.")
    ] = "builtin",
    windows: Annotated[
        int, typer.Option(metavar="N", min=1, max=100_000, help="Windows of 512 tokens to calibrate with.")
    ] = 64,
    keep: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Matrices that stay floats, such as *.down_proj; comma-separated."),
    ] = None,
    table: Annotated[bool, typer.Option(help="Compare the result with the original on four classes of text.")] = True,
    threads: Annotated[int | None, typer.Option(metavar="N", min=1, max=1024, help="Default: all processors.")] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Also write the figures to this file.")
    ] = None,
) -> None:
    from penstock.cli.models.quantize import QuantizeOptions, quantize

    quantize(
        model,
        out,
        QuantizeOptions(scheme, group, zero_points, form, method, calibration, windows, keep, table, threads),
        json_file,
    )


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


def _models(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    from penstock.cli.models.supported import print_supported

    print_supported(as_json)
