"""Arguments and flags of several commands."""

import typer

from penstock.cli import completion

WHICH_MODEL = "A name that penstock list prints, a folder, a GGUF file or a Hugging Face id. Default: smollm2-135m."
MODEL = typer.Argument(metavar="MODEL", help=WHICH_MODEL, autocompletion=completion.model_names)
EMBEDDER = typer.Argument(
    metavar="MODEL",
    help="An embedding model, named as elsewhere. Default: all-minilm-l6-v2.",
    autocompletion=completion.model_names,
)
PROMPT = typer.Argument(metavar="PROMPT", help="Answer this instead of a chat. MODEL may be left out.")
NAMED = typer.Option(
    "--model", metavar="MODEL", help="The same as the argument MODEL.", autocompletion=completion.model_names
)
FLAG_ONLY = typer.Option("--model", metavar="MODEL", help=WHICH_MODEL, autocompletion=completion.model_names)
JSON = typer.Option("--json", metavar="FILE", help="Also write the figures to this file.")
VERSION = typer.Option("--version", is_eager=True, help="Print the version and exit.")
