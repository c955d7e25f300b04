"""Text made while tokens come is the text of the whole, whatever the bytes."""

import random
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.text import Detokenizer, Tokenizer
from tests.text.tokenizers_on_disk import KINDS

Load = Callable[[str], Tokenizer]


def stream(tokenizer: Tokenizer, prompt: list[int], output: list[int], *, skip_special_tokens: bool = True) -> str:
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
    return "".join([*map(detokenizer.push, output), detokenizer.flush()])


def ids_of(tokenizer: Tokenizer, seed: int, most: int = 14) -> list[int]:
    """Any ids, some of them beyond the vocabulary, and more single bytes and special tokens than chance would give."""
    draw = random.Random(seed)
    bytes_and_specials = [i for i in range(tokenizer.vocab_size) if not _is_text(tokenizer, i)]
    bytes_and_specials += sorted(tokenizer.special_ids)
    every = [*range(tokenizer.vocab_size + 2)]
    return [draw.choice(draw.choice((every, bytes_and_specials or every))) for _ in range(draw.randrange(most))]


def _is_text(tokenizer: Tokenizer, token_id: int) -> bool:
    return not tokenizer.token(token_id).startswith("bytes:")


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", ["qwen", "llama3", "unigram", "words"])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_a_stream_gives_what_decode_gives(kind: str, skip: bool, seed: int, tokenizer_of: Load) -> None:
    tokenizer = tokenizer_of(kind)
    output = ids_of(tokenizer, seed)
    whole = tokenizer.decode(output, skip_special_tokens=skip)
    assert stream(tokenizer, [], output, skip_special_tokens=skip) == whole


@pytest.mark.parametrize("kind", ["llama2", "mistral", "gemma"])
@given(text=st.text(max_size=20))
@settings(max_examples=100, deadline=None)
def test_a_stream_of_byte_tokens_gives_what_decode_gives(kind: str, text: str, tokenizer_of: Load) -> None:
    tokenizer = tokenizer_of(kind)
    for output in (tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)):
        assert stream(tokenizer, [], output) == tokenizer.decode(output)


@pytest.mark.parametrize("kind", ["llama2", "gemma"])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_ill_formed_byte_tokens_become_replacement_characters(kind: str, seed: int, tokenizer_of: Load) -> None:
    tokenizer = tokenizer_of(kind)
    output = ids_of(tokenizer, seed)
    shown = [i for i in output if i not in tokenizer.special_ids]
    expected = b"".join(map(tokenizer.token_bytes, shown)).decode(errors="replace")
    if kind == "llama2":
        expected = expected.removeprefix(" ")
    assert stream(tokenizer, [], output) == expected


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32), split=st.floats(0, 1))
@example(seed=3, split=0.5)  # of mistral: the prompt ends in half a surrogate, which is ill-formed already
@settings(max_examples=100, deadline=None)
def test_a_prompt_gives_context_and_never_appears(kind: str, seed: int, split: float, tokenizer_of: Load) -> None:
    tokenizer = tokenizer_of(kind)
    ids = ids_of(tokenizer, seed, 24)
    border = round(split * len(ids))
    prompt, output = ids[:border], ids[border:]
    whole, before = stream(tokenizer, [], ids), stream(tokenizer, [], prompt)
    # A character over the border is U+FFFD at the end of the prompt's own text; if it is whole it is the output's.
    if not whole.startswith(before):
        before = before.removesuffix("\ufffd")
    assert stream(tokenizer, prompt, output) == whole.removeprefix(before)


def test_a_prompt_that_ends_inside_a_character_leaks_nothing(tokenizer_of: Load) -> None:
    for kind in ("qwen", "llama2"):
        tokenizer = tokenizer_of(kind)
        by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
        hand = [by_byte[bytes([byte])] for byte in "🙂".encode()]
        prompt = [*tokenizer.encode("a secret"), *hand[:2]]
        completed = Detokenizer(tokenizer, prompt)
        assert [completed.push(i) for i in [*hand[2:], by_byte[b"!"]]] == ["", "🙂", "!"]
        broken = Detokenizer(tokenizer, prompt)
        assert broken.push(hand[2]) + broken.push(by_byte[b"!"]) + broken.flush() == "!"
        unfinished = Detokenizer(tokenizer, prompt)
        assert unfinished.push(hand[2]) + unfinished.flush() == ""
        last_byte = Detokenizer(tokenizer, [*prompt, hand[2]])
        assert last_byte.push(hand[3]) == "🙂"


def test_nothing_is_withheld_but_an_unfinished_character(tokenizer_of: Load) -> None:
    tokenizer = tokenizer_of("llama2")
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("x"))
    given_so_far = [detokenizer.push(by_byte[bytes([byte])]) for byte in "é".encode() + b"\xff\xe4\xbd\xff"]
    assert given_so_far == ["", "é", "\ufffd", "", "", "\ufffd\ufffd"]


def test_a_prefix_space_is_taken_off_at_the_start_of_a_text_only(tokenizer_of: Load) -> None:
    tokenizer = tokenizer_of("llama2")
    hello = tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.token_bytes(hello[0]).startswith(b" ")
    bos = tokenizer.bos_token_id
    assert bos is not None
    assert stream(tokenizer, [], hello) == "Hello"
    assert stream(tokenizer, [bos], hello) == "Hello"
    assert stream(tokenizer, [bos], hello, skip_special_tokens=False) == " Hello"
    assert stream(tokenizer, [bos, *hello], hello) == " Hello"
