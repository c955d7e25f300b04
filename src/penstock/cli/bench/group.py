"""Defines the commands of `penstock bench`."""

from typing import Annotated

import typer

from penstock.cli.arguments import JSON, MODEL
from penstock.cli.options import ENGINE, Flags, takes
from penstock.cli.sections import SectionedHelp

AGAINST = typer.Option(metavar="MODEL", help="Compare with MODEL: perplexity, KL divergence, greedy tokens.")
CASES = typer.Option(metavar="CASES", help="NxIN/OUT: N requests of IN prompt and OUT output tokens. Comma-separated.")
RUNS = typer.Option(metavar="N", min=1, max=1000, help="Runs of each case; the median is reported.")

bench = typer.Typer(name="bench", rich_markup_mode=None)


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
    wire: Annotated[
        str, typer.Option(metavar="NAME", help="openai for completions, kserve for one-shot models: tensors of a row.")
    ] = "openai",
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
    load = Load(num_prompts, *lengths, request_rate, burstiness, concurrency, slo, seed)
    online(url, model, api_key, load, json_file, wire)
