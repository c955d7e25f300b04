"""`--target-itl` with the real engine and model: tokens stay the same, and readers keep their pace."""

import asyncio
import contextlib
import time

import pytest

from penstock.bench.workload import percentile
from penstock.config import EngineConfig
from penstock.engine.launch import launch
from penstock.messages import GenerateRequest, SamplingParams
from tests.smollm2 import smollm2

READERS, LONG = 8, 1500


def request(name: str, length: int, most: int) -> GenerateRequest:
    prompt = tuple((hash((len(name), i)) % 40000) + 100 for i in range(length))
    return GenerateRequest(
        request_id=name,
        prompt_ids=prompt,
        sampling=SamplingParams(seed=1, max_tokens=most, temperature=0.0, ignore_eos=True),
    )


async def measure(target_ms: float) -> tuple[list[list[int]], list[float], list[float]]:
    """The tokens of readers and prompt, and the gaps of readers before and while the prompt is prefilled."""
    config = EngineConfig(
        model=str(smollm2()),
        name="bench",
        max_model_len=2048,
        max_num_seqs=READERS + 1,
        kv_cache_bytes=200 << 20,
        enable_prefix_caching=False,
        target_itl=target_ms,
        threads=1,
    )
    client = await launch(config)
    gaps: list[tuple[float, float]] = []

    async def read(asked: GenerateRequest, *, noted: bool = True) -> list[int]:
        tokens: list[int] = []
        last = 0.0
        async with contextlib.aclosing(client.generate(asked)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                now = time.monotonic()
                if last and noted:
                    gaps.append((now, now - last))
                last = now
                tokens += delta.token_ids
        return tokens

    try:
        await read(request("teaches", LONG, 1), noted=False)
        readers = [asyncio.create_task(read(request("reader" + "x" * i, 20, 200))) for i in range(READERS)]
        while len(gaps) < READERS * 30:
            await asyncio.sleep(0.005)
        joined = time.monotonic()
        long = await read(request("long" * 20, LONG, 1), noted=False)
        ended = time.monotonic()
        outputs = [*await asyncio.gather(*readers), long]
        alone = [gap for end, gap in gaps[READERS * 10 :] if end <= joined]
        # Gaps that began before the prompt's end: tokens of one step come in any order.
        return outputs, alone, [gap for end, gap in gaps if joined < end < ended + gap]
    finally:
        await client.close()


@pytest.mark.rare
def test_readers_keep_their_pace_and_tokens_stay_the_same() -> None:
    plain, alone, uncut = asyncio.run(measure(0.0))
    target = 4 * percentile(alone, 0.5)
    cut, _, beside = asyncio.run(measure(target * 1e3))
    assert cut == plain
    assert percentile(beside, 0.5) <= 1.5 * target
    assert max(uncut) > 4 * percentile(beside, 0.5), "the prompt takes too short to show whether it is cut"
