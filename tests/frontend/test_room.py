"""The room for engines: who gets it and who makes way. The models here have no engines."""

import asyncio
import time

import pytest

from penstock.frontend.errors import APIError
from penstock.frontend.versions.room import EngineRoom


class Model:
    """See penstock.frontend.versions.room.Resident."""

    def __init__(self, name: str, room: EngineRoom, log: list[str]) -> None:
        self.name, self._room, self._log = name, room, log
        self.has_engine, self.used, self.busy = False, 0.0, False

    @property
    def unused_since(self) -> float | None:
        return None if self.busy else self.used

    async def sleep(self) -> None:
        await asyncio.sleep(0)
        if self.busy:
            raise APIError(409, "a request has come")
        self.has_engine = False
        self._log.append(f"-{self.name}")

    async def wake(self) -> None:
        async with self._room.starting(self.name):
            await asyncio.sleep(0)
            self._room.add(self.name, self)
            self.has_engine, self.used = True, time.monotonic()
            self._log.append(f"+{self.name}")


def models(most: int | None, stay: float, names: str) -> tuple[EngineRoom, list[Model], list[str]]:
    room, log = EngineRoom(most, stay), list[str]()
    return room, [Model(name, room, log) for name in names], log


async def test_the_least_recently_used_makes_way_and_one_in_use_never() -> None:
    _, (a, b, c, d), log = models(2, 0.0, "abcd")
    await a.wake()
    await b.wake()
    a.used = time.monotonic()
    await c.wake()
    assert log == ["+a", "+b", "-b", "+c"]
    a.busy = c.busy = True
    waiting = asyncio.create_task(d.wake())
    await asyncio.sleep(0.2)
    assert log[4:] == [] and not waiting.done()
    c.busy = False
    await waiting
    assert log[4:] == ["-c", "+d"]


async def test_a_model_stays_and_who_waits_gets_room_in_order() -> None:
    room, (a, b, c), log = models(1, 0.4, "abc")
    assert room.wait_seconds() == 0.0
    await a.wake()
    began = time.monotonic()
    assert 0 < room.wait_seconds() <= 0.4
    await asyncio.gather(b.wake(), c.wake())
    assert log == ["+a", "-a", "+b", "-b", "+c"]
    assert time.monotonic() - began >= 0.75


async def test_a_start_that_fails_or_is_cancelled_leaves_its_room() -> None:
    room, (a, b, _), log = models(1, 0.0, "abc")
    with pytest.raises(OSError, match="no such file"):
        async with room.starting("a"):
            raise OSError("no such file")
    await a.wake()
    a.busy = True
    waiting = asyncio.create_task(b.wake())
    await asyncio.sleep(0.1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    a.busy = False
    await b.wake()
    assert log == ["+a", "-a", "+b"]


async def test_a_model_that_has_an_engine_needs_no_other_room() -> None:
    _, (a, b), log = models(2, 10.0, "ab")
    await asyncio.gather(a.wake(), b.wake())
    await a.wake()  # a new version of it
    assert sorted(log) == ["+a", "+a", "+b"]
    room, many, log = models(None, 10.0, "abcdefgh")
    await asyncio.gather(*(model.wake() for model in many))
    assert len(log) == 8 and room.wait_seconds() == 0.0
