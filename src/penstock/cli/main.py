"""`penstock serve | run | plan | bench`."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

import penstock
from penstock.cli.options import ENGINE, SERVER, Flags, takes

if TYPE_CHECKING:
    from penstock.engine.link.engine_child import EngineChild

MODEL = typer.Argument(metavar="MODEL", help="A folder or a hub id. Default: the embedded model.")
NAMED = typer.Option("--model", metavar="MODEL", help="The same, as a flag.")
JSON = typer.Option("--json", metavar="FILE", help="Also write the figures here.")
VERSION = typer.Option("--version", is_eager=True, help="Show the version and exit.")
RUNS = typer.Option(min=1, help="Runs of each case; the median is reported.")

# Plain help: rich alone would take half of the time that --help may take.
app = typer.Typer(name="penstock", add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
bench = typer.Typer(name="bench", no_args_is_help=True, rich_markup_mode=None, help="Measure an engine or a server.")
app.add_typer(bench)


@app.callback(help="An LLM inference server.", invoke_without_command=True)
def root(context: typer.Context, version: Annotated[bool, VERSION] = False) -> None:
    if version:
        typer.echo(f"penstock {penstock.__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(help="Serve a model over HTTP (OpenAI's API) on http://127.0.0.1:8000.")
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
    short_help="Stream a completion to the terminal.",
    help="Stream a completion to the terminal; without a prompt, an interactive session.",
)
@takes(ENGINE)
def run(
    *,
    model: Annotated[str | None, MODEL] = None,
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="Text to complete.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Output tokens at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampler.")] = 0,
    chat: Annotated[bool, typer.Option(help="Send the prompt through the model's chat template.")] = False,
    flags: Flags,
) -> None:
    from penstock.cli.run import Wanted
    from penstock.cli.run import run as command

    command(model, prompt, Wanted(max_tokens, temperature, top_p, seed, chat), flags)


@app.command(
    short_help="Show what a model would need, and every setting.",
    help="Show what a model would need and every setting with its source, without loading it.",
)
@takes(SERVER, ENGINE)
def plan(
    *,
    model: Annotated[str | None, MODEL] = None,
    named: Annotated[str | None, NAMED] = None,
    hardware: Annotated[
        str | None, typer.Option(metavar="NxNAME", help="8xH100, or 8x80GiB:3350GB/s:450GB/s. Default: this machine.")
    ] = None,
    link: Annotated[
        str | None, typer.Option(metavar="SPEED", help="Between ranks: 25GB/s. Default: the hardware's.")
    ] = None,
    json_file: Annotated[str | None, JSON] = None,
    flags: Flags,
) -> None:
    from penstock.cli.plan import plan as command

    command(_one_model(model, named), hardware, link, json_file, flags)


@app.command(
    short_help="Check that an event log replays to the same plans.",
    help="Run the scheduler again on a log of serve --event-log. Exit status: 0 for the same plans, 1 for others.",
)
def replay(log: Annotated[str, typer.Argument(metavar="FILE", help="Written by penstock serve --event-log.")]) -> None:
    from penstock.cli.replay import replay as command

    sys.exit(command(log))


@bench.command(help="Output tokens a second of fixed cases, with roofline and host time.")
@takes(ENGINE)
def throughput(
    *,
    model: Annotated[str | None, MODEL] = None,
    cases: Annotated[str, typer.Option(help="NxIN/OUT, comma-separated.")] = "1x256/64,8x256/64,32x256/128",
    runs: Annotated[int, RUNS] = 3,
    json_file: Annotated[str | None, JSON] = None,
    flags: Flags,
) -> None:
    from penstock.cli.bench import offline

    offline(model, cases, runs, json_file, flags, columns="throughput")


@bench.command(help="Time to the first token and between tokens of fixed cases.")
@takes(ENGINE)
def latency(
    *,
    model: Annotated[str | None, MODEL] = None,
    cases: Annotated[str, typer.Option(help="NxIN/OUT, comma-separated.")] = "1x128/32,1x1024/32",
    runs: Annotated[int, RUNS] = 3,
    json_file: Annotated[str | None, JSON] = None,
    flags: Flags,
) -> None:
    from penstock.cli.bench import offline

    offline(model, cases, runs, json_file, flags, columns="latency")


@bench.command(help="Where the time of a step goes, decoding or a prompt's: op by op, and what the host takes.")
@takes(ENGINE)
def step(
    *,
    model: Annotated[str | None, MODEL] = None,
    rows: Annotated[str, typer.Option(help="Sequences in a step, comma-separated: steps of each.")] = "1,8,32",
    context: Annotated[int, typer.Option(min=0, help="Tokens that each has in the KV cache.")] = 256,
    prompt: Annotated[
        int, typer.Option(min=0, metavar="N", help="Each computes N tokens of its prompt. Default: 0, they decode.")
    ] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each; medians are shown.")] = 40,
    plot: Annotated[str | None, typer.Option(metavar="FILE.svg", help="Also draw the steps here.")] = None,
    json_file: Annotated[str | None, JSON] = None,
    flags: Flags,
) -> None:
    from penstock.cli.bench import step as command

    command(model, rows, context, prompt, steps, plot, json_file, flags)


@bench.command(help="Every native op by itself: GB/s, GFLOP/s and share of the roofline, read from memory.")
def kernels(
    *,
    isa: Annotated[str | None, typer.Option(help="Instruction set. Default: the best here.")] = None,
    threads: Annotated[int, typer.Option(min=0, help="Threads that compute. Default: every core.")] = 0,
    ops: Annotated[str | None, typer.Option(metavar="NAME,...", help="Only these.")] = None,
    json_file: Annotated[str | None, JSON] = None,
) -> None:
    from penstock.cli.bench import kernels as command

    command(isa, threads, ops, json_file)


@bench.command("serve", help="Load a running server over HTTP: latencies, rates and goodput as its users see them.")
def bench_serve(
    *,
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model id. Default: the first the server lists.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="PENSTOCK_API_KEY", help="Key to send.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 100,
    input_len: Annotated[str, typer.Option(metavar="N|LOW-HIGH", help="Prompt tokens.")] = "128",
    output_len: Annotated[str, typer.Option(metavar="N|LOW-HIGH", help="Output tokens.")] = "32",
    shared_prefix: Annotated[int, typer.Option(min=0, help="Tokens all prompts begin with, besides.")] = 0,
    vocab_size: Annotated[int, typer.Option(min=16, help="Prompt token ids are drawn below this.")] = 8000,
    request_rate: Annotated[float | None, typer.Option(help="Requests a second. Default: all at once.")] = None,
    burstiness: Annotated[float, typer.Option(help="Shape of the gamma gaps; 1 is Poisson, less is burstier.")] = 1.0,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Requests open at a time.")] = None,
    slo: Annotated[str | None, typer.Option(help="For goodput, in seconds: ttft=0.5,tpot=0.05,e2e=10.")] = None,
    seed: Annotated[int, typer.Option(help="Of lengths, prompts and arrivals.")] = 0,
    json_file: Annotated[str | None, JSON] = None,
) -> None:
    from penstock.cli.bench import Load, online

    lengths = (input_len, output_len, shared_prefix, vocab_size)
    online(
        url, model, api_key, Load(num_prompts, *lengths, request_rate, burstiness, concurrency, slo, seed), json_file
    )


def _one_model(model: str | None, named: str | None) -> str | None:
    if model is not None and named is not None:
        raise ValueError(f"the model is given twice, as {model!r} and as --model {named!r}: leave one out")
    return model if named is None else named


def main(engine: "EngineChild | None" = None) -> None:
    """Errors meant for a user are one line, not a traceback. `engine` was started for `serve`."""
    try:
        app(obj=engine)
    except Exception as error:
        status = _status(error)
        if status is None:
            raise
        print(f"penstock: {error}", file=sys.stderr)
        sys.exit(status)


def _status(error: Exception) -> int | None:
    """How a command ends by an error; None for one that says something to programmers only."""
    from penstock.messages import EngineError

    if isinstance(error, ValueError):  # bad settings, models and checkpoints: each says what to change
        return 2
    if isinstance(error, OSError | EngineError):  # a full disk, a terminal that is gone, an engine that died
        return 1
    return None
