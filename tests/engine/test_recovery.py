"""An engine that ends is started again, and its requests go on as if nothing had happened."""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from penstock.engine import recovery
from penstock.engine.client import EngineLink, StreamingClient
from penstock.engine.link import ipc
from penstock.engine.link.ipc import spawn
from penstock.engine.link.wire import Ended, Ready
from penstock.engine.queue import RequestQueue
from penstock.engine.streams import Streams
from penstock.messages import EndsEngines, EngineError, EngineInfo, EngineStats, GenerateRequest, ResetCache
from tests.engine.link.test_wire import INFO
from tests.engine.processes import alive, children
from tests.engine.simulated import ENGINE, FATAL_SEED, Answer, Scenario, ask, config, expected, shared
from tests.patience import AT_ONCE, until
from tests.plan_checks import logprob_row
from tests.schedule.simulated import request

Starter = Callable[..., Awaitable[StreamingClient]]
SLOW = Scenario(step_seconds=0.003)


@pytest.fixture
async def engine(scratch: Path) -> AsyncIterator[Starter]:
    clients: list[StreamingClient] = []

    async def starter(scenario: Scenario = SLOW, **fields: object) -> StreamingClient:
        clients.append(await spawn(config(scenario, **fields), ENGINE, resumes=True))
        return clients[-1]

    yield starter
    for client in clients:
        await client.close()
        assert not alive(client.info.pid)
    assert not list(scratch.iterdir())


def asking(client: StreamingClient, requests: list[GenerateRequest]) -> list[asyncio.Task[Answer]]:
    return [asyncio.create_task(ask(client, one)) for one in requests]


async def end(client: StreamingClient, number: signal.Signals, steps: int) -> None:
    """Wait for so many steps, then send the engine a signal, and wait until another is ready."""
    before, restarts = client.stats().steps, client.state.restarts
    await until(lambda: client.stats().steps >= before + steps, "steps")
    os.kill(client.info.pid, number)
    await until(lambda: client.state.restarts > restarts, "another engine")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_streams_go_on_after_an_engine_ends(engine: Starter, number: signal.Signals) -> None:
    client = await engine()
    choose = random.Random(number)
    requests = [
        request(f"r{i}", choose.randint(2, 40), choose.randint(60, 240), n=choose.choice((1, 1, 3)), logprobs=0)
        for i in range(30)
    ]
    tasks = asking(client, requests)
    for _ in range(3):
        await end(client, number, choose.randint(5, 40))
    answers = await asyncio.gather(*tasks)
    assert client.state.restarts == 3
    for asked, answer in zip(requests, answers, strict=True):
        for choice in range(asked.n):
            assert answer.choices[choice] == expected(asked, choice)
            assert answer.logprobs[choice] == b"".join(map(logprob_row, expected(asked, choice)))
        assert set(answer.reasons.values()) == {"length"}
        assert {delta.request_id for delta in answer.deltas} == {asked.request_id}
    assert client.stats().running == client.stats().waiting == 0
    assert (await ask(client, request("late", 5, 9))).choices[0] == expected(request("late", 5, 9))


async def test_a_stopped_engine_is_replaced(engine: Starter) -> None:
    client = await engine(step_deadline=1.0)
    first = client.info.pid
    tasks = asking(client, [request(f"r{i}", 6, 200) for i in range(10)])
    await end(client, signal.SIGSTOP, 10)
    answers = await asyncio.gather(*tasks)
    assert [answer.choices[0] for answer in answers] == [expected(request(f"r{i}", 6, 200)) for i in range(10)]
    assert not alive(first)


async def test_counters_go_on(engine: Starter) -> None:
    client = await engine()
    await ask(client, request("a", 4, 30))
    before = client.stats()
    os.kill(client.info.pid, signal.SIGKILL)
    await until(lambda: client.state.restarts == 1, "another engine")
    assert client.stats().steps >= before.steps
    await ask(client, request("b", 4, 30))
    assert client.stats().steps >= before.steps + 30
    assert client.stats().computed_tokens > before.computed_tokens
    assert client.info.incarnation == 2


async def test_requests_wait_while_there_is_no_engine(engine: Starter) -> None:
    client = await engine()
    os.kill(client.info.pid, signal.SIGKILL)
    await until(lambda: client.state.status == "restarting", "the end")
    assert client.state.status != "ended"
    with pytest.raises(EngineError, match="the engine starts again"):
        await client.control(ResetCache())
    tasks = asking(client, [request(f"r{i}", 5, 10) for i in range(5)])
    gone = asking(client, [request("gone", 5, 10)])
    await asyncio.sleep(0)
    gone[0].cancel()
    answers = await asyncio.gather(*tasks)
    assert [answer.choices[0] for answer in answers] == [expected(request(f"r{i}", 5, 10)) for i in range(5)]
    assert client.state.restarts == 1


async def test_a_choice_that_the_client_ended_stays_ended(engine: Starter) -> None:
    """The stop is sent to an engine that cannot read it."""
    client = await engine(step_deadline=1.0)
    asked, answer = request("a", 6, 400, n=2), None
    answer = Answer(asked)
    stopped = False
    async for delta in client.generate(asked):
        answer.take(delta)
        if not stopped and len(answer.choices[0]) >= 10:
            stopped = True
            os.kill(client.info.pid, signal.SIGSTOP)
            client.finish("a", 0, "stop", 7)
    assert stopped and client.state.restarts == 1
    assert answer.choices[0] == expected(asked)[:7]
    assert answer.choices[1] == expected(asked, 1)
    assert answer.reasons == {0: "stop", 1: "length"}


async def test_an_abort_ends_choices_that_went_on_apart(engine: Starter) -> None:
    client = await engine()
    (asking_it,) = asking(client, [request("a", 6, 400, n=2)])
    await end(client, signal.SIGKILL, 10)
    await until(lambda: client.stats().running == 2, "its choices to go on")
    client.abort("a")
    assert (await asking_it).reasons == {0: "abort", 1: "abort"}
    await until(lambda: not client.stats().running, "the engine to end them")


async def test_an_abort_ends_a_request_that_waits_for_an_engine(engine: Starter) -> None:
    client = await engine()
    os.kill(client.info.pid, signal.SIGKILL)
    await until(lambda: client.state.status == "restarting", "the end")
    (asking_it,) = asking(client, [request("a", 6, 400)])
    await asyncio.sleep(0)
    client.abort("a")
    assert (await asking_it).reasons == {0: "abort"}
    assert client.state.status == "restarting"
    assert (await ask(client, request("next", 5, 9))).choices[0] == expected(request("next", 5, 9))


@pytest.mark.parametrize("through_hub", [False, True])
async def test_a_prompt_that_ends_engines_ends_two(engine: Starter, through_hub: bool) -> None:
    client = await engine()
    asked = await shared(client) if through_hub else client
    bystanders = [request(f"r{i}", 6, 300) for i in range(6)]
    tasks = asking(client, bystanders)
    await until(lambda: client.stats().steps > 5, "steps")
    fatal = request("fatal", 9, 20, seed=FATAL_SEED)
    with pytest.raises(EndsEngines, match="ended twice"):
        await ask(asked, fatal)
    for _ in range(100):
        with pytest.raises(EndsEngines, match="do not send it again"):
            await ask(asked, fatal)
    answers = await asyncio.gather(*tasks)
    assert [answer.choices[0] for answer in answers] == [expected(one) for one in bystanders]
    assert client.state.restarts == 2
    if through_hub:
        await asked.close()


async def test_suspects_are_tried_in_order_and_all_but_one_are_answered(engine: Starter) -> None:
    client = await engine()
    asked = [request(f"r{i}", 5, 12, seed=FATAL_SEED if i == 4 else 1) for i in range(12)]
    answers = await asyncio.gather(*asking(client, asked), return_exceptions=True)
    assert isinstance(answers.pop(4), EndsEngines)
    asked.pop(4)
    for one, answer in zip(asked, answers, strict=True):
        assert isinstance(answer, Answer) and answer.choices[0] == expected(one)
    assert client.state.restarts == 2


async def test_a_request_that_ends_engines_later_is_given_up(engine: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine fails in its tenth step."""
    monkeypatch.setattr(recovery, "DELAYS", (0.0,) * 8)
    client = await engine(Scenario(step_seconds=0.001, fail_at=10))
    with pytest.raises(EngineError, match="ended 4 times during this request"):
        await ask(client, request("a", 6, 400))
    assert client.state.status != "ended"
    await until(lambda: client.state.status != "restarting", "another engine")
    assert (await ask(client, request("b", 6, 5))).choices[0] == expected(request("b", 6, 5))


async def test_ends_of_engines_that_answered_much_do_not_count(
    engine: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each engine fails in its fortieth step: the request gets more than PROGRESS tokens of it before."""
    monkeypatch.setattr(recovery, "DELAYS", (0.0,) * 8)
    client = await engine(Scenario(step_seconds=0.001, fail_at=40))
    asked = request("a", 6, 220)
    assert (await ask(client, asked)).choices[0] == expected(asked)
    assert recovery.MOST_ENDS < client.state.restarts < len(recovery.DELAYS)


async def test_an_engine_that_ends_too_often_is_not_started_again(
    engine: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "DELAYS", (0.0, 0.0))
    client = await engine()
    for restarts in range(2):
        os.kill(client.info.pid, signal.SIGKILL)
        await until(lambda restarts=restarts: client.state.restarts > restarts, "another engine")  # type: ignore[misc]
    waiting = asking(client, [request("a", 6, 400)])
    await until(lambda: client.stats().running, "it to run")
    began = time.monotonic()
    os.kill(client.info.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="ended too often within a minute"):
        await waiting[0]
    assert client.state.status == "ended"
    assert time.monotonic() - began < AT_ONCE


class NoLink:
    """A link to an engine that has ended."""

    def send(self, frame: bytes) -> None:
        pass

    def kill(self) -> None:
        pass

    async def close(self) -> None:
        pass


async def test_an_engine_that_ends_as_soon_as_it_is_ready_is_replaced() -> None:
    """Its first and its last event may arrive together, before the client goes on with it."""
    streams, started = Streams(incarnation=1, queue=RequestQueue.of(config(), time.monotonic)), []
    ready = Ready(INFO, EngineStats())

    async def restart(incarnation: int) -> tuple[EngineInfo, EngineLink]:
        started.append(incarnation)
        streams.take(ready)
        if incarnation == 2:
            streams.take(Ended("it has burnt out"))
        return INFO, NoLink()

    streams.take(ready)
    client = StreamingClient(INFO, NoLink(), streams, None, clock=time.monotonic, restart=restart)
    streams.take(Ended("the first one has ended"))
    await until(lambda: started == [2, 3] and client.state.status != "restarting", "the third engine")
    assert client.state.status != "ended"
    await client.close()


@pytest.mark.parametrize("seconds", [0.1, 90.0])
def test_eight_starts_that_fail_are_the_last_however_long_each_takes(seconds: float) -> None:
    now = 0.0
    starts = recovery.Starts(lambda: now)
    delays = []
    while (delay := starts.delay()) is not None:
        delays.append(delay)
        now += delay + seconds
        assert len(delays) <= len(recovery.DELAYS)
    assert tuple(delays) == recovery.DELAYS


def test_a_minute_of_work_counts_but_no_time_of_loading() -> None:
    now = 0.0
    starts = recovery.Starts(lambda: now)

    def start(loading: float, working: float) -> float | None:
        nonlocal now
        delay = starts.delay()
        if delay is not None:
            now += delay + loading
            starts.ready()
            now += working
        return delay

    assert [start(90.0, 61.0) for _ in range(20)] == [0.0] * 20
    assert [start(90.0, 1.0) for _ in recovery.DELAYS] == list(recovery.DELAYS)
    assert start(90.0, 1.0) is None


async def test_a_start_that_hangs_is_given_up_and_tried_again(engine: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await engine()
    tasks = asking(client, [request("a", 6, 400)])
    await until(lambda: client.stats().running, "it to run")
    monkeypatch.setattr(ipc, "IDLE_SECONDS", 0.6)
    monkeypatch.setattr(ipc, "LOOK_SECONDS", 0.2)
    first = client.info.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: set(children(os.getpid())) - {first}, "the next engine")
    (stopped,) = set(children(os.getpid())) - {first}
    os.kill(stopped, signal.SIGSTOP)
    assert (await tasks[0]).choices[0] == expected(request("a", 6, 400))
    assert not alive(stopped)


async def test_closing_while_the_engine_starts_again(engine: Starter) -> None:
    client = await engine()
    tasks = asking(client, [request("a", 6, 400)])
    await until(lambda: client.stats().running, "it to run")
    os.kill(client.info.pid, signal.SIGKILL)
    await until(lambda: client.state.status == "restarting", "the end")
    await client.close()
    with pytest.raises(EngineError, match="closed"):
        await tasks[0]


@pytest.mark.parametrize("ticks", range(4))
async def test_a_cancelled_close_is_cancelled(engine: Starter, ticks: int) -> None:
    """Also while the end that it waits for comes. Else a client that is closed would start another engine."""
    client = await engine()
    link = client._link
    closing = asyncio.create_task(link.close())
    await asyncio.sleep(0)
    link._ended.set()  # type: ignore[attr-defined]
    for _ in range(ticks):
        await asyncio.sleep(0)
    was_done = closing.done()
    closing.cancel()
    await asyncio.wait([closing])
    assert was_done or closing.cancelled()
    await until(lambda: not alive(client.info.pid), "its end")
