"""Defines the command line: `penstock serve | run | plan | bench`, and the commands of `cli/models`."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import completion, usage
from penstock.cli.chat.flags import CHAT
from penstock.cli.fleet.commands import add_fleet_commands
from penstock.cli.models.commands import add_model_commands
from penstock.cli.operate.commands import add_operate_commands
from penstock.cli.options import ENGINE, SERVER, Flags, takes
from penstock.cli.sections import SectionedHelp
from penstock.cli.simulate.commands import add_simulate_commands
from penstock.cli.tenants.commands import add_tenant_commands
from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.engine.link.engine_child import EngineChild

WHICH_MODEL = "A name that penstock list prints, a folder, a GGUF file or a Hugging Face id. Default: smollm2-135m."
MODEL = typer.Argument(
    metavar="MODEL",
    help=WHICH_MODEL,
    autocompletion=completion.model_names,
)
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
AGAINST = typer.Option(metavar="MODEL", help="Compare with MODEL: perplexity, KL divergence, greedy tokens.")
JSON = typer.Option("--json", metavar="FILE", help="Also write the figures to this file.")
VERSION = typer.Option("--version", is_eager=True, help="Print the version and exit.")
CASES = typer.Option(metavar="CASES", help="NxIN/OUT: N requests of IN prompt and OUT output tokens. Comma-separated.")
RUNS = typer.Option(metavar="N", min=1, max=1000, help="Runs of each case; the median is reported.")

# Plain help, as importing rich would make --help slow.
HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    name="penstock", add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=HELP
)
bench = typer.Typer(name="bench", rich_markup_mode=None)
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
add_simulate_commands(app)
add_fleet_commands(app)


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


@bench.command(
    cls=SectionedHelp,
    short_help="Measure the output tokens per second of fixed cases.",
    help="Measure the output tokens per second of fixed cases, beside their roofline and host time.",
)
@takes(ENGINE)
def throughput(
    *,
    model: Annotated[str | None, MODEL] = None,
    cases: Annotated[str, CASES] = "1x256/64,8x256/64,32x256/128",
    runs: Annotated[int, RUNS] = 3,
    json_file: Annotated[str | None, JSON] = None,
    flags: Flags,
) -> None:
    from penstock.cli.bench.commands import offline

    offline(model, cases, runs, json_file, flags, columns="throughput")


@bench.command(
    cls=SectionedHelp,
    short_help="Measure the time to the first token and between tokens.",
    help="Measure the time to the first token and between tokens of fixed cases.",
)
@takes(ENGINE)
def latency(
    *,
    model: Annotated[str | None, MODEL] = None,
    cases: Annotated[str, CASES] = "1x128/32,1x1024/32",
    runs: Annotated[int, RUNS] = 3,
    json_file: Annotated[str | None, JSON] = None,
    flags: Flags,
) -> None:
    from penstock.cli.bench.commands import offline

    offline(model, cases, runs, json_file, flags, columns="latency")


@bench.command(
    cls=SectionedHelp,
    short_help="Measure the perplexity of a text, with and without quantisation.",
    help="Measure the perplexity of a text. With --quantization or --kv-cache-dtype, also that of the model without "
    "them, and the change.",
)
@takes(ENGINE)
def quality(
    *,
    model: Annotated[str | None, MODEL] = None,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="A UTF-8 file. Default: the help texts of Python, in English.")
    ] = None,
    windows: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=1_000_000, help="Windows to score. Default: 32, or all of --tokens-in."),
    ] = None,
    window_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=2, max=10_000_000, help="Tokens of a window. Default: 512."),
    ] = None,
    dense: Annotated[
        bool, typer.Option(help="If something is quantised, also score the model without that, to compare.")
    ] = True,
    tokens_in: Annotated[
        str | None, typer.Option(metavar="FILE", help="Score these token ids: a JSON list of windows, lists of ids.")
    ] = None,
    tokens_out: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the scored token ids, for --tokens-in or another engine.")
    ] = None,
    against: Annotated[str | None, AGAINST] = None,
    json_file: Annotated[str | None, JSON] = None,
    flags: Flags,
) -> None:
    from penstock.cli.bench.quality import QualityOptions
    from penstock.cli.bench.quality import quality as command

    options = QualityOptions(text, windows, window_tokens, dense, tokens_in, tokens_out, against)
    command(model, options, json_file, flags)


@bench.command(
    "serve", help="Send load to a running server over HTTP. Reports latencies, rates and goodput as users see them."
)
def bench_serve(
    *,
    url: Annotated[str, typer.Option(metavar="URL", help="The server's address.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's id. Default: the first that the server lists.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", envvar="PENSTOCK_API_KEY", help="API key to send.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(metavar="N", min=1, max=1_000_000, help="Number of requests.")] = 100,
    input_len: Annotated[str, typer.Option(metavar="N|LOW-HIGH", help="Prompt tokens of a request.")] = "128",
    output_len: Annotated[str, typer.Option(metavar="N|LOW-HIGH", help="Output tokens of a request.")] = "32",
    shared_prefix: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, max=10_000_000, help="Tokens that all prompts begin with, beside --input-len."
        ),
    ] = 0,
    vocab_size: Annotated[
        int, typer.Option(metavar="N", min=16, max=10_000_000, help="Prompt token ids are drawn below this number.")
    ] = 8000,
    request_rate: Annotated[
        float | None, typer.Option(metavar="N", help="Requests per second. Default: all at once.")
    ] = None,
    burstiness: Annotated[
        float,
        typer.Option(
            metavar="N",
            help="Shape of the gaps' gamma distribution: 1 is Poisson, less is burstier, inf means equal gaps.",
        ),
    ] = 1.0,
    concurrency: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=100_000, help="Most requests at a time. Default: no limit.")
    ] = None,
    slo: Annotated[
        str | None, typer.Option(metavar="LIMITS", help="Limits in seconds for goodput: ttft=0.5,tpot=0.05,e2e=10.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of lengths, prompts and arrival times.")] = 0,
    json_file: Annotated[str | None, JSON] = None,
) -> None:
    from penstock.cli.bench.commands import Load, online

    lengths = (input_len, output_len, shared_prefix, vocab_size)
    online(
        url, model, api_key, Load(num_prompts, *lengths, request_rate, burstiness, concurrency, slo, seed), json_file
    )


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
