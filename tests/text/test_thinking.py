"""Budgets of thinking, token by token: what may come next, whatever the tokens of a text are."""

import numpy as np
import pytest
from msgspec.structs import replace

from penstock.messages import Grammar, Thinking
from penstock.text.calls import MessageParser
from penstock.text.calls.budget import thinking_of
from penstock.text.calls.formats import REASONING_FORMATS
from penstock.text.grammars.thinking import Thinker, ThinkingMarkers
from tests.runtime.byte_tokens import END, grammars

THOUGHTS = "0123456789 XYZ" * 9  # no character of a marker
THINK = Thinking(4, "<think>", "</think>")


def encode(text: str) -> list[int]:
    return list(text.encode())


def thinker(thinking: Thinking, *, strict: bool = False, special: frozenset[int] = frozenset()) -> Thinker:
    return Thinker(ThinkingMarkers(thinking, encode, special), thinking, strict=strict)


def follow(state: Thinker, wanted: str) -> str:
    """The text of a model that writes `wanted`, a character a token, where it may. What it must write counts."""
    text, rest = "", wanted
    while rest or state.allowed is not None:
        char = rest[0] if state.allowed is None else chr(state.allowed[0])
        rest = rest.removeprefix(char)
        text += char
        state.take(char.encode())
    return text


@pytest.mark.parametrize(
    ("thinking", "wanted", "text"),
    [
        (THINK, "<think>abcdef", "<think>abcd</think>ef"),
        (THINK, "<think>abc</think>x", "<think>abc</think>x"),
        (THINK, "a <think>ab</think>c<think>def", "a <think>ab</think>c<think></think>def"),
        (replace(THINK, opened=True), "abcdef", "abcd</think>ef"),
        (replace(THINK, opened=True, budget=0), "abc", "</think>abc"),
        (replace(THINK, budget=0), "<think>abc", "<think></think>abc"),
        (THINK, "<think>ab</x", "<think>ab</think>x"),
        (THINK, "no thoughts, long text", "no thoughts, long text"),
        (replace(THINK, answers=("[final]",)), "<think>abcdef", "<think>abcd</think>[final]ef"),
        (replace(THINK, answers=("[final]", "[call]")), "<think>abcdef", "<think>abcd</think>[fef"),
    ],
)
def test_a_budget(thinking: Thinking, wanted: str, text: str) -> None:
    assert follow(thinker(thinking), wanted) == text


def test_text_of_an_answer_is_no_marker_where_a_grammar_holds_it() -> None:
    wanted = "\n<think>ab</think>\n{<think>abcdefgh"
    assert follow(thinker(replace(THINK, budget=20), strict=True), wanted) == wanted
    special = frozenset(encode("<think>"))
    assert follow(thinker(THINK, strict=True, special=special), "{<think>abcdef") == "{<think>abcd</think>ef"


def test_free_says_what_any_tokens_leave() -> None:
    """Compared with all that a few tokens can do: one of the marker, or any other."""
    marks = {"<": Thinking(2, "<", ">"), "opened": Thinking(2, "<", ">", opened=True)}
    for first in marks.values():
        states = [thinker(first)]
        for _ in range(5):
            for state in states:
                for tokens in range(4):
                    reached = [state]
                    allowed = [state.allowed is None]
                    for _ in range(tokens):
                        reached = [after(each, char) for each in reached for char in "<>a" if each.allowed is None]
                        allowed += [each.allowed is None for each in reached]
                    assert state.free(tokens) == all(allowed), (first, tokens)
            states = [after(each, char) for each in states for char in "<>a" if each.allowed is None]


def after(state: Thinker, char: str) -> Thinker:
    state = state.copy()
    state.take(char.encode())
    return state


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_the_end_of_each_format_is_what_its_parser_reads(name: str) -> None:
    """Reasoning that is cut, and the answer after it. No marker is ever part of either."""
    format = REASONING_FORMATS[name]
    prompts = ["<|start|>assistant"] if name == "harmony" else ["", f"{format.markers[0]}\n"]
    for prompt, budget in ((prompt, budget) for prompt in prompts for budget in (0, 1, 5)):
        thinking = thinking_of(format, prompt, budget)
        begin = "" if thinking.opened else thinking.begin
        text = follow(thinker(thinking), begin + THOUGHTS)
        shown = text.partition(thinking.end)[2]
        for answer in thinking.answers:
            shown = shown.removeprefix(answer)
        for cut in (1, 3, 1000):
            parser = MessageParser(None, format, prompt_end=prompt)
            parts = [part for i in range(0, len(text), cut) for part in parser.push(text[i : i + cut])]
            parts += parser.finish()
            assert "".join(p.text for p in parts if p.kind == "reasoning") == THOUGHTS[:budget]
            assert "".join(p.text for p in parts if p.kind == "content") == shown == THOUGHTS[budget:]


def test_drafts_get_the_masks_that_single_tokens_get() -> None:
    """For every end of an output: what may come after some tokens does not depend on whether they are drafts."""
    held = (
        Grammar("any", "", thinking=THINK),
        Grammar("any", "", thinking=replace(THINK, opened=True)),
        Grammar("regex", "[a-d]{3,9}", "</think>", replace(THINK, opened=True)),
        Grammar("regex", "[a-d]{3,9}", "<call>", replace(THINK, opened=True, budget=12)),
        Grammar("lark", 'start: "<think>" /[a-d]{0,9}/ "</think>" /[a-d]{3,9}/', thinking=THINK),
    )
    outputs = (
        "abcd</think>abc",
        "<think>abc</think>abc",
        "<think>abcd</think>abcd",
        "ab<call>dd</think>a <call>abc",
        "ab</think>abc",
    )
    known = grammars()
    for grammar in held:
        for output in outputs:
            ids = [*encode(output), END]
            known.prepare(grammar)
            single = np.full((len(ids), 10), -1, np.int32)
            whole = single.copy()
            matchers = [known.matcher(grammar, ids[:i]) for i in range(len(ids))]
            for i, matcher in enumerate(matchers):
                known.fill([(matcher, ())], single[i : i + 1])
                allows = not matcher.error and bool(single[i, ids[i] // 32] >> ids[i] % 32 & 1)
                if not allows:
                    break
            known.fill([(known.matcher(grammar, ()), ids[:i])], whole[: i + 1])
            assert (whole[: i + 1] == single[: i + 1]).all(), (grammar, output, i)
