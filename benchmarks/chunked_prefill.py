"""Measures the gaps between 32 readers' tokens when an 8 k prompt joins, with chunked prefill and without.

"Without" is a token budget that takes the whole prompt in one step. Both engines get the same requests.

    python benchmarks/chunked_prefill.py --json benchmarks/results/avx512/chunked_prefill.json \\
        --plot docs/images/chunked_prefill.png
"""

import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from make_model import write_model
from results import parser, write

from penstock.bench.offline import run_item
from penstock.bench.timeline import Timeline
from penstock.bench.workload import WorkloadRequest, percentile, random_prompt
from penstock.config import EngineConfig
from penstock.engine.launch import launch

READERS, PROMPT, OUTPUT, LONG = 32, 64, 96, 8192


async def measure(model: Path, budget: int) -> tuple[list[Timeline], Timeline]:
    """Returns the timelines of the readers and of the long prompt, which arrives after the readers' first tokens."""
    config = EngineConfig(
        model=str(model), name="bench", max_model_len=LONG + 64, max_num_seqs=READERS + 1, max_num_batched_tokens=budget
    )
    client = await launch(config)
    source, vocab = random.Random(0), client.info.vocab_size
    try:
        await run_item(client, WorkloadRequest(random_prompt(64, vocab, source), 4), "warm-up", time.perf_counter())
        start = time.perf_counter()
        items = [WorkloadRequest(random_prompt(PROMPT, vocab, source), OUTPUT) for _ in range(READERS)]
        readers = [asyncio.create_task(run_item(client, item, f"reader-{i}", start)) for i, item in enumerate(items)]
        while (client.stats().computed_tokens < READERS * (PROMPT + 16)) and not readers[0].done():
            await asyncio.sleep(0.01)
        long = await run_item(
            client, WorkloadRequest(random_prompt(LONG, vocab, source), 1), "long", time.perf_counter()
        )
        return list(await asyncio.gather(*readers)), long
    finally:
        await client.close()


def summary(lines: list[Timeline], long: Timeline) -> dict[str, Any]:
    """Figures of the readers' gaps that end after the long prompt arrived."""
    ends = [[time for time, _ in line.stamps][1:] for line in lines]
    pairs = [pair for line, times in zip(lines, ends, strict=True) for pair in zip(times, line.itls, strict=True)]
    gaps = [gap for end, gap in pairs if end > long.sent]
    return {
        "itl_ms_p50": round(percentile(gaps, 0.5) * 1e3, 2),
        "itl_ms_p99": round(percentile(gaps, 0.99) * 1e3, 2),
        "itl_ms_max": round(max(gaps) * 1e3, 2),
        "long_prompt_ttft_ms": round(long.ttft * 1e3, 1),
    }


def plot(series: dict[str, tuple[list[Timeline], Timeline]], path: Path) -> None:
    """Draws the gaps between one reader's tokens over time, for both engines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for name, (lines, long) in series.items():
        line = lines[0]
        times = [stamp for stamp, _ in line.stamps]
        axes.plot([t - long.sent for t in times[1:]], [gap * 1e3 for gap in line.itls], ".-", label=name, linewidth=1)
    axes.axvline(0, color="grey", linestyle=":", label=f"a prompt of {LONG} tokens arrives")
    axes.set(xlabel="seconds", ylabel="gap between a reader's tokens, ms", yscale="log")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--shape", default="tiny")
    arguments.add_argument("--chunk", type=int, default=256, help="the token budget of a step with chunking")
    arguments.add_argument("--plot", type=Path, metavar="PNG")
    args = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / args.shape, args.shape)
        series = {
            f"chunks of {args.chunk}": asyncio.run(measure(model, args.chunk)),
            "whole prompt in one step": asyncio.run(measure(model, LONG + READERS)),
        }
    if args.plot:
        plot(series, args.plot)
    chunked, whole = (summary(*runs) for runs in series.values())
    ratio = round(whole["itl_ms_p99"] / chunked["itl_ms_p99"], 2)
    figures = {"chunk": args.chunk, "chunked": chunked, "whole": whole, "p99_itl_ratio": ratio}
    write({"benchmark": "chunked_prefill", "shape": args.shape, "readers": READERS, **figures}, args.json)


if __name__ == "__main__":
    main()
