"""Sorting events into streams."""

import asyncio

import pytest

from penstock.engine.link.wire import ControlReply, Ended, Rejected, Step
from penstock.engine.queue import RequestQueue
from penstock.engine.streams import DeltaReader, Streams
from penstock.messages import (
    Completed,
    DeadlineExceeded,
    EngineError,
    EngineStats,
    QueueFull,
    RequestRejected,
    TokenDelta,
)
from tests.schedule.simulated import request


def delta(offset: int, tokens: tuple[int, ...] = (), *, incarnation: int = 2, **fields: object) -> TokenDelta:
    return TokenDelta("a", 0, offset, tokens, incarnation=incarnation, **fields)


def step(*deltas: TokenDelta, **fields: object) -> Step:
    return Step(EngineStats(), list(deltas), **fields)


def queue() -> RequestQueue:
    return RequestQueue(max_num_seqs=1, max_waiting=2, max_waiting_tokens=100, clock=lambda: 0.0)


@pytest.fixture
async def streams() -> Streams:
    return Streams(incarnation=2, queue=queue())


async def test_deltas_of_another_incarnation_are_refused_and_counted(streams: Streams) -> None:
    stream = streams.open(request("a"))
    streams.take(step(delta(0, (5,), incarnation=1), delta(0, (6,)), delta(1, (7,), incarnation=3)))
    assert [d.token_ids for d in await DeltaReader(stream).read()] == [(6,)]
    assert streams.refused == 2


@pytest.mark.parametrize(("offset", "reason"), [(3, None), (1, None), (3, "stop")])
async def test_lost_or_doubled_tokens_end_the_stream(streams: Streams, offset: int, reason: str | None) -> None:
    stream = streams.open(request("a"))
    stream.sent = True
    streams.take(step(delta(0, (5, 6)), delta(offset, (9,), finish_reason=reason)))
    assert [d.token_ids for d in await DeltaReader(stream).read()] == [(5, 6)]
    with pytest.raises(EngineError, match=f"expected token 2, got token {offset}"):
        await DeltaReader(stream).read()
    assert streams.close(stream) == ["a"], "the engine has to be told"


async def test_a_stream_that_has_failed_is_not_resumed(streams: Streams) -> None:
    first, second = streams.open(request("a")), streams.open(request("b"))
    first.fail(EngineError("it ends engines"))  # its consumer is slow and has not read this
    assert streams.unfinished() == [second]


async def test_deltas_of_two_streams_are_merged_apart(streams: Streams) -> None:
    stream, other = streams.open(request("a")), streams.open(request("b"))
    streams.take(step(delta(0, (5, 6)), TokenDelta("b", 0, 0, (1,), incarnation=2)))
    for i in range(3):
        gone = TokenDelta("gone", 0, 7 + i, (30 + i,), incarnation=2)
        streams.take(
            step(delta(2 + i, (10 + i,), cached_tokens=4), TokenDelta("b", 0, 1 + i, (20 + i,), incarnation=2), gone)
        )
    (read,) = await DeltaReader(stream).read()
    assert (read.offset, read.token_ids, read.cached_tokens) == (0, (5, 6, 10, 11, 12), 4)
    assert [d.token_ids for d in await DeltaReader(other).read()] == [(1, 20, 21, 22)]


async def test_what_came_before_the_end_is_read_first(streams: Streams) -> None:
    stream = streams.open(request("a"))
    streams.take(step(delta(0, (5,))))
    streams.take(Ended("it broke"))
    streams.take(step(delta(1, (6,))))
    assert [d.token_ids for d in await DeltaReader(stream).read()] == [(5,)]
    with pytest.raises(EngineError, match="it broke"):
        await DeltaReader(stream).read()
    assert not streams.close(stream)
    with pytest.raises(EngineError, match="it broke"):
        streams.open(request("b"))


async def test_a_reader_is_woken(streams: Streams) -> None:
    stream = streams.open(request("a"))
    reader = asyncio.create_task(DeltaReader(stream).read())
    await asyncio.sleep(0)
    streams.take(step(delta(0, (5,), finish_reason="length")))
    assert [d.token_ids for d in await reader] == [(5,)]
    assert await DeltaReader(stream).read() == []
    assert not streams.close(stream)


async def test_a_reader_that_gathers_is_woken_for_first_tokens_for_enough_tokens_and_at_the_end(
    streams: Streams,
) -> None:
    stream = streams.open(request("a"))
    stream.gather = 3

    async def read_while(*deltas: TokenDelta) -> list[list[tuple[int, ...]]]:
        """The token ids of what is read after each delta."""
        found = []
        for each in deltas:
            reader = asyncio.create_task(DeltaReader(stream).read())
            await asyncio.sleep(0)
            streams.take(step(each))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            found.append([d.token_ids for d in reader.result()] if reader.done() else [])
            reader.cancel()
        return found

    assert await read_while(delta(0, (5,))) == [[(5,)]]
    reader = asyncio.create_task(DeltaReader(stream).read())
    await asyncio.sleep(0)
    for offset in (1, 2):
        streams.take(step(delta(offset, (5,))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not reader.done()
    streams.take(step(delta(3, (5,))))
    assert [d.token_ids for d in await reader] == [(5, 5, 5)]
    assert await read_while(delta(4, (6,), finish_reason="length")) == [[(6,)]]
    assert await DeltaReader(stream).read() == []


async def test_a_reader_that_gathers_is_woken_by_an_error(streams: Streams) -> None:
    stream = streams.open(request("a"))
    stream.gather = 100
    streams.take(step(delta(0, (5,))))
    await DeltaReader(stream).read()
    reader = asyncio.create_task(DeltaReader(stream).read())
    await asyncio.sleep(0)
    streams.take(step(delta(1, (6,))))
    stream.fail(EngineError("the engine has ended"))
    assert [d.token_ids for d in await reader] == [(6,)]
    with pytest.raises(EngineError, match="has ended"):
        await DeltaReader(stream).read()


async def test_a_rejection_ends_the_stream(streams: Streams) -> None:
    stream = streams.open(request("a"))
    streams.take(step(rejected=[Rejected("a", "no")]))
    with pytest.raises(RequestRejected, match="no"):
        await DeltaReader(stream).read()
    assert not streams.close(stream)
    assert not streams.busy


async def test_a_late_request_is_aborted_as_other_choices_may_run(streams: Streams) -> None:
    stream = streams.open(request("a"))
    stream.sent = True
    streams.take(step(rejected=[Rejected("a", "too late", "deadline")]))
    with pytest.raises(DeadlineExceeded, match="too late"):
        await DeltaReader(stream).read()
    assert streams.close(stream) == ["a"]


async def test_of_choices_that_go_on_apart_the_others_are_aborted_when_one_is_rejected(streams: Streams) -> None:
    stream = streams.open(request("a", n=2))
    streams.take(step(delta(0, (5,))))
    assert [each.request_id for each in streams.requests(stream)] == ["a#0", "a#1"]
    streams.take(step(rejected=[Rejected("a#0", "no")]))
    await DeltaReader(stream).read()
    with pytest.raises(RequestRejected, match="no"):
        await DeltaReader(stream).read()
    assert "a#1" in streams.close(stream)


async def test_a_resumed_request_with_tokens_has_met_its_first_deadline(streams: Streams) -> None:
    stream = streams.open(request("a", max_tokens=9, deadline=90.0, first_token_deadline=50.0))
    (first,) = streams.requests(stream)
    assert (first.deadline, first.first_token_deadline) == (90.0, 50.0)
    streams.take(step(delta(0, (5,))))
    (resumed,) = streams.requests(stream)
    assert (resumed.output_ids, resumed.deadline, resumed.first_token_deadline) == ((5,), 90.0, None)


async def test_an_early_close_counts_until_the_engine_knows(streams: Streams) -> None:
    stream = streams.open(request("a"))
    assert streams.close(stream) == [], "the engine does not have it"
    stream = streams.open(request("a"))
    stream.sent = True
    assert streams.close(stream) == ["a"]
    streams.take(step(delta(0, (5,))))  # already on its way
    assert streams.busy
    with pytest.raises(RequestRejected, match="in use"):
        streams.open(request("a"))
    streams.take(step(aborted=["a"]))
    assert not streams.busy
    streams.open(request("a"))


async def test_no_more_streams_than_the_limit(streams: Streams) -> None:
    for name in "abc":
        streams.open(request(name))
    with pytest.raises(QueueFull, match="3 requests are in progress"):
        streams.open(request("d"))
    with pytest.raises(RequestRejected, match="n=4"):
        Streams(incarnation=2, queue=queue()).open(request("e", n=4))


async def test_replies_go_to_who_asked(streams: Streams) -> None:
    first, second, third = (streams.expect_reply() for _ in range(3))
    third[1].cancel()
    done, failed = ControlReply(second[0], Completed()), ControlReply(first[0], error="one failed")
    replies = [done, failed, ControlReply(third[0], Completed())]
    streams.take(step(replies=replies))
    assert await second[1] == Completed()
    with pytest.raises(ValueError, match="one failed"):
        await first[1]
    assert not streams.busy
