"""What every EngineClient does, run against an engine on a thread, one in a process of its own, one that is replaced
when it ends, a shared one, and one in a fleet; what goes through its executor, also against one whose model several
ranks share."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import uvloop

from penstock.engine.client import StreamingClient
from penstock.messages import (
    Completed,
    DeadlineExceeded,
    EngineError,
    EngineState,
    ForgottenBlocks,
    QueueFull,
    RequestRejected,
    ResetCache,
    Sleep,
    Wake,
)
from tests.engine.processes import descriptors
from tests.engine.simulated import BAD_SEED, FATAL_SEED, Answer, Scenario, ask, expected, start
from tests.often import often
from tests.patience import AT_ONCE, PATIENCE, until
from tests.plan_checks import logprob_row
from tests.schedule.simulated import request

KINDS = ["thread", "process", "shared"]
MOVES = ["resumes", "fleet"]  # what an engine that has ended does not end
also_with_ranks = pytest.mark.parametrize("kind", [*KINDS, "ranks"])
unless_replaced = pytest.mark.parametrize("kind", KINDS)
Starter = Callable[..., Awaitable[StreamingClient]]


@pytest.fixture(params=[*KINDS, *MOVES])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
async def engine(kind: str, scratch: Path) -> AsyncIterator[Starter]:
    """engine(scenario, **config) starts one; all are closed at the end and leave nothing behind."""
    clients = []

    async def starter(scenario: Scenario | None = None, **fields: object) -> StreamingClient:
        clients.append(await start(kind, scenario, **fields))
        return clients[-1]

    yield starter
    for client in clients:
        await client.close()
    assert not list(scratch.iterdir())


def running(client: StreamingClient) -> int:
    stats = client.stats()
    return stats.running + stats.waiting


# -- streams ----------------------------------------------------------------------------------------------------------


@also_with_ranks
async def test_streams_every_token_in_order(engine: Starter) -> None:
    client = await engine(incarnation=5)
    asked = request("a", 20, 30, logprobs=0)
    answer = await ask(client, asked)
    assert answer.choices == {0: expected(asked)}
    assert answer.reasons == {0: "length"}
    assert answer.logprobs[0] == b"".join(map(logprob_row, expected(asked)))
    assert answer.ends[0].timing is not None and answer.ends[0].timing.decode > 0
    assert {delta.incarnation for delta in answer.deltas} == {client.info.incarnation} == {5}


async def test_streams_several_choices(engine: Starter) -> None:
    client = await engine()
    asked = request("a", 9, 12, n=4)
    answer = await ask(client, asked)
    assert answer.choices == {choice: expected(asked, choice) for choice in range(4)}
    assert len(answer.ends) == 4


@also_with_ranks
async def test_streams_concurrent_requests_apart(engine: Starter) -> None:
    client = await engine()
    asked = [request(f"r{i}", 5 + i, 20 + i) for i in range(20)]
    answers = await asyncio.gather(*(ask(client, one) for one in asked))
    assert [answer.choices[0] for answer in answers] == [expected(one) for one in asked]


@also_with_ranks
async def test_starts_from_the_middle(engine: Starter) -> None:
    client = await engine()
    whole = request("whole", 10, 20, n=3)
    tokens = expected(whole, 2)
    rest = request("rest", whole.prompt_ids, 20, seed=whole.sampling.seed, first_choice=2, output_ids=tuple(tokens[:7]))
    answer = await ask(client, rest)
    assert answer.choices == {2: tokens}
    assert answer.deltas[0].offset == 7


async def test_a_slow_consumer_gets_everything_merged(engine: Starter) -> None:
    client = await engine()
    asked = request("slow", 6, 200, n=2, logprobs=0)
    answer = Answer(asked)
    stream = client.generate(asked)
    answer.take(await anext(stream))
    await until(lambda: not running(client), "the request to end")
    async for delta in stream:
        answer.take(delta)
    assert answer.choices == {choice: expected(asked, choice) for choice in range(2)}
    assert answer.logprobs[1] == b"".join(map(logprob_row, expected(asked, 1)))
    assert len(answer.deltas) <= 4


# -- ends -------------------------------------------------------------------------------------------------------------


async def test_finish_keeps_what_it_is_told_to(engine: Starter) -> None:
    client = await engine(Scenario(step_seconds=0.002))
    asked = request("a", 6, 400, n=2)
    answer = Answer(asked)
    async for delta in client.generate(asked):
        answer.take(delta)
        if delta.choice == 0 and len(answer.choices[0]) >= 10 and not answer.ends:
            client.finish("a", 0, "stop", 5)
        if answer.ends and len(answer.choices[1]) >= 12:
            client.finish("a", 1, "stop", 12)
    assert answer.choices == {0: expected(asked)[:5], 1: expected(asked, 1)[:12]}
    assert answer.reasons == {0: "stop", 1: "stop"}
    client.finish("a", 0, "stop", 5)
    client.finish("nobody", 0, "stop", 5)
    assert (await ask(client, request("b", 3, 3))).reasons == {0: "length"}


async def test_closing_a_stream_aborts_its_request(engine: Starter) -> None:
    client = await engine(Scenario(step_seconds=0.002))
    stream = client.generate(request("a", 6, 500, n=3))
    await anext(stream)
    assert running(client)
    await stream.aclose()
    await until(lambda: not running(client), "the request to end")
    assert client.stats().blocks_held == (0,)
    assert client.stats().steps < 400


async def test_cancelling_a_consumer_aborts_its_request(engine: Starter) -> None:
    client = await engine(Scenario(step_seconds=0.002))
    consumers = [asyncio.create_task(ask(client, request(f"r{i}", 6, 500))) for i in range(12)]
    await until(lambda: client.stats().running == 8, "requests to run")
    for consumer in consumers:
        consumer.cancel()
    await asyncio.gather(*consumers, return_exceptions=True)
    await until(lambda: not running(client), "the requests to end")
    assert client.stats().blocks_held == (0,)


@also_with_ranks
async def test_abort_ends_the_stream(engine: Starter) -> None:
    client = await engine(Scenario(step_seconds=0.002))
    asked = request("a", 6, 500, n=2)
    answer = Answer(asked)
    async for delta in client.generate(asked):
        answer.take(delta)
        client.abort("a")
    assert answer.reasons == {0: "abort", 1: "abort"}
    client.abort("nobody")
    assert (await ask(client, request("b", 3, 3))).reasons == {0: "length"}


async def test_an_id_is_free_again_once_the_engine_has_forgotten_it(kind: str, engine: Starter) -> None:
    client = await engine(Scenario(step_seconds=0.01))
    stream = client.generate(request("a", 6, 500))
    await anext(stream)
    with pytest.raises(RequestRejected, match="'a' is in use"):
        await anext(client.generate(request("a", 6, 5)))
    await stream.aclose()
    if kind != "fleet":  # which gives engines ids of its own
        with pytest.raises(RequestRejected, match="'a' is in use"):
            await anext(client.generate(request("a", 6, 5)))
    await until(lambda: not running(client), "the request to end")
    asked = request("a", 6, 5)
    assert (await ask(client, asked)).choices == {0: expected(asked)}


# -- what goes wrong with one request ---------------------------------------------------------------------------------


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"prompt_ids": ()}, "prompt has 0 tokens"),
    ({"prompt_ids": (1, 50)}, "token id 50"),
    ({"prompt_ids": (-1,)}, "token id -1"),
    ({"prompt_ids": (1, 2.5)}, "invalid request"),
    ({"prompt_ids": (2**70,)}, "invalid request"),
    ({"prompt_ids": tuple([1] * 600)}, "600"),
    ({"output_ids": (1, 99)}, "token id 99"),
    ({"request_id": 5}, "request id 5 is not a string"),
    ({"n": 10**9}, "n=1000000000"),
    ({"n": 0}, "n=0"),
    ({"cache_salt": "\ud800"}, "invalid request"),
    ({"cache_salt": 5}, "invalid request"),
]


async def test_a_request_that_cannot_be_served_is_refused_alone(
    engine: Starter,
) -> None:
    client = await engine(Scenario(step_seconds=0.001))
    bystander = request("bystander", 5, 300)
    other = asyncio.create_task(ask(client, bystander))
    for changes, message in REFUSED:
        with pytest.raises(RequestRejected, match=message):
            await anext(client.generate(msgspec.structs.replace(request("wrong", 4, 4), **changes)))
    assert not other.done()
    assert (await other).choices == {0: expected(bystander)}
    assert client.state.status != "ended"


@also_with_ranks
async def test_a_failing_row_ends_its_request_alone(engine: Starter) -> None:
    client = await engine()
    bystanders = [request(f"r{i}", 5, 30) for i in range(3)]
    good = [asyncio.create_task(ask(client, one)) for one in bystanders]
    answer = await ask(client, request("bad", 5, 30, seed=BAD_SEED))
    assert answer.reasons == {0: "error"}
    assert answer.ends[0].error == "simulated failure"
    assert [(await one).choices[0] for one in good] == [expected(one) for one in bystanders]
    assert client.state.status != "ended"


async def test_a_full_queue_says_so(engine: Starter) -> None:
    client = await engine(Scenario(step_seconds=0.01), max_num_seqs=1, max_waiting=2)
    streams = [client.generate(request(f"r{i}", 4, 400)) for i in range(3)]
    waiting = [asyncio.create_task(anext(stream)) for stream in streams]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="3 requests"):
        await ask(client, request("one more", 4, 4))
    for task, stream in zip(waiting, streams, strict=True):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await stream.aclose()

    async def admitted() -> bool:
        with contextlib.suppress(QueueFull):
            return (await ask(client, request("later", 4, 4))).reasons == {0: "length"}
        return False

    while not await admitted():
        await asyncio.sleep(0.01)


# -- the engine as a whole --------------------------------------------------------------------------------------------


async def test_stats_follow_the_steps(engine: Starter) -> None:
    client = await engine(Scenario(step_seconds=0.002))
    assert client.info.eos_token_ids == (7,)
    assert client.info.num_blocks == (257,)
    before = client.stats()
    assert before.blocks_total == (256,)
    await ask(client, request("a", 4, 20))
    after = client.stats()
    assert after.steps - before.steps == 20
    assert after.forward_seconds == pytest.approx(3 * after.sample_seconds)
    assert after.step_seconds > after.forward_seconds + after.sample_seconds > 0.03
    assert after.running == after.waiting == 0
    assert after.computed_tokens == 4 + 19


async def test_control_resets_the_prefix_cache(engine: Starter) -> None:
    client = await engine()
    prompt = request("p", 40, 1).prompt_ids

    async def cached(name: str) -> int:
        return (await ask(client, request(name, prompt, 2))).ends[0].cached_tokens

    assert await cached("a") == 0
    assert await cached("b") >= 36
    answer = await client.control(ResetCache())
    assert isinstance(answer, ForgottenBlocks) and answer.blocks == (10,)
    assert await cached("c") == 0


async def test_a_control_message_is_answered_beside_streams(engine: Starter) -> None:
    client = await engine(Scenario(step_seconds=0.005))
    running = asyncio.create_task(ask(client, request("a", 6, 200)))
    await until(lambda: client.stats().running, "it to run")
    async with asyncio.timeout(PATIENCE):
        for _ in range(5):
            assert isinstance(await client.control(ResetCache()), ForgottenBlocks)
    assert not running.done()
    assert (await running).choices[0] == expected(request("a", 6, 200))


class MakeTea(msgspec.Struct, frozen=True, tag=True):
    """A control message of another version."""


async def test_an_unknown_control_message_is_refused_by_name(engine: Starter) -> None:
    client = await engine()
    with pytest.raises(RequestRejected, match=r"unknown control message.*MakeTea"):
        await client.control(MakeTea())  # type: ignore[arg-type]
    assert client.state == EngineState("ready", 0)


@unless_replaced
async def test_an_engine_that_cannot_be_started_again_does_not_sleep(engine: Starter) -> None:
    client = await engine()
    with pytest.raises(EngineError, match="cannot be started again"):
        await client.control(Sleep())
    assert await client.control(Wake()) == Completed(), "it is awake"
    assert client.state == EngineState("ready", 0)


@also_with_ranks
async def test_a_step_that_fails_as_a_whole_ends_the_engine_with_its_reason(engine: Starter) -> None:
    client = await engine(Scenario(step_seconds=0.002))
    other = asyncio.create_task(ask(client, request("other", 4, 500)))
    await until(lambda: running(client), "a request to run")
    with pytest.raises(EngineError, match="the device has fallen off the bus"):
        await ask(client, request("fatal", 4, 4, seed=FATAL_SEED))
    with pytest.raises(EngineError, match="the device has fallen off the bus"):
        await other
    assert client.state.status == "ended"
    with pytest.raises(EngineError, match="fallen off"):
        await ask(client, request("late", 4, 4))
    with pytest.raises(EngineError, match="fallen off"):
        await client.control(ResetCache())


@also_with_ranks
async def test_a_stuck_step_is_given_up(kind: str, engine: Starter) -> None:
    stuck = Scenario(stuck_at=5, stuck_seconds=60 if kind == "process" else 2)
    client = await engine(stuck, step_deadline=0.4)
    with pytest.raises(EngineError, match=r"no step for 0\.(4|32) s"):
        await ask(client, request("a", 4, 20))
    assert client.state.status == "ended"


async def test_close_ends_open_streams(engine: Starter) -> None:
    client = await engine(Scenario(step_seconds=0.002))
    consumers = [asyncio.create_task(ask(client, request(f"r{i}", 6, 500))) for i in range(3)]
    await until(lambda: client.stats().running == 3, "requests to run")
    await client.close()
    for consumer in consumers:
        with pytest.raises(EngineError, match="closed"):
            await consumer
    assert client.state.status == "ended"
    with pytest.raises(EngineError, match="closed"):
        await ask(client, request("late"))
    client.abort("late")
    client.finish("late", 0, "stop", 1)
    await client.close()


# -- time -------------------------------------------------------------------------------------------------------------

CLOCKS = [(kind, hours) for kind in (*KINDS, *MOVES) for hours in (-7.0, 5.0)]
EACH_ONCE = [("thread", 5.0), ("process", -7.0), ("process", 5.0), ("shared", -7.0), ("resumes", 5.0), ("fleet", -7.0)]


@pytest.mark.parametrize(("kind", "hours"), often(CLOCKS, EACH_ONCE))
async def test_the_clocks_of_client_and_engine_may_differ_by_hours(engine: Starter, hours: float) -> None:
    def clock() -> float:
        return time.monotonic() + 3600 * hours

    client = await engine(Scenario(step_seconds=0.01), clock=clock, max_num_seqs=1)
    first = await ask(client, request("first", 4, 4, arrival=clock() - 50.0, deadline=clock() + 60.0))
    assert first.reasons == {0: "length"}
    assert first.ends[0].timing is not None and 50.0 <= first.ends[0].timing.queued < 50.0 + AT_ONCE
    running = asyncio.create_task(ask(client, request("running", 4, 120, arrival=clock())))
    await until(lambda: client.stats().running, "it to run")
    patient = request("patient", 4, 4, arrival=clock(), first_token_deadline=clock() + 60.0)
    late = request("late", 4, 4, arrival=clock(), first_token_deadline=clock() + 0.3)
    waiting = asyncio.create_task(ask(client, patient))
    with pytest.raises(DeadlineExceeded):
        await ask(client, late)
    assert client.queue.late == 1
    assert not running.done() and not waiting.done()
    answer, timing = await waiting, (await running).ends[0].timing
    assert answer.reasons == {0: "length"} and answer.ends[0].timing is not None
    assert timing is not None and timing.queued < AT_ONCE
    assert answer.ends[0].timing.queued < PATIENCE


async def test_a_request_that_would_be_late_by_the_client_s_clock_is_dropped_by_the_engine(engine: Starter) -> None:
    """Before the client's own timer ends it."""

    def clock() -> float:
        return time.monotonic() - 3600 * 9

    client = await engine(Scenario(step_seconds=0.05), clock=clock)
    for number in range(4):  # it learns how long its steps take
        await ask(client, request(f"warm{number}", 100 * number + 1, 3, first_token_deadline=clock() + 60.0))
    with pytest.raises(DeadlineExceeded, match="dropped before its prompt was computed"):
        await ask(client, request("late", 400, 4, first_token_deadline=clock() + 0.2))
    assert (await ask(client, request("next", 4, 4, first_token_deadline=clock() + 60.0))).reasons == {0: "length"}


# -- starting ---------------------------------------------------------------------------------------------------------


@also_with_ranks
async def test_a_user_error_while_loading_is_told_in_its_own_words(
    kind: str, scratch: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(EngineError) as caught:
        await start(kind, Scenario(refuse="tensor 'lm_head.weight' is missing from model.safetensors"))
    assert str(caught.value) == "tensor 'lm_head.weight' is missing from model.safetensors"
    assert not caplog.records
    assert not list(scratch.iterdir())


@also_with_ranks
async def test_any_other_error_while_loading_is_told_with_its_place(kind: str, scratch: Path) -> None:
    with pytest.raises(EngineError, match=r"KeyError: 'surprise'(.|\n)*simulated.py(.|\n)*in start"):
        await start(kind, Scenario(crash="surprise"))
    assert not list(scratch.iterdir())


async def test_limits_that_contradict_each_other_are_told(kind: str, scratch: Path) -> None:
    with pytest.raises(EngineError, match="max_num_batched_tokens=4"):
        await start(kind, max_num_batched_tokens=4)


# -- nothing is left --------------------------------------------------------------------------------------------------


LOOPS = {"asyncio": asyncio.run, "uvloop": uvloop.run}
LEFT = [(kind, loop) for kind in (*KINDS, "ranks") for loop in LOOPS]
ASYNCIO_ALONE = [("process", "asyncio"), ("thread", "asyncio")]  # as in scripts


@pytest.mark.parametrize(("kind", "loop"), often(LEFT, [each for each in LEFT if each[1] == "uvloop"] + ASYNCIO_ALONE))
def test_nothing_is_left_on_either_loop(kind: str, loop: str, scratch: Path) -> None:
    run: Callable[..., None] = LOOPS[loop]

    async def session() -> None:
        client = await start(kind, Scenario(step_seconds=0.001))
        asked = [request(f"r{i}", 5, 50) for i in range(10)]
        answers = await asyncio.gather(*(ask(client, one) for one in asked))
        assert [answer.choices[0] for answer in answers] == [expected(one) for one in asked]
        stream = client.generate(request("abandoned", 5, 500))
        await anext(stream)
        await stream.aclose()
        with pytest.raises(EngineError):
            await start(kind, Scenario(crash="surprise"))
        await client.close()
        assert len(asyncio.all_tasks()) == 1

    run(asyncio.sleep(0))  # the first uvloop of a process keeps descriptors
    before = descriptors()
    threads = set(threading.enumerate())
    run(session())
    assert descriptors() == before
    assert set(threading.enumerate()) <= threads
    assert not list(scratch.iterdir())
