"""Measures the time to the first token with a shared prefix in the cache and without it.

Prompts share 1,024 tokens and differ in the 32 that follow. After a first prompt, one is sent with the same salt (its
prefix is found) and one with another salt (nothing is found).

    python benchmarks/prefix_cache.py --json benchmarks/results/avx512/prefix_cache.json
"""

import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from make_model import write_model
from results import parser, write

from penstock.bench.workload import random_prompt
from penstock.config import EngineConfig
from penstock.engine.launch import launch
from penstock.messages import EngineClient, GenerateRequest, SamplingParams

PREFIX, SUFFIX = 1024, 32


async def first_token(client: EngineClient, name: str, prompt: tuple[int, ...], salt: str) -> tuple[float, int]:
    """Seconds to the first token, and the number of cached tokens that it reports."""
    sampling = SamplingParams(seed=0, max_tokens=1, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(request_id=name, prompt_ids=prompt, sampling=sampling, cache_salt=salt)
    start = time.perf_counter()
    async for delta in client.generate(request):
        if delta.token_ids:
            return time.perf_counter() - start, delta.cached_tokens
    raise RuntimeError("the stream ended without a token")


async def measure(model: Path, pairs: int) -> dict[str, Any]:
    config = EngineConfig(model=str(model), name="bench", max_model_len=2048, max_num_seqs=8, kv_cache_bytes=256 << 20)
    client = await launch(config)
    source = random.Random(0)
    cold, warm, cached_same, cached_other = [], [], [], []
    try:
        for pair in range(pairs + 1):
            prefix = random_prompt(PREFIX, client.info.vocab_size, source)
            tails = [random_prompt(SUFFIX, client.info.vocab_size, source) for _ in range(3)]
            await first_token(client, f"{pair}-seed", prefix + tails[0], f"salt-{pair}")
            seconds_warm, same = await first_token(client, f"{pair}-same", prefix + tails[1], f"salt-{pair}")
            seconds_cold, other = await first_token(client, f"{pair}-other", prefix + tails[2], f"other-{pair}")
            if pair:  # the first pair warms up
                warm.append(seconds_warm)
                cold.append(seconds_cold)
                cached_same.append(same)
                cached_other.append(other)
    finally:
        await client.close()
    return {
        "shared_prefix": PREFIX,
        "prompt": PREFIX + SUFFIX,
        "ttft_ms_miss": round(statistics.median(cold) * 1e3, 2),
        "ttft_ms_hit": round(statistics.median(warm) * 1e3, 2),
        "times_sooner": round(statistics.median(cold) / statistics.median(warm), 2),
        "cached_tokens_same_salt": min(cached_same),
        "cached_tokens_other_salt": max(cached_other),
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--shape", default="qwen3-0.6b")
    arguments.add_argument("--model", type=Path, help="a checkpoint's folder; default: random weights of --shape")
    arguments.add_argument("--pairs", type=int, default=5)
    args = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or write_model(Path(folder) / args.shape, args.shape)
        label = {"model": args.model.name} if args.model else {"model": "random weights", "shape": args.shape}
        write({"benchmark": "prefix_cache", **label, **asyncio.run(measure(model, args.pairs))}, args.json)


if __name__ == "__main__":
    main()
