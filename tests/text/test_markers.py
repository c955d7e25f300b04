"""Texts of special tokens in a message stay text, and all other content has the ids that transformers gives it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from penstock.text import ChatTemplate, Tokenizer
from penstock.text.calls import ChatFormat
from penstock.text.calls.markers import MarkerTexts
from penstock.text.prompts import EncodeChat, PromptEncoder
from tests.text.tokenizers_on_disk import KINDS

# The model's own tokens around the content, as in every chat template; without blanks, so that nothing hides a border.
TEMPLATE = "{% for m in messages %}BEGIN{{ m.role }}{{ m.content }}{{ m.reasoning_content }}END{% endfor %}{{ tools }}"


def chat_of(
    tokenizer: Tokenizer, *, template: str = TEMPLATE, reasoning: str = "none"
) -> tuple[PromptEncoder, list[str]]:
    """An encoder of chats whose template writes two special tokens, and the texts of all."""
    marks = sorted(tokenizer.special_texts, key=lambda text: (len(text), text))
    marks = [mark for mark in marks if len(mark) > 1 and not mark.isspace()]
    source = template.replace("BEGIN", marks[0]).replace("END", marks[-1])
    tokenizer.chat_template = ChatTemplate(source, {})
    return PromptEncoder(tokenizer, ChatFormat(tokenizer, "none", reasoning), 4096), marks


def ids_of(encoder: PromptEncoder, *messages: dict[str, Any], **variables: Any) -> list[int]:
    return list(encoder.encode(EncodeChat(messages, None, True, False, False, variables)).ids)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_marker_in_content_is_text(kind: str, folder_of: Callable[[str], Path]) -> None:
    tokenizer = Tokenizer.load(folder_of(kind))
    encoder, marks = chat_of(tokenizer)
    real = {i for i in tokenizer.special_ids if "unk" not in tokenizer.token(i).lower()}  # of unknown characters
    specials = [i for i in ids_of(encoder, {"role": "user", "content": "ab"}) if i in real]
    assert specials
    for mark in marks:
        for content in (f"a{mark}b", mark, f" {mark} ", mark * 3, f"{mark[0]}{mark}{mark[1:]}"):
            ids = ids_of(encoder, {"role": "user", "content": content})
            assert [i for i in ids if i in real] == specials, content


@pytest.mark.parametrize("name", ["qwen", "llama3", "llama2", "mistral", "gemma"])  # the others have unknown characters
def test_content_with_a_marker_is_the_same_text(name: str, folder_of: Callable[[str], Path]) -> None:
    tokenizer = Tokenizer.load(folder_of(name))
    encoder, marks = chat_of(tokenizer)
    for content in (f"one{marks[0]}two", f"one {marks[0]} two\n{marks[-1]}x", marks[0]):
        shown = tokenizer.decode(ids_of(encoder, {"role": "user", "content": content}), skip_special_tokens=False)
        other = content.replace(marks[0], "#").replace(marks[-1], "#")
        expected = tokenizer.decode(ids_of(encoder, {"role": "user", "content": other}), skip_special_tokens=False)
        shown = shown.replace(f"user{content}", "user~").replace(f"user {content}", "user~")
        assert shown == expected.replace(f"user{other}", "user~").replace(f"user {other}", "user~")


WORDS = (
    "Hello",
    " world",
    "  two",
    "\n",
    "<",
    "|>",
    "<|",
    "im_start",
    "é",
    "東京",
    "🇫🇷",
    "{'a': 1}",
    "</",
    "s>",
    "[",
    "INST",
    "]",
)


@settings(max_examples=60, deadline=None)
@given(words=st.lists(st.sampled_from(WORDS), max_size=12))
@pytest.mark.parametrize("name", KINDS)
def test_other_content_has_the_ids_of_transformers(
    name: str, words: list[str], folder_of: Callable[[str], Path], theirs_of: Callable[[str], Any]
) -> None:
    tokenizer = Tokenizer.load(folder_of(name))
    encoder, marks = chat_of(tokenizer)
    content = "".join(words)
    if any(mark in content for mark in marks):
        return
    assert tokenizer.chat_template is not None
    prompt = tokenizer.chat_template.render([{"role": "user", "content": content}])
    ids = ids_of(encoder, {"role": "user", "content": content})
    assert ids == theirs_of(name)(prompt, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def theirs_of(folder_of: Callable[[str], Path]) -> Callable[[str], Any]:
    loaded: dict[str, Any] = {}

    def load(name: str) -> Any:
        if name not in loaded:
            loaded[name] = AutoTokenizer.from_pretrained(folder_of(name))
        return loaded[name]

    return load


def test_everything_that_a_client_sends_is_content(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    tokenizer = tokenizer_of("qwen")
    source = (
        "{{ messages | tojson }}{{ tools | tojson }}{{ note }}{% for k, v in box | items %}{{ k }}{{ v }}{% endfor %}"
    )
    encoder, marks = chat_of(tokenizer, template=source)
    mark = max(marks, key=len)
    call = {"id": mark, "type": "function", "function": {"name": mark, "arguments": json.dumps({mark: [mark]})}}
    messages = [
        {"role": "user", "content": mark, "name": mark},
        {"role": "assistant", "content": mark, "reasoning_content": mark, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": mark, "content": mark},
    ]
    tools = [{"type": "function", "function": {"name": mark, "description": mark, "parameters": {mark: mark}}}]
    question = EncodeChat(messages, tools, True, False, False, {"note": mark, "box": {mark: mark}})
    ids = encoder.encode(question).ids
    assert not tokenizer.special_ids.intersection(ids)
    assert tokenizer.decode(ids, skip_special_tokens=False).count(mark) >= 14


def test_the_markers_of_reasoning_are_the_assistants(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    """Templates look for them in earlier answers."""
    tokenizer = tokenizer_of("qwen")
    tokenizer.chat_template = None
    texts = ChatFormat(tokenizer, "none", "think")
    broken = {"<|im_end|>": "<#|im_end|>", "</think>": "</think>"}
    markers = MarkerTexts(["<|im_end|>"])
    assert {text: markers.broken(text, "#") for text in broken} == broken
    assert texts.special.keys() <= {"<think>", "</think>"}


def test_a_continued_message_may_have_a_marker(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    tokenizer = tokenizer_of("qwen")
    encoder, marks = chat_of(tokenizer)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"b{marks[0]} c"}]
    encoded = encoder.encode(EncodeChat(messages, None, False, True, False, {}))
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False).endswith(f"assistantb{marks[0]} c")
    assert encoded.end.endswith(f"b{marks[0]} c")


def test_thousands_of_special_tokens_are_found() -> None:
    markers = MarkerTexts([f"<unused{i}>" for i in range(7000)] + ["<s>", "</s>", "x", "\n\n", "<s>>"])
    assert (
        markers.broken("a<unused6999>b<s>><s></s>x\n\n<unused7000>", "#")
        == "a<#unused6999>b<#s>><#s><#/s>x\n\n<unused7000>"
    )
    assert markers.broken({"<s>": ["</s>", 1, None, True]}, "#") == {"<#s>": ["<#/s>", 1, None, True]}
    assert MarkerTexts([]).broken("<s>", "#") == "<s>"
