"""Grammars that are meant to stop the server: what each takes, who refuses it, and that other sequences go on."""

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.messages import GRAMMAR_TOO_COMPLEX, Grammar
from penstock.text import GrammarChecker, GrammarError
from penstock.text.grammars import copies
from penstock.text.grammars.matchers import GrammarMatcher, GrammarMatchers
from tests.patience import AT_ONCE
from tests.text.test_grammars import END, Checks, Words

SIZE = 9  # words of a mask
JSON = Grammar("json_schema", '{"type": "array", "items": {"type": "string", "maxLength": 20}}')
# The same without a place where the checker could see it soon.
GATE = "start: GATE r0\nGATE: /[a-z]{10}!/\n"


def any_two(letters: int) -> str:
    """Every one of some rules is any two of them: the parser finds each item again and again."""
    rules = [f"r{i}" for i in range(letters)]
    choice = "(" + "|".join(rules) + ")"
    return "start: r0\n" + "".join(f'{rule}: {choice} {choice} | "x"\n' for rule in rules)


def all_pairs(letters: int) -> str:
    rules = [f"r{i}" for i in range(letters)]
    pairs = " | ".join(f"{first} {second}" for first in rules for second in rules)
    return "start: r0\n" + "".join(f'{rule}: {pairs} | "x"\n' for rule in rules)


def chained(links: int) -> str:
    """A rule that refers to itself through each of many others."""
    rules = [f"b{i}" for i in range(links)]
    choice = " | ".join(f"{rule} a" for rule in rules)
    return f'start: a\na: "x" | {choice}\n' + "".join(f"{rule}: a\n" for rule in rules)


HOSTILE = {
    "82 bytes": any_two(3)[:-1],
    "6 KB": any_two(28),
    "50 KB": any_two(79),
    "pairs": all_pairs(6),
    "more pairs": all_pairs(14),
    "a chain": chained(10),
    "a long chain": chained(100),
    "after a text": any_two(3).replace("start: ", f"start: {json.dumps('a' * 30)} "),
}


@pytest.fixture(scope="module")
def checks() -> Iterator[Checks]:
    made = Checks()
    made.check("regex", "a")  # the process is started
    yield made
    made.close()


def make_matchers() -> GrammarMatchers:
    return GrammarMatchers(Words, 262, [END], threads=2)  # type: ignore[arg-type]


def follow(matchers: GrammarMatchers, rows: list[GrammarMatcher], texts: list[bytes]) -> list[int]:
    """Goes on by the texts, byte by byte, all rows in each step. Returns the bytes that each row has followed."""
    words, done = np.zeros((len(rows), SIZE), np.int32), [0] * len(rows)
    for at in range(max(map(len, texts))):
        open_rows = [i for i, row in enumerate(rows) if not row.error and at < len(texts[i])]
        matchers.fill([(rows[i], ()) for i in open_rows], words)
        for i in open_rows:
            if not rows[i].error:
                rows[i].take([texts[i][at]])
                done[i] += not rows[i].error
    return done


@pytest.mark.parametrize("name", HOSTILE)
def test_the_checker_refuses(checks: Checks, name: str) -> None:
    began = time.monotonic()
    with pytest.raises(GrammarError, match=r"too complex|takes more than 0.7 s"):
        checks.check("grammar", HOSTILE[name])
    assert time.monotonic() - began < AT_ONCE
    assert checks.check("grammar", 'start: "a" | "b"').kind == "lark", "the next one is checked"


@pytest.mark.parametrize(
    "text",
    [
        'start: expr\nexpr: term | expr "+" term\nterm: NUMBER | "(" expr ")"\nNUMBER: /[0-9]+/',
        'start: item+\nitem: "- " /[a-z ]{1,40}/ "\\n"',
        'root ::= object\nobject ::= "{" ws "}"\nws ::= [ \\t]*',
    ],
)
def test_the_checker_takes_what_is_not_ambiguous(checks: Checks, text: str) -> None:
    assert checks.check("grammar", text).kind == "lark"


def test_a_schema_may_have_many_alternatives_and_properties(checks: Checks) -> None:
    optional = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(800)}}
    kinds = {"anyOf": [{"type": "object", "properties": {"k": {"const": i}}, "required": ["k"]} for i in range(300)]}
    for schema in (optional, kinds, {"const": "The quick brown fox. " * 190}):
        checks.check("json_schema", json.dumps(schema))
    checks.check("choice", json.dumps([f"answer {i}" for i in range(3000)]))


@pytest.mark.parametrize("choices", [["", "a"], ["a", "ab", "b"], ["one"]])
def test_choices_are_one_terminal(checks: Checks, choices: list[str]) -> None:
    grammar, matchers = checks.check("choice", json.dumps(choices)), make_matchers()
    for text in choices:
        matcher = matchers.matcher(grammar, [*text.encode(), END])
        assert not matcher.error, (text, matcher.error)
    assert matchers.matcher(grammar, list(b"ac")).error


@pytest.mark.parametrize("letters", [3, 10, 20, 28])
def test_a_sequence_that_takes_long_fails_alone(letters: int) -> None:
    """The checker has not seen this grammar: the engine's own limits hold."""
    matchers = make_matchers()
    hostile = Grammar("lark", any_two(letters).replace("start: r0\n", GATE))
    rows = [matchers.matcher(JSON, []), *(matchers.matcher(hostile, []) for _ in range(32)), matchers.matcher(JSON, [])]
    honest, attack = b'["a honest text", "and another one"]', b"abcdefghij!" + b"x" * 300
    began = time.process_time()
    done = follow(matchers, rows, [honest, *[attack] * 32, honest])
    assert time.process_time() - began < AT_ONCE, "all 32 together"
    assert done[0] == done[-1] == len(honest)
    assert {row.error for row in (rows[0], rows[-1])} == {""}
    assert all(row.error.startswith(GRAMMAR_TOO_COMPLEX) for row in rows[1:-1])
    assert "<non-verbose/>" not in rows[1].error


def test_a_grammar_that_took_too_long_once_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "GRAMMAR_SECONDS", 0.0)
    matchers, plain = make_matchers(), Grammar("regex", "[a-z]*")
    first = matchers.matcher(plain, [])
    follow(matchers, [first], [b"a"])
    assert "of processor time for one token" in matchers.matcher(plain, []).error
    assert not matchers.matcher(Grammar("regex", "[a-y]*"), []).error


def test_a_sequence_may_not_use_much_time_all_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token gives back a part of the time, so that a long output fails no sooner than a short one."""
    monkeypatch.setattr(copies, "SEQUENCE_SECONDS", 0.0)
    matcher = make_matchers().matcher(Grammar("regex", "[a-z]*"), list(b"abc"))
    assert matcher.error.startswith(f"{GRAMMAR_TOO_COMPLEX}: the limit of its processor time is")


def text_of(length: int) -> bytes:
    return b'{"text":"' + (b"The quick brown fox jumps over the lazy dog. " * (length // 45 + 1))[:length] + b'"}'


def text_schema(most: int) -> Grammar:
    properties = {"text": {"type": "string", "maxLength": most}}
    return Grammar("json_schema", json.dumps({"type": "object", "properties": properties, "required": ["text"]}))


def test_long_honest_answers_do_not_wear_out_their_schema() -> None:
    """A lexer has so many states in all: an answer of 12,000 characters needs more than that, and so do the next."""
    matchers, grammar, answer = make_matchers(), text_schema(16_000), text_of(12_000)
    for _ in range(3):
        row = matchers.matcher(grammar, [])
        assert (follow(matchers, [row], [answer]), row.error) == ([len(answer)], "")


def test_a_lexer_that_fails_under_others_is_made_anew() -> None:
    """Several outputs at once: the state that is one too many is made by any of them, in a mask or by a token."""
    matchers, grammar, lengths = make_matchers(), text_schema(16_000), (500, 9000, 2500, 7000)
    rows = [matchers.matcher(grammar, []) for _ in lengths]
    done = follow(matchers, rows, [text_of(length) for length in lengths])
    assert [row.error for row in rows] == [""] * 4
    assert done == [len(text_of(length)) for length in lengths]
    assert len(matchers._compiled) == 1


def test_a_grammar_that_takes_long_to_compile_is_not_compiled_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.text.grammars.matchers.RENEW_SECONDS", -1.0)
    matchers, grammar, answer = make_matchers(), text_schema(16_000), text_of(12_000)
    row = matchers.matcher(grammar, [])
    follow(matchers, [row], [answer])
    assert row.error.startswith(GRAMMAR_TOO_COMPLEX) and "too many states" in row.error
    later = matchers.matcher(grammar, [])
    assert (follow(matchers, [later], [text_of(100)]), later.error) == ([len(text_of(100))], "")


def test_an_output_that_takes_long_to_follow_once_more_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its masks would be those of an earlier place."""
    monkeypatch.setattr(copies, "RENEW_SECONDS", -1.0)
    matchers, grammar, answer = make_matchers(), text_schema(16_000), text_of(12_000)
    row = matchers.matcher(grammar, [])
    (done,) = follow(matchers, [row], [answer])
    assert row.error.startswith(GRAMMAR_TOO_COMPLEX) and 0 < done < len(answer)


async def test_a_check_that_something_else_ended_is_not_remembered() -> None:
    """A process that is killed, as the kernel does when memory is short, says nothing about the grammar."""
    checker = GrammarChecker(Words(), 262, [END])  # type: ignore[arg-type]
    try:
        await checker.check("regex", "a")
        process = checker._process
        assert process is not None
        asked = asyncio.ensure_future(checker.check("grammar", any_two(60)))
        await asyncio.sleep(0.05)
        process._process.kill()
        with pytest.raises(RuntimeError, match="was killed, or had no answer"):
            await asked
        with pytest.raises(GrammarError, match=r"too complex|takes more than 0.7 s"):
            await checker.check("grammar", any_two(60))
    finally:
        checker.close()


async def test_a_stopped_process_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.text.grammars.checker.WALL_SECONDS", 0.5)
    checker = GrammarChecker(Words(), 262, [END])  # type: ignore[arg-type]
    try:
        await checker.check("regex", "a")
        assert checker._process is not None
        checker._process._process.send_signal(signal.SIGSTOP)
        with pytest.raises(RuntimeError, match=r"no answer after 0\.5 s"):
            await checker.check("regex", "b")
        monkeypatch.undo()
        assert (await checker.check("regex", "b")).text == "b"
    finally:
        checker.close()


async def test_secrets_stay_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process parses grammars of clients in native code."""
    for name in ("PENSTOCK_API_KEY", "PENSTOCK_ADMIN_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "a-secret")
    monkeypatch.setenv("PENSTOCK_TEST", "no secret")
    checker = GrammarChecker(Words(), 262, [END])  # type: ignore[arg-type]
    try:
        await checker.check("regex", "a")
        assert checker._process is not None
        environment = Path(f"/proc/{checker._process._process.pid}/environ").read_bytes()
        assert b"no secret" in environment and b"a-secret" not in environment
    finally:
        checker.close()
