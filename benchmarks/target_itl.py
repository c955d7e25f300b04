"""Measures the gaps between 32 readers' tokens while a prompt of 8 k is prefilled, with --target-itl and without.

The runs alternate. The readers decode until the prompt's first token is there. Throughput is the tokens of prompt and
readers in this time, each weighted with the time that it takes by itself, so that it is 1 if nothing is lost.

    python benchmarks/target_itl.py --json benchmarks/results/avx512/target_itl.json
"""

import asyncio
import contextlib
import random
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from results import parser, write

from penstock.bench.workload import percentile, random_prompt
from penstock.config import EngineConfig
from penstock.engine.client import StreamingClient
from penstock.engine.launch import launch
from penstock.messages import GenerateRequest, SamplingParams
from penstock.weights.packaged import SMOLLM2

READERS, PROMPT, ALONE = 32, 64, 24  # ALONE: tokens of each reader before the prompt joins


class Run(NamedTuple):
    alone: list[float]  # seconds between a reader's tokens before the prompt joins
    beside: list[float]  # and while it is prefilled
    tokens: int  # of all readers in that time
    seconds: float  # from the prompt to its first token


class Readers:
    """Streams whose gaps between tokens are noted."""

    def __init__(self, client: StreamingClient, source: random.Random) -> None:
        self.gaps: list[tuple[float, float]] = []  # (end, seconds)
        self._client = client
        vocab = client.info.vocab_size
        self._tasks = [
            asyncio.create_task(self._read(request(f"reader-{i}", random_prompt(PROMPT, vocab, source), 8000)))
            for i in range(READERS)
        ]

    async def _read(self, asked: GenerateRequest) -> None:
        last = 0.0
        async with contextlib.aclosing(self._client.generate(asked)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                now = time.perf_counter()
                if last and delta.token_ids:
                    self.gaps += [(now, (now - last) / len(delta.token_ids))] * len(delta.token_ids)
                last = now

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def request(name: str, prompt: tuple[int, ...], most: int) -> GenerateRequest:
    sampling = SamplingParams(seed=1, max_tokens=most, temperature=0.0, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_ids=tuple(prompt), sampling=sampling)


async def first_token(client: StreamingClient, asked: GenerateRequest) -> float:
    start = time.perf_counter()
    async for _ in client.generate(asked):
        pass
    return time.perf_counter() - start


async def measure(model: Path, target_ms: float, length: int, threads: int) -> tuple[Run, float]:
    """Returns the run, and the seconds of the prompt by itself in the same engine."""
    config = EngineConfig(
        model=str(model),
        name="bench",
        max_model_len=8192,
        max_num_seqs=READERS + 1,
        max_num_batched_tokens=512,
        kv_cache_dtype="int8",
        kv_cache_bytes=450 << 20,
        enable_prefix_caching=False,
        target_itl=target_ms,
        threads=threads,
    )
    client = await launch(config)
    source, vocab = random.Random(0), client.info.vocab_size
    try:
        prompt = random_prompt(length, vocab, source)
        by_itself = await first_token(client, request("by-itself", prompt, 1))
        readers = Readers(client, source)
        while len(readers.gaps) < READERS * ALONE:
            await asyncio.sleep(0.01)
        joined = time.perf_counter()
        seconds = await first_token(client, request("long", prompt, 1))
        await readers.stop()
        alone = [gap for end, gap in readers.gaps[READERS * ALONE // 2 :] if end <= joined]
        beside = [gap for end, gap in readers.gaps if joined < end <= joined + seconds]
        return Run(alone, beside, len(beside), seconds), by_itself
    finally:
        await client.close()


def figures(runs: list[tuple[Run, float]], target_ms: float) -> dict[str, Any]:
    beside = [gap for run, _ in runs for gap in run.beside]
    # The time that the same work takes apart: the prompt by itself, and the readers without it.
    work = [(by_itself + run.tokens / READERS * median(run.alone)) / run.seconds for run, by_itself in runs]
    p99 = percentile(beside, 0.99) * 1e3
    found = {
        "itl_ms_alone": round(median(gap for run, _ in runs for gap in run.alone) * 1e3, 1),
        "itl_ms_p50": round(percentile(beside, 0.5) * 1e3, 1),
        "itl_ms_p99": round(p99, 1),
        "itl_ms_max": round(max(beside) * 1e3, 1),
        "long_prompt_ttft_s": round(median(run.seconds for run, _ in runs), 2),
        "prompt_by_itself_s": round(median(by_itself for _, by_itself in runs), 2),
        "throughput": round(median(work), 3),
    }
    return found | ({"target_ms": target_ms, "p99_over_target": round(p99 / target_ms, 2)} if target_ms else {})


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", type=Path, help="a folder or a GGUF file; default: SmolLM2-135M-Instruct")
    arguments.add_argument("--target-ms", type=float, default=0.0, help="0: three times the readers' gap alone")
    arguments.add_argument("--prompt", type=int, default=8000, help="tokens of the prompt that joins, at most 8100")
    arguments.add_argument("--runs", type=int, default=1)
    arguments.add_argument("--threads", type=int, default=1)
    args = arguments.parse_args()
    model = args.model or SMOLLM2.locate()
    off, on, target = [], [], args.target_ms
    for _ in range(args.runs):
        off.append(asyncio.run(measure(model, 0.0, args.prompt, args.threads)))
        target = target or round(3e3 * median(off[0][0].alone))
        on.append(asyncio.run(measure(model, target, args.prompt, args.threads)))
    rows = {"off": figures(off, 0.0), "on": figures(on, target)}
    loss = 1 - rows["on"]["throughput"] / rows["off"]["throughput"]
    result = {
        "benchmark": "target_itl",
        "model": model.name,
        "threads": args.threads,
        "readers": READERS,
        "prompt": args.prompt,
        "runs": args.runs,
        **rows,
        "throughput_loss": round(loss, 3),
    }
    write(result, args.json)


if __name__ == "__main__":
    main()
