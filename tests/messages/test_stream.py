"""A stream's state: whatever engines send and whenever they end, its consumer gets the whole output once."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.messages import DeadlineExceeded, EngineError, RequestRejected, Stream, TokenDelta
from tests.schedule.simulated import request

LENGTH = 24
CHOICES = 3


def token(choice: int, position: int) -> int:
    return 100 * choice + position


@dataclass
class Part:
    """What an engine works on: one choice of a request under the engine's name."""

    name: str
    choice: int
    done: int

    def delta(self, count: int) -> TokenDelta:
        """Its next `count` tokens."""
        first, self.done = self.done, min(self.done + count, LENGTH)
        tokens = tuple(token(self.choice, position) for position in range(first, self.done))
        return TokenDelta(self.name, self.choice, first, tokens, "length" if self.done == LENGTH else None)


def begin(stream: Stream) -> dict[int, Part]:
    """The parts that a new engine works on."""
    parts = [
        Part(each.request_id, choice, len(each.output_ids))
        for each in stream.requests()
        for choice in range(each.first_choice, each.first_choice + each.n)
    ]
    assert len({part.choice for part in parts}) == len(parts)
    return {part.choice: part for part in parts}


@given(
    st.integers(1, CHOICES),
    st.lists(
        st.one_of(
            st.tuples(st.just("tokens"), st.integers(0, CHOICES - 1), st.integers(1, 9)),
            st.tuples(st.sampled_from(["end", "take"]), st.just(0), st.just(0)),
            st.tuples(st.just("finish"), st.integers(0, CHOICES - 1), st.integers(0, LENGTH)),
        ),
        max_size=60,
    ),
)
def test_the_output_is_whole_however_often_engines_end(n: int, events: list[tuple[str, int, int]]) -> None:
    stream = Stream(request("a", 5, LENGTH, n=n))
    parts = begin(stream)
    outputs: dict[int, list[int]] = {choice: [] for choice in range(n)}
    ends: dict[int, int] = {}  # where the client ended a choice

    def take() -> None:
        for delta in stream.take():
            assert delta.request_id == "a"
            del outputs[delta.choice][delta.offset :]
            outputs[delta.choice] += delta.token_ids

    for event, choice, number in events:
        if event == "take":
            take()
        elif event == "end":
            parts = begin(stream)
        elif choice in parts and parts[choice].done < LENGTH:
            part = parts[choice]
            if event == "tokens" and choice not in ends:
                stream.push(part.delta(number))
            elif event == "finish" and choice not in ends and number <= part.done:
                ends[choice] = number
                assert stream.finish(choice, "stop", number) == part.name
    for choice in ends:  # the engine may have ended before it got them
        if choice in parts:
            stream.push(TokenDelta(parts[choice].name, choice, ends[choice], (), "stop"))
    open_parts = [part for part in parts.values() if part.choice not in ends and part.done < LENGTH]
    assert {part.name for part in open_parts} <= set(stream.names())
    for part in open_parts:
        while part.done < LENGTH:
            stream.push(part.delta(5))
    take()
    assert stream.complete and stream.error is None and not stream.in_engine
    for choice, output in outputs.items():
        assert output == [token(choice, position) for position in range(ends.get(choice, LENGTH))]


def test_a_request_that_has_begun_nothing_is_sent_as_it_is() -> None:
    asked = request("a", 5, 9, n=3, prompt_logprobs=1)
    stream = Stream(asked)
    assert stream.requests() == stream.requests() == [asked]
    assert stream.names() == ["a"]


def test_its_reader_is_notified_of_what_is_due_and_of_its_end() -> None:
    stream, calls = Stream(request("a", 5, 20)), []
    stream.notify, stream.gather = lambda: calls.append(stream.unread), 4
    for position in range(9):
        stream.push(TokenDelta("a", 0, position, (1,)))
        if position in (0, 4):
            assert len(stream.take()) == 1
    assert calls == [1, 4, 4]
    stream.fail(EngineError("it has ended"))
    stream.fail(EngineError("again"))
    assert len(calls) == 5 and str(stream.error) == "it has ended"


@pytest.mark.parametrize(
    ("error", "in_engine"), [(RequestRejected("no"), False), (DeadlineExceeded("late"), True)], ids=["refused", "late"]
)
def test_other_choices_of_a_late_request_may_still_run(error: Exception, in_engine: bool) -> None:
    stream = Stream(request("a", 5, 20, n=2))
    stream.refuse(error)
    assert stream.error is error and stream.in_engine == in_engine


def test_an_abort_before_it_is_sent_ends_it() -> None:
    stream = Stream(request("a", 5, 20, n=2))
    assert stream.abort() == []
    assert [(delta.choice, delta.finish_reason) for delta in stream.take()] == [(0, "abort"), (1, "abort")]
    assert stream.complete and stream.requests() == []


def test_an_abort_that_an_engine_did_not_get_holds_for_the_next() -> None:
    stream = Stream(request("a", 5, 20, n=2))
    stream.requests()
    stream.push(TokenDelta("a", 0, 0, (5, 6)))
    stream.finish(1, "stop", 0)
    assert stream.abort() == ["a"]
    stream.push(TokenDelta("a", 0, 2, (7,)))
    assert stream.requests() == [] and stream.complete
    ends = {delta.choice: (delta.offset + len(delta.token_ids), delta.finish_reason) for delta in stream.take()}
    assert ends == {0: (2, "abort"), 1: (0, "stop")}
