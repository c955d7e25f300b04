"""Defines the command line: `penstock serve | run | plan | bench`, and the commands of `cli/models`."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import completion, usage
from penstock.cli.arguments import EMBEDDER, FLAG_ONLY, JSON, MODEL, NAMED, PROMPT, VERSION
from penstock.cli.bench.group import bench
from penstock.cli.chat.flags import CHAT
from penstock.cli.fleet.commands import add_fleet_commands
from penstock.cli.models.commands import add_model_commands
from penstock.cli.operate.commands import add_operate_commands
from penstock.cli.options import ENGINE, SERVER, Flags, takes
from penstock.cli.route.commands import add_route_commands
from penstock.cli.sections import SectionedHelp
from penstock.cli.simulate.commands import add_simulate_commands
from penstock.cli.tenants.commands import add_tenant_commands
from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.engine.link.engine_child import EngineChild

# Plain help, as importing rich would make --help slow.
HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    name="penstock", add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=HELP
)
app.add_typer(bench)


@app.callback(help="An LLM inference server.", invoke_without_command=True)
def root(context: typer.Context, version: Annotated[bool, VERSION] = False) -> None:
    if version:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@bench.callback(help="Measure an engine or a server.", invoke_without_command=True)
def bench_root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(
    cls=SectionedHelp,
    short_help="Serve a model over HTTP.",
    help="Serve a model over HTTP with OpenAI's API, by default on http://127.0.0.1:8000.",
)
@takes(SERVER, ENGINE)
def serve(
    context: typer.Context,
    *,
    model: Annotated[str | None, MODEL] = None,
    named: Annotated[str | None, NAMED] = None,
    flags: Flags,
) -> None:
    from penstock.cli.serve import serve as command

    command(_one_model(model, named), flags, context.obj)


@app.command(
    cls=SectionedHelp,
    short_help="Chat with a model in the terminal.",
    help="Chat with a model in the terminal, or answer one PROMPT. Text on standard input is added to the prompt.",
)
@takes(CHAT, ENGINE)
def run(
    context: typer.Context,
    *,
    model: Annotated[str | None, MODEL] = None,
    prompt: Annotated[list[str] | None, PROMPT] = None,
    named: Annotated[str | None, NAMED] = None,
    flags: Flags,
) -> None:
    from penstock.cli.run import run as command

    words = [] if model is None else [model, *(prompt or [])]
    command(words, named, flags, context.obj)


@app.command(
    cls=SectionedHelp,
    short_help="Show the memory, splits and settings of a model.",
    help="Show a model's memory, its possible splits, and every setting with its source. Loads no weights.",
)
@takes(SERVER, ENGINE)
def plan(
    *,
    model: Annotated[str | None, MODEL] = None,
    named: Annotated[str | None, NAMED] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="NxNAME", help="Plan for this hardware: 8xH100, or 8x80GiB:3350GB/s:450GB/s. Default: this machine."
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(metavar="SPEED", help="Speed of the links between ranks: 25GB/s. Default: the hardware's."),
    ] = None,
    json_file: Annotated[str | None, JSON] = None,
    flags: Flags,
) -> None:
    from penstock.cli.plan import plan as command

    command(_one_model(model, named), hardware, link, json_file, flags)


@app.command(
    cls=SectionedHelp,
    short_help="Print the embeddings of texts.",
    help="Print the embedding of each TEXT as a line of JSON. Without TEXT, or with -, each line of standard input is "
    "a text.",
)
@takes(ENGINE)
def embed(
    *,
    model: Annotated[str | None, EMBEDDER] = None,
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="What to embed; -: standard input.")] = None,
    flags: Flags,
) -> None:
    from penstock.cli.embed import embed as command

    command(model, texts or ["-"], flags)


add_model_commands(app)
add_operate_commands(app)
add_tenant_commands(app)
add_fleet_commands(app)
add_route_commands(app)
add_simulate_commands(app)


@app.command(
    "completion",
    cls=usage.PlainUsage,
    short_help="Print the script that completes words with Tab.",
    help="Print the script with which a shell completes commands, flags and models: bash, zsh or fish.",
)
def print_completion(
    shell: Annotated[
        str,
        typer.Argument(
            metavar="SHELL", autocompletion=completion.one_of(*completion.SCRIPTS), help="bash, zsh or fish."
        ),
    ],
) -> None:
    typer.echo(completion.script(shell), nl=False)


@app.command(
    cls=SectionedHelp,
    short_help="Check what clients will meet when they use a model.",
    help="Check a model as it is loaded: template, special tokens, stop tokens, answers, quality. Exit status: 0, or 1 "
    "if there is a problem that clients will meet.",
)
@takes(ENGINE)
def verify(
    *,
    model: Annotated[str | None, MODEL] = None,
    json_file: Annotated[str | None, JSON] = None,
    flags: Flags,
) -> None:
    from penstock.cli.verify import verify as command

    sys.exit(command(model, json_file, flags))


@app.command(
    short_help="Look for a server's watermark in a text.",
    help="Say whether a text has the watermark of a key, which PENSTOCK_WATERMARK_KEY or a file of --config has. Exit "
    "status: 0 if it has, else 1.",
)
def detect(
    *,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="A text, a file, or - for standard input.")] = "-",
    model: Annotated[str | None, FLAG_ONLY] = None,
    scheme: Annotated[
        str | None, typer.Option("--watermark", metavar="NAME", help="green-list or gumbel. Default: both.")
    ] = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="YAML file with settings of the server.")] = None,
    json_file: Annotated[str | None, JSON] = None,
) -> None:
    from penstock.cli.detect import detect_watermark

    flags = {name: value for name, value in (("watermark", scheme), ("config", config)) if value is not None}
    sys.exit(detect_watermark(text, model, json_file, flags))


@app.command(
    cls=SectionedHelp,
    short_help="Answer the requests of a file.",
    help="Answer the requests of a file: lines as in OpenAI's batch API. A run that was interrupted goes on where it "
    "ended if the same command is given again.",
)
@takes(ENGINE)
def batch(
    requests: Annotated[str, typer.Argument(metavar="REQUESTS", help="A file of JSON lines.")],
    answers: Annotated[str, typer.Argument(metavar="ANSWERS", help="The file to write: a JSON line for each request.")],
    *,
    named: Annotated[str | None, FLAG_ONLY] = None,
    flags: Flags,
) -> None:
    from penstock.cli.batch import batch as command

    sys.exit(command(requests, answers, named, flags))


@app.command(
    short_help="Watch what a running server does.",
    help="Show a running server's batch, rates, latencies, cache and memory, from its metrics. Ctrl-C ends it.",
)
def top(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server's address.")] = "http://127.0.0.1:8000",
    *,
    once: Annotated[bool, typer.Option("--once", help="Print the figures of one interval, and end.")] = False,
    interval: Annotated[float, typer.Option(metavar="SECONDS", min=0.2, max=3600, help="Between two looks.")] = 1.0,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", envvar="PENSTOCK_API_KEY", help="API key to send.")
    ] = None,
) -> None:
    from penstock.cli.top.command import top as command

    command(url, once, interval, api_key)


@app.command(
    cls=usage.PlainUsage,
    short_help="Check that an event log replays to the same plans.",
    help="Run the scheduler again on a log of serve --event-log. Exit status: 0 for the same plans, 1 for others.",
)
def replay(log: Annotated[str, typer.Argument(metavar="FILE", help="Written by penstock serve --event-log.")]) -> None:
    from penstock.cli.replay import replay as command

    sys.exit(command(log))


def _one_model(model: str | None, named: str | None) -> str | None:
    if model is not None and named is not None:
        raise ValueError(f"the model is given twice, as {model!r} and as --model {named!r}: leave one out")
    return model if named is None else named


def main(engine: "EngineChild | None" = None) -> None:
    """Runs the command line. An error for the user is one line, not a traceback.

    `engine` is an engine process that was started for `serve` or `run` before the imports.
    """
    completion.enable()
    usage.main(app, engine)
