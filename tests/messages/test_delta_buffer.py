"""Merging deltas: whatever waits together reads as if it had been read one by one."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.messages import DeltaBuffer, RequestTiming, TokenDelta

ROW = 12


def rows(first: int, count: int) -> bytes:
    return b"".join(position.to_bytes(ROW, "little") for position in range(first, first + count))


def read(deltas: list[TokenDelta]) -> tuple[list[int], bytes, TokenDelta | None]:
    """Tokens and logprobs of one choice as its reader ends up with them, and the delta that ended it."""
    tokens: list[int] = []
    logprobs = b""
    end = None
    for delta in deltas:
        assert delta.offset <= len(tokens)
        assert delta.offset == len(tokens) or delta.finish_reason
        tokens[delta.offset :] = delta.token_ids
        logprobs = logprobs[: delta.offset * ROW] + delta.logprobs
        end = delta if delta.finish_reason else end
    return tokens, logprobs, end


@st.composite
def choices(draw: st.DrawFn) -> list[TokenDelta]:
    """Deltas of one choice as an engine sends them; it may be truncated at its end."""
    borders = sorted(draw(st.sets(st.integers(1, 30), min_size=1)))
    deltas = [
        TokenDelta("r", 0, a, tuple(range(a, b)), cached_tokens=a, logprobs=rows(a, b - a))
        for a, b in pairwise([0, *borders])
    ]
    keep = draw(st.integers(0, borders[-1]))
    deltas.append(TokenDelta("r", 0, keep, finish_reason="stop", timing=RequestTiming(), incarnation=3))
    return deltas


@given(choices(), st.sets(st.integers(0, 31)))
def test_any_grouping_reads_the_same(deltas: list[TokenDelta], reads: set[int]) -> None:
    buffer = DeltaBuffer()
    merged = []
    for index, delta in enumerate(deltas):
        buffer.push(delta)
        if index in reads:
            merged += buffer.take()
    merged += buffer.take()
    assert not buffer.take()
    assert len(merged) <= len(reads & set(range(len(deltas)))) + 1
    tokens, logprobs, end = read(merged)
    assert (tokens, logprobs) == read(deltas)[:2]
    assert end is not None and end.finish_reason == "stop" and end.timing == RequestTiming()
    assert merged[-1].incarnation == 3
    assert max(delta.cached_tokens for delta in merged) == deltas[-2].cached_tokens


def test_choices_stay_apart_and_in_order_and_one_delta_untouched() -> None:
    buffer = DeltaBuffer()
    alone = TokenDelta("a", 0, 0, (1,), prompt_logprobs=b"p")
    buffer.push(alone)
    for offset in range(3):
        for choice in (1, 0):
            buffer.push(TokenDelta("b", choice, offset, (offset,)))
    first, second, third = buffer.take()
    assert first is alone
    assert (second.choice, second.token_ids) == (1, (0, 1, 2))
    assert (third.choice, third.token_ids) == (0, (0, 1, 2))


def test_a_gap_is_refused() -> None:
    buffer = DeltaBuffer()
    buffer.push(TokenDelta("a", 0, 0, (1, 2)))
    with pytest.raises(ValueError, match="a, choice 0: tokens 2 to 4 are missing"):
        buffer.push(TokenDelta("a", 0, 5, (1,)))
