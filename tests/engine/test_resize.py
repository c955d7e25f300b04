"""A KV cache whose size changes while the engine runs: tokens stay the same, and the log replays."""

import asyncio
import random
from pathlib import Path

import pytest

from penstock.config import EngineConfig
from penstock.engine.launch import launch
from penstock.messages import GenerateRequest, RequestRejected, Resize, SamplingParams
from penstock.schedule import replay
from penstock.schedule.log import Resized, read_events
from penstock.weights.packaged import embedded_model
from tests.schedule.invariants import check_scheduler
from tests.schedule.simulated import request, simulation

STREAMS, TOKENS = 6, 40


def asked(number: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"r{number}",
        prompt_ids=tuple(range(20 + number, 60 + 2 * number)),
        sampling=SamplingParams(seed=number, max_tokens=TOKENS, temperature=1.0, ignore_eos=True),
    )


async def run(log: Path, *, resizes: bool) -> tuple[list[list[int]], int]:
    """The tokens of all streams, and the number of preemptions."""
    config = EngineConfig(
        model=str(embedded_model()),
        name="m",
        max_model_len=128,
        max_num_seqs=STREAMS,
        kv_cache_bytes=4 << 20,
        kv_reserve_bytes=64 << 20,
        event_log=str(log),
    )
    client = await launch(config, in_process=True)

    async def read(number: int) -> list[int]:
        return [token async for delta in client.generate(asked(number)) for token in delta.token_ids]

    try:
        streams = [asyncio.create_task(read(number)) for number in range(STREAMS)]
        source = random.Random(1)
        while resizes and not all(stream.done() for stream in streams):
            await client.control(Resize(source.choice((0.25, 0.4, 0.6, 1.0))))
        with pytest.raises(RequestRejected, match="for one sequence of 128 tokens"):
            await client.control(Resize(0.01))
        return [await stream for stream in streams], client.stats().preemptions
    finally:
        await client.close()


def test_tokens_do_not_depend_on_the_size_of_the_cache(tmp_path: Path) -> None:
    plain, _ = asyncio.run(run(tmp_path / "plain", resizes=False))
    resized, preemptions = asyncio.run(run(tmp_path / "resized", resizes=True))
    assert resized == plain and preemptions > 0
    with (tmp_path / "resized").open("rb") as lines:
        events = list(read_events(lines))
    assert sum(isinstance(event, Resized) for event in events) > 3
    assert len(replay(events)) > TOKENS


@pytest.mark.rare
def test_ten_thousand_resizes_lose_no_block() -> None:
    sim = simulation(blocks=60, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64)
    source = random.Random(2)
    for number in range(10_000):
        if len(sim.requests) < 8 or not sim.scheduler.has_work:
            sim.add(request(f"r{number}", source.randrange(1, 40), 20))
        need = sim.scheduler._cache.demand(63)[0]
        sim.scheduler.resize((source.randrange(need + 1, 61),))
        sim.step()
        check_scheduler(sim.scheduler)
    sim.run()
    sim.check_drained()
    assert sim.scheduler.stats().preemptions > 100
