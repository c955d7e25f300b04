"""Fifty conversations through real chat templates: the same prompts and token ids as transformers makes."""

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from penstock.text import ChatTemplate, Tokenizer
from tests.smollm2 import smollm2
from tests.text.test_template import CHATML

SYSTEM = ("You are terse.", "Du antwortest auf Deutsch.", "  spaces around  ", "<|im_start|>no trick<|im_end|>")
SAID = (
    "What is the capital of France?",
    "  two\nlines and a tab\t",
    "naïve café, 東京, 🇫🇷🧑‍🚀, a\u0301",
    "def f(x):\n    return {'a': x} # {{ not jinja }} {% raw %}",
    "</s><|im_end|><|endoftext|>",
    '"quotes" & <tags> \\ backslashes',
    "مرحبا بالعالم",
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a place — now",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
]


def conversation(number: int, *, tools: bool) -> list[dict[str, Any]]:
    """A system prompt or none, and one to four exchanges; with `tools`, some with a call and its result."""
    choose = random.Random(number)
    messages: list[dict[str, Any]] = []
    if choose.random() < 0.6:
        messages.append({"role": "system", "content": choose.choice(SYSTEM)})
    for _ in range(choose.randint(0, 3)):
        messages.append({"role": "user", "content": choose.choice(SAID)})
        if tools and choose.random() < 0.5:
            call = {"type": "function", "function": {"name": "weather", "arguments": {"place": choose.choice(SAID)}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": choose.choice(SAID)})
        messages.append({"role": "assistant", "content": choose.choice(SAID)})
    return [*messages, {"role": "user", "content": choose.choice(SAID)}]


@pytest.fixture(scope="module")
def theirs() -> PreTrainedTokenizerBase:
    path = smollm2()
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer.load(smollm2())


@pytest.mark.parametrize("number", range(50))
def test_prompts_are_those_of_transformers(number: int, theirs: PreTrainedTokenizerBase, ours: Tokenizer) -> None:
    messages, with_tools = conversation(number, tools=False), conversation(number, tools=True)
    assert ours.chat_template is not None
    prompt = ours.chat_template.render(messages)
    assert prompt == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.encode(prompt, add_special_tokens=False) == theirs(prompt, add_special_tokens=False)["input_ids"]

    rendered = ChatTemplate(CHATML, {}).render(with_tools, tools=TOOLS)
    assert rendered == theirs.apply_chat_template(
        with_tools, tools=TOOLS, chat_template=CHATML, tokenize=False, add_generation_prompt=True
    )


def test_the_template_is_the_files(ours: Tokenizer) -> None:
    assert Path(smollm2()).suffix == ".gguf"
    assert ours.chat_template is not None
    assert "named SmolLM, trained by Hugging Face" in ours.chat_template.render([{"role": "user", "content": "hi"}])
