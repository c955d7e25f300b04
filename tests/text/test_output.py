"""Stop strings and token offsets do not depend on where the tokens' text is cut."""

import re
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.text import OutputText, StopStrings, TextChunk, Tokenizer

Load = Callable[[str], Tokenizer]

ALPHABET = "ab €"
TEXT = st.text(ALPHABET, max_size=24)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3)


@pytest.fixture(scope="module")
def qwen(tokenizer_of: Load) -> Tokenizer:
    return tokenizer_of("qwen")


def run(output: OutputText, ids: Sequence[int], cuts: Sequence[int] = ()) -> tuple[str, TextChunk, tuple[int, ...]]:
    """All of the text, the last chunk and all offsets."""
    chunks, start = [], 0
    for cut in [*cuts, len(ids)]:
        chunks.append(output.push(ids[start : start + cut]))
        start += cut
    chunks.append(output.finish())
    return "".join(c.text for c in chunks), chunks[-1], tuple(offset for c in chunks for offset in c.offsets)


def expected(
    tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str], include_stop: bool, min_tokens: int
) -> tuple[str, str | None, int]:
    """The plain way: after each character of each token, look whether the text ends in a stop string."""
    text, data, count = "", b"", 0
    for count, token_id in enumerate(ids, 1):
        data += tokenizer.token_bytes(token_id)
        try:
            more = data.decode()
        except UnicodeDecodeError:
            continue
        data = b""
        for char in more:
            text += char
            found = max((s for s in stop if text.endswith(s)), key=len, default=None)
            if found is not None and count >= min_tokens:
                return text if include_stop else text[: -len(found)], found, count
    return text, None, count


@given(
    text=TEXT,
    stop=STOPS,
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 8),
    cuts=st.lists(st.integers(0, 4), max_size=8),
)
@settings(max_examples=500, deadline=None)
def test_any_cuts_give_the_same(
    qwen: Tokenizer, text: str, stop: list[str], include_stop: bool, min_tokens: int, cuts: list[int]
) -> None:
    ids = qwen.encode(text)
    output = OutputText(qwen, [], stop=stop, include_stop=include_stop, min_tokens=min_tokens)
    shown, last, offsets = run(output, ids, cuts)
    assert (shown, last.stopped, last.keep) == expected(qwen, ids, stop, include_stop, min_tokens)
    assert len(offsets) == last.keep


@given(text=TEXT, stop=STOPS)
@settings(max_examples=200, deadline=None)
def test_all_text_that_cannot_begin_a_stop_string_is_given_at_once(qwen: Tokenizer, text: str, stop: list[str]) -> None:
    output, shown, so_far = OutputText(qwen, [], stop=stop), "", ""
    for char in text:
        so_far += char
        chunk = output.push(qwen.encode(char))
        shown += chunk.text
        if chunk.stopped is not None:
            break
        waiting = max((n for n in range(len(so_far) + 1) for s in stop if _begins(s, so_far, n)), default=0)
        assert shown == so_far[: len(so_far) - waiting]


def _begins(stop: str, text: str, length: int) -> bool:
    """Whether the last `length` characters of the text are a beginning of the stop string, but not all of it."""
    return 0 < length < len(stop) and stop.startswith(text[len(text) - length :])


def test_the_stop_string_that_is_complete_first_wins(qwen: Tokenizer) -> None:
    ids = qwen.encode("xabcd")
    assert run(OutputText(qwen, [], stop=["abcd", "bc"]), ids)[:2] == ("xa", TextChunk("", "bc", 4, ()))
    longest = run(OutputText(qwen, [], stop=["c", "bc", "abc"]), ids)
    assert (longest[0], longest[1].stopped) == ("x", "abc")


def test_the_stop_string_can_be_kept(qwen: Tokenizer) -> None:
    assert run(OutputText(qwen, [], stop=["bc"], include_stop=True), qwen.encode("abcd"))[0] == "abc"


def test_a_stop_string_over_tokens_keeps_all_of_them(qwen: Tokenizer) -> None:
    ids = [i for char in "one END two" for i in qwen.encode(char)]
    output = OutputText(qwen, [], stop=["END"])
    chunks = [output.push([i]) for i in ids]
    assert [c.text for c in chunks[:8]] == ["o", "n", "e", " ", "", "", "", ""]
    assert chunks[6] == TextChunk("", "END", 7, (6,))
    assert chunks[7] == chunks[-1] == output.finish() == TextChunk("", "END", 7, ())


def test_text_that_only_looked_like_a_stop_string_comes_later(qwen: Tokenizer) -> None:
    output = OutputText(qwen, [], stop=["END"])
    assert output.push(qwen.encode("EN")).text == ""
    assert output.push(qwen.encode("X")).text == "ENX"
    assert output.push(qwen.encode("E")).text == ""
    assert output.finish().text == "E"


def test_the_prompt_is_not_searched(qwen: Tokenizer) -> None:
    output = OutputText(qwen, qwen.encode("the EN"), stop=["END"])
    assert output.push(qwen.encode("D")).text == "D"


def test_a_stop_string_before_min_tokens_is_text(qwen: Tokenizer) -> None:
    ids = [i for char in "aXbXc" for i in qwen.encode(char)]
    text, last, _ = run(OutputText(qwen, [], stop=["X"], min_tokens=3), ids)
    assert (text, last.stopped, last.keep) == ("aXb", "X", 4)
    assert OutputText(qwen, [], stop=["X"], min_tokens=3).push(ids[:2]).text == "aX"


def test_a_stop_string_may_begin_at_the_end_of_one_that_came_too_early(qwen: Tokenizer) -> None:
    ids = [i for char in "aXaXab" for i in qwen.encode(char)]
    output = OutputText(qwen, [], stop=["aXa"], min_tokens=4)
    assert output.push(ids[:3]).text == "aX"
    assert [output.push([i]) for i in ids[3:]][1] == TextChunk("", "aXa", 5, (4,))
    assert run(OutputText(qwen, [], stop=["aXa"], min_tokens=4), ids)[0] == "aX"


@pytest.mark.parametrize(
    ("stop", "include_stop", "text", "shown", "found", "keep"),
    [
        ("<|im_end|>", False, "ab<|im_end|>cd", "ab", "<|im_end|>", 3),
        ("<|im_end|>", True, "ab<|im_end|>cd", "ab<|im_end|>", "<|im_end|>", 3),
        ("<|im_end|>\n", False, "a<|im_end|>\nb", "a", "<|im_end|>\n", 3),
        ("\n<|im_start|>", False, "a\n<|im_start|>b", "a", "\n<|im_start|>", 3),
        ("<|im_end|>\n<|im_start|>", False, "<|im_end|>\n<|im_start|>b", "", "<|im_end|>\n<|im_start|>", 3),
        # a special token that no stop string contains is left out, and divides nothing
        ("ab", False, "xa<|im_start|>b", "x", "ab", 4),
        ("<|im", False, "a<|im_end|>b", "ab", None, 3),
        ("<|im_end|>b", False, "x<|im_end|>c", "xc", None, 3),
        ("<|im_end|>b", True, "x<|im_end|><|im_start|>c", "xc", None, 4),
    ],
)
def test_a_stop_string_may_contain_special_tokens(
    qwen: Tokenizer, stop: str, include_stop: bool, text: str, shown: str, found: str | None, keep: int
) -> None:
    """Though special tokens are not part of the output."""
    ids = [i for part in re.split(r"(<\|im_\w+\|>)", text) for i in one_by_one(qwen, part)]
    for cuts in ([], [1] * len(ids)):
        output = OutputText(qwen, [], stop=[stop], include_stop=include_stop)
        said, last, _ = run(output, ids, cuts)
        assert (said, last.stopped, last.keep) == (shown, found, keep)


def one_by_one(tokenizer: Tokenizer, text: str) -> list[int]:
    whole = tokenizer.encode(text)
    return whole if len(whole) == 1 else [i for char in text for i in tokenizer.encode(char)]


def test_special_tokens_that_are_shown_are_searched_once(qwen: Tokenizer) -> None:
    end = qwen.encode("<|im_end|>")
    for options in ({"skip_special_tokens": False}, {"shown": frozenset(end)}):
        output = OutputText(qwen, [], stop=["<|im_end|>x"], **options)  # type: ignore[arg-type]
        assert run(output, [*end, *qwen.encode("a")])[0] == "<|im_end|>a"


def test_a_stop_string_made_by_the_last_bytes(qwen: Tokenizer) -> None:
    half = qwen.encode("🙂")[:1]
    assert qwen.token(half[0]).startswith("bytes:")
    output = OutputText(qwen, [], stop=["\ufffd"])
    assert output.push([*qwen.encode("a"), *half]).text == "a"
    assert output.finish() == TextChunk("", "\ufffd", 2, ())


def test_offsets_say_where_each_token_begins(qwen: Tokenizer) -> None:
    ids = [*qwen.encode("def"), qwen.encode("<|im_end|>")[0], *qwen.encode("🙂"), *qwen.encode("!")]
    text, _, offsets = run(OutputText(qwen, []), ids, [1, 1, 2])
    assert text == "def🙂!"
    assert len(offsets) == len(ids)
    assert offsets[0] == 0 and offsets[-1] == 4 and list(offsets) == sorted(offsets)
    assert run(OutputText(qwen, [], skip_special_tokens=False), ids)[0] == "def<|im_end|>🙂!"


def test_an_empty_stop_string_is_refused(qwen: Tokenizer) -> None:
    with pytest.raises(ValueError, match="a stop string is empty"):
        OutputText(qwen, [], stop=["a", ""])


def test_states_wait_for_no_more_than_they_must() -> None:
    stops = StopStrings(["abab", "ba"])
    state, held = 0, []
    for char in "xaba":
        state = stops.advance(state, char)
        held.append(stops.hold(state))
    assert held == [0, 1, 2, 3]


def test_after_a_whole_stop_string_its_end_is_held_if_it_begins_one() -> None:
    stops = StopStrings(["aba", "xyz"])
    state, held = 0, []
    for char in "abaxyz":
        state = stops.advance(state, char)
        held.append(stops.hold(state))
    assert held == [1, 2, 1, 1, 2, 0]
