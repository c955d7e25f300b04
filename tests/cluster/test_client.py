"""A fleet's client over simulated engines: where requests go, and how they go on when an engine ends."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest

from penstock.cluster.client import FleetClient
from penstock.cluster.replica import Replica
from penstock.engine.client import StreamingClient
from penstock.engine.inprocess import start_thread
from penstock.engine.link.ipc import spawn
from penstock.messages import EndsEngines, EngineError, ForgottenBlocks, QueueFull, RequestRejected, ResetCache
from tests.engine.simulated import BACKEND, ENGINE, FATAL_SEED, Answer, Scenario, ask, config, expected
from tests.patience import AT_ONCE, until
from tests.plan_checks import logprob_row
from tests.schedule.simulated import request

SLOW = Scenario(step_seconds=0.005)
Join = Callable[..., Awaitable[Replica]]


@pytest.fixture
async def fleet() -> AsyncIterator[FleetClient]:
    client = FleetClient(clock=time.monotonic, seed=1)
    yield client
    await client.close()


@pytest.fixture
def join(fleet: FleetClient) -> Join:
    async def start(name: str, scenario: Scenario = SLOW, **fields: object) -> Replica:
        """An engine on a thread."""
        return fleet.join(name, await start_thread(config(scenario, **fields), BACKEND))

    return start


async def processes(fleet: FleetClient, names: str) -> list[Replica]:
    """Engines in processes, which are started again when they end."""
    engines = await asyncio.gather(*(spawn(config(SLOW), ENGINE, resumes=True) for _ in names))
    return [fleet.join(name, engine) for name, engine in zip(names, engines, strict=True)]


def lose(replica: Replica, reason: str = "the machine is gone") -> None:
    """End an engine for good, as its front sees it."""
    assert isinstance(replica.engine, StreamingClient)
    replica.engine._streams.end(reason)


# -- where requests go ------------------------------------------------------------------------------------------------


async def test_requests_are_spread(fleet: FleetClient, join: Join) -> None:
    replicas = [await join(name) for name in ("a", "b", "c")]
    asked = [request(f"r{number}", 5, 20) for number in range(24)]
    answers = await asyncio.gather(*(ask(fleet, one) for one in asked))
    assert [answer.choices[0] for answer in answers] == [expected(one) for one in asked]
    assert all(replica.requests >= 5 for replica in replicas)
    assert all(not replica.parts for replica in replicas)
    assert fleet.idle


async def test_a_prompt_goes_where_its_prefix_is(fleet: FleetClient, join: Join) -> None:
    for name in ("a", "b", "c"):
        await join(name)
    prompt = request("first", 40, 1).prompt_ids
    for number in range(6):
        answer = await ask(fleet, request(f"r{number}", prompt, 3))
        assert bool(answer.ends[0].cached_tokens) == bool(number)
    assert sorted(replica.requests for replica in fleet.replicas) == [0, 0, 6]


async def test_the_index_has_the_keys_that_engines_report(fleet: FleetClient, join: Join) -> None:
    """The front computes the same keys as the engine: else reuse would be zero, and nobody would see it."""
    replica = await join("a")
    await join("b")
    asked = request("first", 40, 30)
    await ask(fleet, asked)
    index = fleet._requests.placing.index
    stored = {name: index._engines[name].stored for name in ("a", "b")}
    await until(lambda: len(stored["a"]) + len(stored["b"]) >= 15, "the reports")
    where = "a" if stored["a"] else "b"
    keys: list[bytes] = []
    chain = fleet._requests.placing._chains[(4, "simulated")]
    whole = (*asked.prompt_ids, *expected(asked))
    chain.extend(keys, chain.root(""), whole, (len(whole) - 1) // 4)
    assert set(keys) <= index._engines[where].stored
    await fleet.control(ResetCache())
    await ask(fleet, request("second", 3, 2))
    await until(lambda: not index._engines[where].stored & set(keys), "the report of removals")
    assert replica.status == "ready"


async def test_a_full_engine_sends_requests_to_another(fleet: FleetClient, join: Join) -> None:
    for name in ("a", "b"):
        await join(name, Scenario(step_seconds=0.01), max_num_seqs=1, max_waiting=1)
    asked = [request(f"r{number}", 4, 20) for number in range(4)]
    running = [asyncio.create_task(ask(fleet, one)) for one in asked]
    await asyncio.sleep(0.05)
    with pytest.raises(QueueFull):
        await ask(fleet, request("one more", 4, 4))
    assert fleet.queue.refused == 1
    answers = await asyncio.gather(*running)
    assert [answer.choices[0] for answer in answers] == [expected(one) for one in asked]


async def test_a_request_that_exceeds_every_limit_is_refused_with_all_of_them(fleet: FleetClient, join: Join) -> None:
    await join("a", max_model_len=64)
    await join("b", max_model_len=512)
    with pytest.raises(RequestRejected, match=r"a: 600 tokens .* 64 .*; b: 600 tokens .* 512"):
        await ask(fleet, request("large", 600, 4))
    asked = request("middle", 100, 4)
    assert (await ask(fleet, asked)).choices[0] == expected(asked)


async def test_control_goes_to_every_engine(fleet: FleetClient, join: Join) -> None:
    for name in ("a", "b"):
        await join(name)
    for number in range(8):
        await ask(fleet, request(f"r{number}", 9 + 8 * number, 1))
    answer = await fleet.control(ResetCache())
    assert isinstance(answer, ForgottenBlocks) and answer.blocks[0] >= 8


async def test_another_model_does_not_join(fleet: FleetClient, join: Join) -> None:
    replica = await join("a")
    engine = await start_thread(config(SLOW), BACKEND)
    engine.info = msgspec.structs.replace(engine.info, vocab_size=9)
    with pytest.raises(EngineError, match="with 9 tokens"):
        fleet.join("b", engine)
    await engine.close()
    assert fleet.replicas == (replica,)


# -- how they go on ---------------------------------------------------------------------------------------------------


async def streams(fleet: FleetClient, count: int, tokens: int = 150) -> list[asyncio.Task[Answer]]:
    """Start requests with several choices and log-probabilities, and wait until all run."""
    asked = [request(f"s{number}", 7 + number, tokens, n=1 + number % 3, logprobs=0) for number in range(count)]
    running = [asyncio.create_task(ask(fleet, one)) for one in asked]
    await until(lambda: sum(len(r.parts) for r in fleet.replicas) == count, "all to be sent")
    await until(lambda: all(part.answered for r in fleet.replicas for part in r.parts), "all to have a token")
    return running


async def check(running: list[asyncio.Task[Answer]], tokens: int = 150) -> None:
    for number, answer in enumerate(await asyncio.gather(*running)):
        asked = request(f"s{number}", 7 + number, tokens, n=1 + number % 3, logprobs=0)
        for choice in range(asked.n):
            assert answer.choices[choice] == expected(asked, choice)
            assert answer.logprobs[choice] == b"".join(map(logprob_row, expected(asked, choice)))
        assert set(answer.reasons.values()) == {"length"}
        assert {delta.request_id for delta in answer.deltas} == {asked.request_id}


async def test_streams_go_on_when_an_engine_is_lost(fleet: FleetClient, join: Join) -> None:
    first = await join("a")
    running = await streams(fleet, 4)
    second = await join("b")
    lose(first)
    assert first.status == "gone" and not first.parts
    await check(running)
    assert second.requests >= 4 and fleet.moves["ended"] == 4
    timings = [end.timing for task in running for end in task.result().ends.values()]
    assert {(timing.engine, timing.moves) for timing in timings if timing} == {("b", 1)}
    assert fleet.state.status == "ready"


async def test_streams_wait_for_an_engine(fleet: FleetClient, join: Join) -> None:
    first = await join("a")
    running = await streams(fleet, 3)
    lose(first)
    fleet.leave("a")
    assert fleet.held == 3 and fleet.state.status == "restarting"
    late = asyncio.create_task(ask(fleet, request("late", 5, 5)))
    await asyncio.sleep(0.05)
    await join("b")
    await check(running)
    assert (await late).choices[0] == expected(request("late", 5, 5))
    await first.engine.close()


async def test_streams_that_wait_too_long_are_told(fleet: FleetClient, join: Join, monkeypatch) -> None:
    monkeypatch.setattr(fleet._requests, "_hold_seconds", 0.2)
    first = await join("a")
    running = await streams(fleet, 2)
    lose(first)
    for one in running:
        with pytest.raises(EngineError, match=r"no engine of the fleet could take the request for 0\.2 s: a: gone"):
            await one


async def test_streams_stay_in_their_pool(join: Join, fleet: FleetClient) -> None:
    first = await join("a")
    running = await streams(fleet, 2)
    other = await start_thread(config(SLOW), BACKEND)
    identity = msgspec.structs.replace(other.info.identity, numerics="another machine")
    other.info = msgspec.structs.replace(other.info, identity=identity)
    fleet.join("b", other)
    lose(first)
    await asyncio.sleep(0.1)
    assert fleet.held == 2
    asked = request("new", 5, 5)
    assert (await ask(fleet, asked)).choices[0] == expected(asked), "a new request may go there"
    await join("c")
    await check(running)


async def test_a_rolling_update_changes_the_revision_of_no_stream(join: Join, fleet: FleetClient) -> None:
    """Engine by engine: a new one joins, an old one is drained by this front and leaves when its streams have ended."""
    for name in ("old-1", "old-2"):
        await join(name)
    running = await streams(fleet, 4, 200)
    for number in (1, 2):
        new = await start_thread(config(SLOW), BACKEND)
        identity = msgspec.structs.replace(new.info.identity, weights="of the new revision")
        new.info = msgspec.structs.replace(new.info, identity=identity, revision="new")
        fleet.join(f"new-{number}", new)
        fleet.drain(f"old-{number}", 0.05)
        asked = request(f"begun meanwhile {number}", 5, 5)
        assert (await ask(fleet, asked)).choices[0] == expected(asked)
        if number == 1:
            await until(lambda: not fleet.replicas[0].parts, "streams to go on at the other old engine")
    answers = await asyncio.gather(*running)
    assert {end.timing.engine for answer in answers for end in answer.ends.values() if end.timing} == {"old-2"}
    assert (await ask(fleet, request("after", 5, 5))).ends[0].timing.engine.startswith("new-")


async def test_a_drained_engine_gets_nothing_and_its_streams_move_in_time(fleet: FleetClient, join: Join) -> None:
    first = await join("a")
    running = await streams(fleet, 3)
    assert isinstance(first.engine, StreamingClient)
    state = msgspec.structs.replace(first.engine.state, leave_within=0.3)
    first.engine._streams.follow(state)
    await asyncio.sleep(0.4)
    assert len(first.parts) == 3, "there is no other engine"
    second = await join("b")
    await until(lambda: not first.parts, "its streams to move")
    await check(running)
    await ask(fleet, request("new", 5, 5))
    assert second.requests >= 4 and first.requests == 3
    assert fleet.moves["draining"] == 3


@pytest.mark.parametrize("after", [0, 1], ids=["before it is sent", "while it runs"])
async def test_a_stop_string_may_end_a_choice_meanwhile(fleet: FleetClient, join: Join, after: int) -> None:
    first = await join("a")
    asked = request("a", 6, 300, n=2)
    answer = Answer(asked)
    async for delta in fleet.generate(asked):
        answer.take(delta)
        if len(answer.choices[0]) >= 20 and first.status == "ready":
            lose(first)
            if after:
                await join("b")
                await asyncio.sleep(0.05)
            fleet.finish("a", 0, "stop", 5)
            if not after:
                await join("b")
    assert answer.choices == {0: expected(asked)[:5], 1: expected(asked, 1)}
    assert answer.reasons == {0: "stop", 1: "length"}


async def test_an_abort_ends_a_stream_that_is_held(fleet: FleetClient, join: Join) -> None:
    first = await join("a")
    running = await streams(fleet, 1)
    lose(first)
    fleet.abort("s0")
    assert (await running[0]).reasons == {0: "abort"}
    assert fleet.idle


async def test_a_consumer_that_leaves_aborts_its_request_after_a_move(fleet: FleetClient, join: Join) -> None:
    first = await join("a")
    stream = fleet.generate(request("a", 6, 500, n=3))
    await anext(stream)
    second = await join("b")
    lose(first)
    while not any(part.answered for part in second.parts):  # what came from the first is read before
        await anext(stream)
    await stream.aclose()
    await until(lambda: not second.engine.stats().running and second.engine.stats().steps, "the request to end")
    assert not second.parts and not first.parts


# -- real ends of processes -------------------------------------------------------------------------------------------


async def test_a_killed_engine_costs_no_token_and_comes_back(fleet: FleetClient) -> None:
    replicas = await processes(fleet, "ab")
    running = await streams(fleet, 8)
    victim = max(replicas, key=lambda replica: len(replica.parts))
    pid = victim.engine.info.pid
    os.kill(pid, signal.SIGKILL)
    await check(running)
    assert fleet.moves["ended"] >= 4
    await until(lambda: victim.status == "ready", "it to be started again")
    assert victim.engine.info.pid != pid
    assert fleet.state.restarts == 1


async def test_an_engine_that_makes_no_step_is_left(fleet: FleetClient) -> None:
    """Its process is stopped: it accepts requests, and nothing comes."""
    replicas = await processes(fleet, "ab")
    for number in range(8):
        await ask(fleet, request(f"warm{number}", 5 + number, 5))
    running = await streams(fleet, 6)
    victim = max(replicas, key=lambda replica: len(replica.parts))
    os.kill(victim.engine.info.pid, signal.SIGSTOP)
    began = time.monotonic()
    await check(running)
    assert fleet.moves["hung"] and time.monotonic() - began < AT_ONCE
    assert victim.status == "suspect"
    asked = request("new", 5, 5)
    assert (await ask(fleet, asked)).choices[0] == expected(asked)
    os.kill(victim.engine.info.pid, signal.SIGCONT)
    await until(lambda: victim.status == "ready", "it to step again")


async def test_a_prompt_that_ends_engines_ends_two_at_most(fleet: FleetClient) -> None:
    replicas = await processes(fleet, "abc")
    running = await streams(fleet, 6)
    with pytest.raises(EndsEngines):
        await ask(fleet, request("fatal", 4, 4, seed=FATAL_SEED))
    await check(running)
    await until(lambda: all(replica.status == "ready" for replica in replicas), "all to be back")
    assert fleet.state.restarts == 2
