"""A client on a virtual clock: its deadlines, its watch over the engine and its pauses take no real time."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from penstock.engine import recovery
from penstock.engine.client import EngineLink, Restart, StreamingClient
from penstock.engine.link.wire import Add, Ended, Ready, decode_command
from penstock.engine.pace import Pace
from penstock.engine.queue import RequestQueue
from penstock.engine.streams import Streams
from penstock.messages import DeadlineExceeded, EngineError, EngineInfo, EngineStats
from tests.engine import virtual_loop
from tests.engine.link.test_wire import INFO
from tests.engine.simulated import ask, config
from tests.patience import AT_ONCE
from tests.schedule.simulated import request

READY = Ready(INFO, EngineStats())


class SilentLink:
    """A link to an engine that never answers."""

    def __init__(self) -> None:
        self.commands: list[object] = []

    def send(self, frame: bytes) -> None:
        self.commands.append(decode_command(frame))

    def kill(self) -> None:
        pass

    async def close(self) -> None:
        pass


def client_of(link: SilentLink, pace: Pace | None, restart: Restart | None = None) -> tuple[StreamingClient, Streams]:
    clock = asyncio.get_running_loop().time
    streams = Streams(incarnation=1, queue=RequestQueue.of(config(), clock))
    streams.take(READY)
    return StreamingClient(INFO, link, streams, pace, clock=clock, restart=restart), streams


def run(session: Coroutine[Any, Any, None]) -> None:
    began = time.monotonic()
    virtual_loop.run(session)
    assert time.monotonic() - began < AT_ONCE


def test_deadlines_are_hours_away() -> None:
    async def session() -> None:
        loop, link = asyncio.get_running_loop(), SilentLink()
        client, _ = client_of(link, None)
        await asyncio.sleep(100.0)
        hours = loop.time() + 7200.0
        with pytest.raises(DeadlineExceeded, match="first_token_timeout"):
            await ask(client, request("first", 3, 3, deadline=hours + 60.0, first_token_deadline=hours))
        assert loop.time() == pytest.approx(hours)
        with pytest.raises(DeadlineExceeded, match="not complete"):
            await ask(client, request("last", 3, 3, deadline=hours + 60.0))
        assert loop.time() == pytest.approx(hours + 60.0)
        sent = [command.sent for command in link.commands if isinstance(command, Add)]
        assert sent == pytest.approx([100.0, hours])
        await client.close()

    run(session())


def test_an_engine_that_makes_no_step_is_given_up() -> None:
    async def session() -> None:
        client, _ = client_of(SilentLink(), Pace(64, 120.0))
        await asyncio.sleep(3600.0)  # without work
        began = asyncio.get_running_loop().time()
        with pytest.raises(EngineError, match="no step for 120 s"):
            await ask(client, request("a", 3, 3))
        assert asyncio.get_running_loop().time() - began == pytest.approx(120.0, abs=2.0)
        await client.close()

    run(session())


def test_starts_that_fail_are_tried_again_after_longer_and_longer_pauses() -> None:
    async def session() -> None:
        loop = asyncio.get_running_loop()
        starts: list[float] = []

        async def restart(incarnation: int) -> tuple[EngineInfo, EngineLink]:
            starts.append(loop.time())
            streams.fail("it does not start")
            return await streams.info, SilentLink()

        client, streams = client_of(SilentLink(), None, restart)
        await asyncio.sleep(1000.0)
        streams.take(Ended("it has ended"))
        with pytest.raises(EngineError, match="ended too often within a minute"):
            await ask(client, request("a", 3, 3))
        assert [start - 1000.0 for start in starts] == pytest.approx(
            [sum(recovery.DELAYS[: number + 1]) for number in range(len(recovery.DELAYS))]
        )
        await client.close()

    run(session())
