"""An engine that sleeps has ended; a request, or `wake`, starts it again."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from penstock.engine import recovery
from penstock.engine.client import StreamingClient
from penstock.engine.link.ipc import spawn
from penstock.messages import Completed, DeadlineExceeded, EngineError, EngineState, Identity, Sleep, Wake
from tests.engine.processes import alive
from tests.engine.simulated import ENGINE, Scenario, ask, config, expected, shared, start
from tests.patience import until
from tests.schedule.simulated import request


@pytest.fixture
async def client(scratch: Path) -> AsyncIterator[StreamingClient]:
    started = await spawn(config(Scenario(step_seconds=0.003)), ENGINE, resumes=True)
    yield started
    await started.close()
    assert not alive(started.info.pid) and not list(scratch.iterdir())


async def test_requests_wake_it_and_are_answered(client: StreamingClient) -> None:
    await ask(client, request("before", 5, 9))
    first, steps = client.info.pid, client.stats().steps
    await client.control(Sleep())
    await client.control(Sleep())  # has no effect
    assert client.state.status == "asleep" and not alive(first)
    assert client.stats().running == 0 and client.stats().steps == steps
    requests = [request(f"r{i}", 5, 20) for i in range(20)]
    answers = await asyncio.gather(*(ask(client, one) for one in requests))
    assert [answer.choices[0] for answer in answers] == [expected(one) for one in requests]
    assert client.state == EngineState("ready", 0) and client.stats().steps > steps
    assert client.info.pid != first and client.info.incarnation == 2


@pytest.mark.rare
async def test_it_sleeps_as_often_as_it_likes(client: StreamingClient) -> None:
    """A wake is not a crash: after as many of those, the server would end."""
    for i in range(len(recovery.DELAYS) + 1):
        await client.control(Sleep())
        await client.control(Wake())
        await client.control(Wake())
        assert client.state.status == "ready" and alive(client.info.pid), i


async def test_it_does_not_sleep_while_a_stream_is_open(client: StreamingClient) -> None:
    task = asyncio.create_task(ask(client, request("long", 5, 100)))
    await until(lambda: client.stats().running, "the stream")
    with pytest.raises(EngineError, match="cannot sleep now"):
        await client.control(Sleep())
    assert (await task).choices[0] == expected(request("long", 5, 100))


async def test_a_deadline_holds_while_it_starts(client: StreamingClient) -> None:
    await client.control(Sleep())
    began = time.monotonic()
    hurried = msgspec.structs.replace(request("hurried", 5, 9), first_token_deadline=began + 0.02)
    with pytest.raises(DeadlineExceeded):
        await ask(client, hurried)
    assert client.state.status == "restarting"  # it goes on to start, for the next one
    assert (await ask(client, request("next", 5, 9))).choices[0] == expected(request("next", 5, 9))


async def test_a_request_that_comes_while_it_falls_asleep_wakes_it(client: StreamingClient) -> None:
    falling = asyncio.create_task(client.control(Sleep()))
    await asyncio.sleep(0)
    assert (await ask(client, request("now", 5, 9))).choices[0] == expected(request("now", 5, 9))
    await falling
    assert client.state.status != "asleep"


async def test_other_weights_than_before_end_it(client: StreamingClient) -> None:
    """The tokens of a stream, and the client's tokenizer, are of one version."""
    client.info = msgspec.structs.replace(client.info, identity=Identity("of the weights before"))
    await client.control(Sleep())
    with pytest.raises(EngineError, match="other weights or kernels"):
        await client.control(Wake())
    assert client.state.status == "ended"
    with pytest.raises(EngineError, match="other weights or kernels"):
        await ask(client, request("late", 5, 9))


async def test_an_engine_on_a_thread_cannot() -> None:
    client = await start("thread")
    with pytest.raises(EngineError, match="cannot be started again"):
        await client.control(Sleep())
    await client.close()


async def test_it_sleeps_and_wakes_for_a_process_that_shares_it(client: StreamingClient) -> None:
    sharing = await shared(client)
    assert await sharing.control(Sleep()) == Completed()
    assert client.state.status == sharing.state.status == "asleep"
    assert await sharing.control(Wake()) == Completed()
    assert client.state.status == sharing.state.status == "ready"
    assert await sharing.control(Sleep()) == Completed()
    assert (await ask(sharing, request("now", 5, 9))).choices[0] == expected(request("now", 5, 9))
    assert sharing.info.incarnation == 3
    await sharing.close()
