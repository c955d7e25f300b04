"""Measures how soon a long session goes on when its KV blocks are read from disk, against computing them again.

Two sessions of 16,384 tokens take turns in a KV cache that has room for one of them, so each turn finds its blocks
evicted. The first turn of each is computed, later ones are read from disk. Before each of these the page cache is told
to drop the files, so reads are of the disk. Then the engine is started again, and one more turn is read. At the end
eight sequences decode while a session returns; the gaps between their tokens are compared with those of the seconds
before.

    python benchmarks/kv_disk.py --model DIR --json benchmarks/results/amx/kv_disk.json
"""

import asyncio
import os
import random
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from calm import Watch
from make_model import write_model
from results import parser, write

from penstock.bench.workload import percentile, random_prompt
from penstock.config import EngineConfig
from penstock.engine.launch import launch
from penstock.messages import EngineClient, GenerateRequest, SamplingParams

OTHERS = 8  # sequences that decode beside
OTHERS_TOKENS = 64  # of their prompts
BESIDE_SECONDS = 10.0  # in which the others decode alone
SPARE = 240  # blocks beside those of a session: for the others, and those that leases leave


async def first_token(client: EngineClient, name: str, prompt: tuple[int, ...]) -> tuple[float, int, int]:
    """Return the seconds to the first token, the tokens that were cached, and the token."""
    sampling = SamplingParams(seed=0, max_tokens=1, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    async for delta in client.generate(GenerateRequest(request_id=name, prompt_ids=prompt, sampling=sampling)):
        if delta.token_ids:
            return time.perf_counter() - start, delta.cached_tokens, delta.token_ids[0]
    raise RuntimeError("the stream ended without a token")


async def written(client: EngineClient, blocks: int) -> float:
    """Wait until the disk has so many blocks. Return the seconds."""
    start = time.perf_counter()
    while client.stats().disk_blocks < blocks:
        if time.perf_counter() > start + 60:
            raise RuntimeError(f"the disk has {client.stats().disk_blocks} of {blocks} blocks after a minute")
        await asyncio.sleep(0.05)
    return time.perf_counter() - start


def drop_page_cache(folder: Path) -> None:
    """Write the files to the disk, and let the kernel forget their pages."""
    for path in folder.glob("*/*"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


class Others:
    """Sequences that decode until they are cancelled, and when their tokens came."""

    def __init__(self, client: EngineClient, source: random.Random, tokens: int) -> None:
        self.stamps: list[list[float]] = [[] for _ in range(OTHERS)]
        prompts = [random_prompt(OTHERS_TOKENS, client.info.vocab_size, source) for _ in range(OTHERS)]
        self.tasks = [asyncio.create_task(self._read(client, i, prompt, tokens)) for i, prompt in enumerate(prompts)]

    async def _read(self, client: EngineClient, i: int, prompt: tuple[int, ...], tokens: int) -> None:
        sampling = SamplingParams(seed=i, max_tokens=tokens, temperature=0.0, ignore_eos=True)
        name = f"other-{i}-{time.perf_counter()}"
        async for delta in client.generate(GenerateRequest(request_id=name, prompt_ids=prompt, sampling=sampling)):
            self.stamps[i] += [time.perf_counter()] * len(delta.token_ids)

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def gaps(self, began: float, ended: float) -> dict[str, float]:
        """Milliseconds between tokens that came in this time."""
        found = [
            (late - early) * 1e3 for stamps in self.stamps for early, late in pairwise(stamps) if began <= late <= ended
        ]
        return {"gaps": len(found), **{f"p{p}": round(percentile(found, p / 100), 1) for p in (50, 99)}}


async def measure(model: Path, folder: Path, session: int, returns: int, kept_in_memory: bool) -> dict[str, Any]:
    block, source = 16, random.Random(0)
    config = EngineConfig(
        model=str(model),
        name="bench",
        max_model_len=session + 64,
        max_num_seqs=OTHERS + 1,
        max_num_batched_tokens=512,
        speculation="off",
        kv_disk=f"{folder},100GiB",
        kv_cache_bytes=(session // block + SPARE) * kv_block_bytes(model, block),
    )
    client = await launch(config)
    vocabulary, blocks = client.info.vocab_size, session // block
    sessions = [random_prompt(session, vocabulary, source) for _ in range(2)]
    computed, read, tokens = [], [], []
    await first_token(client, "warm-up", random_prompt(64, vocabulary, source))
    for i, prompt in enumerate(sessions):
        seconds, cached, token = await first_token(client, f"new-{i}", prompt)
        computed.append({"s": round(seconds, 2), "cached": cached})
        tokens.append(token)
        wrote = await written(client, (i + 1) * (blocks - 1))

    async def turn(name: str, i: int) -> None:
        before = client.stats().disk_reads
        seconds, cached, token = await first_token(client, name, sessions[i])
        if token != tokens[i]:
            raise RuntimeError(f"{name}: the token is {token}, and was {tokens[i]}")
        await asyncio.sleep(0.1)
        read.append({"s": round(seconds, 2), "cached": cached, "blocks_read": client.stats().disk_reads - before})

    for i in range(returns):
        if not kept_in_memory:
            drop_page_cache(folder)
        await turn(f"return-{i}", i % 2)
    after_eviction, read = read, []
    await client.close()
    client = await launch(msgspec.structs.replace(config, incarnation=2))
    if not kept_in_memory:
        drop_page_cache(folder)  # here for the last turn, too: it would delay the streams of the others
    await turn("restarted", 0)
    after_restart, read = read, []

    others = Others(client, source, SPARE * block // (OTHERS + 4) - OTHERS_TOKENS)
    while not all(others.stamps):
        await asyncio.sleep(0.05)
    alone = time.perf_counter()
    await asyncio.sleep(BESIDE_SECONDS)
    joined = time.perf_counter()
    await turn("beside", 1)
    ended = time.perf_counter() - 0.1
    await others.end()
    await client.close()
    before, beside = others.gaps(alone, joined), others.gaps(joined, ended)
    slowest_read = max(each["s"] for each in after_eviction)
    return {
        "tokens": session,
        "blocks": blocks,
        "page_cache": "kept" if kept_in_memory else "dropped",
        "computed": computed,
        "written_after_s": round(wrote, 2),
        "after_eviction": after_eviction,
        "after_restart": after_restart,
        "times_sooner_least": round(min(each["s"] for each in computed) / slowest_read, 1),
        "times_sooner_restarted": round(min(each["s"] for each in computed) / after_restart[0]["s"], 1),
        "beside_others": read[0],
        "others_alone_ms": before,
        "others_meanwhile_ms": beside,
        "others_p99_ratio": round(beside["p99"] / before["p99"], 2),
    }


def kv_block_bytes(model: Path, block: int) -> int:
    config = msgspec.json.decode((model / "config.json").read_bytes())
    heads, layers = config["num_key_value_heads"], config["num_hidden_layers"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * heads * width * layers * block * 2  # keys and values, in bf16


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--shape", default="qwen3-0.6b")
    arguments.add_argument("--model", type=Path, help="a checkpoint's folder; default: random weights of --shape")
    arguments.add_argument("--tokens", type=int, default=16_384, help="of a session")
    arguments.add_argument("--returns", type=int, default=4)
    arguments.add_argument("--page-cache", action="store_true", help="do not drop the files from the page cache")
    arguments.add_argument("--folder", type=Path, help="of the disk that is measured; default: a temporary one")
    args = arguments.parse_args()
    watch, began = Watch(), time.perf_counter()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        model = args.model or write_model(Path(folder) / args.shape, args.shape)
        found = asyncio.run(measure(model, Path(folder) / "kv", args.tokens, args.returns, args.page_cache))
    calm = watch.share(began, time.perf_counter())
    write(
        {"benchmark": "kv_disk", "model": args.model.name if args.model else args.shape, **found, "calm": calm},
        args.json,
    )


if __name__ == "__main__":
    main()
