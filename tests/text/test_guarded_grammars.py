"""Grammars that are followed on threads of their own: the same masks, and no step waits for a slow call."""

import json
import time
from collections.abc import Sequence

import numpy as np
import pytest

from penstock.messages import GRAMMAR_TOO_COMPLEX, GRAMMARS_BUSY, Grammar
from penstock.text.grammars import lanes
from penstock.text.grammars.compile import compile_grammar
from penstock.text.grammars.guarded import GuardedCopy
from penstock.text.grammars.matchers import LARGE, GrammarMatcher, GrammarMatchers
from tests.patience import wait_for
from tests.text.test_grammars import END, Words
from tests.text.test_hostile_grammars import GATE, JSON, SIZE, chained

SUMS = Grammar("lark", 'start: expr\nexpr: term | expr "+" term\nterm: /[0-9]+/ | "(" expr ")" | "sum"')
TEXT = b"(12+sum)+3"
SLOW = Grammar("lark", chained(240).replace("start: a\n", GATE.replace("r0", "a")))
SLOW_TEXT, SLOW_SECONDS = b"abcdefghij!x", 0.5


class LongWords(Words):
    """Tokens of many letters let llguidance look far ahead."""

    words = (b"x" * 2, b"x" * 4, b"x" * 8, b"x" * 16)


def make_matchers() -> GrammarMatchers:
    return GrammarMatchers(LongWords, 262, [END], threads=2)  # type: ignore[arg-type]


def masks(matchers: GrammarMatchers, row: GrammarMatcher, drafts: Sequence[int] = ()) -> np.ndarray:
    words = np.full((1 + len(drafts), SIZE), -1, np.int32)
    matchers.fill([(row, drafts)], words)
    return words


def is_guarded(row: GrammarMatcher) -> bool:
    return isinstance(row.grammar, GuardedCopy)


def test_masks_and_forced_tokens_are_those_of_the_library() -> None:
    matchers = make_matchers()
    row = matchers.matcher(SUMS, [])
    assert matchers._tokenizer is not None and is_guarded(row)
    plain = compile_grammar(matchers._tokenizer, SUMS)
    for at in range(len(TEXT)):
        assert masks(matchers, row).tobytes() == plain.compute_bitmask()
        drafts, ahead = list(TEXT[at : at + 3]), plain.deep_copy()
        for line, token_id in zip(masks(matchers, row, drafts), (*drafts, END), strict=True):
            assert line.tobytes() == ahead.compute_bitmask(), (at, token_id)
            ahead.consume_token(token_id)
        assert row.forced() == tuple(plain.compute_ff_tokens()[:1])
        row.take(TEXT[at : at + 1])
        assert plain.consume_token(TEXT[at])
    row.take([END])
    assert row.free(0) and not row.error and row.forced() == ()


def test_a_token_that_the_grammar_does_not_allow_is_an_error() -> None:
    matchers = make_matchers()
    row = matchers.matcher(SUMS, list(TEXT[:4]))
    row.take(b"x")
    assert row.error.startswith(f"the request's grammar cannot be followed beyond token {ord('x')}")
    assert "cannot be followed" in matchers.matcher(SUMS, list(b"1+1x")).error


def test_which_grammars_are_guarded() -> None:
    matchers = make_matchers()
    large = json.dumps({"enum": [f"value {i}" for i in range(LARGE // 10)]})
    kinds = [Grammar("regex", "a"), JSON, Grammar("json_schema", large), Grammar("tools", SUMS.text), SUMS]
    assert [is_guarded(matchers.matcher(grammar, [])) for grammar in kinds] == [False, False, True, False, True]


def test_no_step_waits_for_a_slow_call() -> None:
    """Eight outputs of a grammar with a call that takes long, between others. Each would wait for the lexer."""
    matchers = make_matchers()
    matchers.matcher(JSON, [])
    assert matchers._tokenizer is not None
    plain, slowest = compile_grammar(matchers._tokenizer, SLOW), 0.0
    for token_id in SLOW_TEXT:
        began = time.thread_time()
        plain.compute_bitmask()
        plain.consume_token(token_id)
        slowest = max(slowest, time.thread_time() - began)
    assert slowest > SLOW_SECONDS, "the library has become faster: take a worse grammar"

    rows = [matchers.matcher(JSON, []), *(matchers.matcher(SLOW, []) for _ in range(8)), matchers.matcher(SUMS, [])]
    texts = [b'["some honest text"]', *[SLOW_TEXT] * 8, b"1+2+3+4+5+6+7"]
    longest = 0.0
    for at in range(len(SLOW_TEXT)):
        began = time.monotonic()
        open_rows = [i for i, row in enumerate(rows) if not row.error]
        matchers.fill([(rows[i], ()) for i in open_rows], np.zeros((len(rows), SIZE), np.int32))
        for i in open_rows:
            rows[i].take(texts[i][at : at + 1])
        for i in open_rows:
            rows[i].forced()
        longest = max(longest, time.monotonic() - began)
    assert longest < slowest / 2, (longest, slowest)
    assert [row.error for row in (rows[0], rows[-1])] == ["", ""]
    assert all(row.error.startswith(GRAMMAR_TOO_COMPLEX) for row in rows[1:-1])
    assert matchers.matcher(SLOW, []).error.startswith(GRAMMAR_TOO_COMPLEX), "it is not tried again"


def test_too_many_calls_that_were_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    matchers = make_matchers()
    monkeypatch.setattr(lanes, "MOST_GIVEN_UP", 1)
    slow = matchers.matcher(SLOW, [])
    for token_id in SLOW_TEXT:
        if not slow.error:
            masks(matchers, slow)
            slow.take([token_id])
    assert slow.error and matchers._lanes is not None and matchers._lanes.full
    assert matchers.matcher(SUMS, []).error.startswith(GRAMMARS_BUSY)
    assert not matchers.matcher(JSON, []).error, "others do not need these threads"
    wait_for(lambda lanes=matchers._lanes: not lanes.full, "a thread to be free")  # type: ignore[misc]
    row = matchers.matcher(SUMS, list(TEXT))
    assert not row.error and masks(matchers, row).any()
