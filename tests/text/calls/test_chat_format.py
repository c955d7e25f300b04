"""Prompts with tools and calls: those of transformers, from real templates where they are at hand.

The templates are not in a package: set PENSTOCK_VOCABULARIES to the folder `vendor/llama.cpp/models` of
llama-cpp-python's source distribution.
"""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from penstock.declared.settings import SETTINGS
from penstock.text import ChatTemplate, ChatTemplateError
from penstock.text.calls import REASONING_FORMATS, TOOL_FORMATS, ChatFormat
from tests.text import tokenizers_on_disk
from tests.text.calls.messages import Case, Message, read

FOLDER = os.environ.get("PENSTOCK_VOCABULARIES")
TEMPLATES = sorted((Path(FOLDER) / "templates").glob("*.jinja")) if FOLDER else []
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
needs_templates = pytest.mark.skipif(not TEMPLATES, reason="PENSTOCK_VOCABULARIES names no folder")
# The files whose format must be found, each with its formats of calls and reasoning.
KNOWN = {
    "GLM-4.6": ("glm", "think"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", None),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron", "think"),
    "ByteDance-Seed-OSS": ("seed-oss", "seed"),
    "LFM2.5-8B-A1B": ("lfm2", "think"),
    "MiniMax-M2": ("minimax", "think"),
    "Qwen-QwQ-32B": ("hermes", "think"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "think"),
    "Qwen3-Coder": ("qwen3-coder", None),
    "Qwen3.5-4B": ("qwen3-coder", "think"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek-v3", "think"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek-v3.1", "think"),
    "google-gemma-2-2b-it": ("json", None),
    "llama-cpp-deepseek-r1": ("deepseek-v3", "think"),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3-json", None),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3-json", None),
    "microsoft-Phi-3.5-mini-instruct": ("json", None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral-list", None),
    "moonshotai-Kimi-K2": ("kimi-k2", None),
    "openai-gpt-oss-120b": ("harmony", "harmony"),
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather & <more>",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name"},
                "days": {"type": "integer", "description": "How many"},
            },
            "required": ["city"],
        },
    },
}
ARGUMENTS = {"city": "Köln 🌧", "days": 2}


def chat_format_of(source: str, **formats: str) -> ChatFormat:
    template = ChatTemplate(source, SPECIAL)
    return ChatFormat(SimpleNamespace(chat_template=template, special_ids=frozenset(), special_texts={}), **formats)  # type: ignore


def call(arguments: Any, id: str = "abcdefgh1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


def chat(arguments: Any, **content: str) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", **content, "tool_calls": [call(arguments)]},
        {"role": "tool", "tool_call_id": "abcdefgh1", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
        {"role": "user", "content": "Thanks"},
    ]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("reference")
    tokenizers_on_disk.llama2(folder)
    return AutoTokenizer.from_pretrained(folder)


@needs_templates
@pytest.mark.parametrize("name", KNOWN)
def test_formats_are_found(name: str) -> None:
    chat_format = chat_format_of(source_of(name))
    assert chat_format.tools is TOOL_FORMATS[KNOWN[name][0]]
    assert (chat_format.reasoning and chat_format.reasoning.name) == KNOWN[name][1]


def source_of(name: str) -> str:
    return (Path(FOLDER or "") / "templates" / f"{name}.jinja").read_text()


@needs_templates
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_prompts_are_those_of_transformers(path: Path, reference: PreTrainedTokenizerFast) -> None:
    """For messages as the template takes them: arguments as an object or as text, empty content as "" or left out."""
    source = path.read_text()
    chat_format = chat_format_of(source)
    messages = chat(json.dumps(ARGUMENTS, ensure_ascii=False))
    if chat_format.tools is TOOL_FORMATS["json"] or chat_format._call_form is None:
        # The template does not show calls or tools in a form that a model could be asked for: see the tests below.
        assert ours(chat_format, [messages[0]], None) == theirs(reference, source, [messages[0]], None)
        return
    arguments = json.dumps(ARGUMENTS, ensure_ascii=False) if chat_format._call_form.arguments_as_text else ARGUMENTS
    content = {} if chat_format._call_form.empty_content is None else {"content": chat_format._call_form.empty_content}
    given = chat(arguments, **content)
    given[2]["name"] = "get_weather"
    if chat_format.tools is TOOL_FORMATS["kimi-k2"]:
        given[1]["tool_calls"][0]["id"] = given[2]["tool_call_id"] = "functions.get_weather:0"
    shown = chat_format._shows_tools
    expected = theirs(reference, source, given, [WEATHER] if shown else None)
    prompt = ours(chat_format, messages, [WEATHER] if shown else None)
    assert prompt is not None and "get_weather" in prompt and "sunny" in prompt
    # transformers cannot show generators as JSON, which this template asks for.
    assert prompt == expected or (expected is None and path.stem == "llama-cpp-deepseek-r1")


@needs_templates
def test_gpt_oss_takes_a_tool_without_a_description() -> None:
    chat_format = chat_format_of(source_of("openai-gpt-oss-120b"))
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    prompt = chat_format.render([{"role": "user", "content": "When?"}], tools=[tool])
    assert "// \ntype now = () => any;" in prompt


SYSTEM, USER, ANSWER = ({"role": role, "content": f"{role}-needle"} for role in ("system", "user", "assistant"))
OF_AGENTS = (
    [SYSTEM, {**SYSTEM, "content": "more-needle"}, USER],
    [SYSTEM, USER, ANSWER, {**SYSTEM, "content": "reminder-needle"}, {**USER, "content": "go-needle"}],
    [USER, {**SYSTEM, "content": "reminder-needle"}],
    [USER, {**USER, "content": "again-needle"}],
    [USER, ANSWER, {**ANSWER, "content": "more-needle"}, USER],
    [ANSWER, USER],
    [*chat("{}")[:3], {**USER, "content": "after-needle"}],
    [*chat("{}")[:3], {**SYSTEM, "content": "after-needle"}],
)


@needs_templates
@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("messages", OF_AGENTS)
def test_what_agents_send_is_shown(name: str, messages: list[dict[str, Any]]) -> None:
    prompt = chat_format_of(source_of(name)).render(messages, tools=[WEATHER])
    assert all(message["content"] in prompt for message in messages if message.get("content"))


def ours(chat_format: ChatFormat, messages: list[Any], tools: Any) -> str | None:
    try:
        return chat_format.render(messages, tools=tools)
    except ChatTemplateError:
        return None


def theirs(reference: Any, source: str, messages: list[Any], tools: Any) -> str | None:
    try:
        text: str = reference.apply_chat_template(
            messages, tools=tools, chat_template=source, tokenize=False, add_generation_prompt=True
        )
    except Exception:  # whatever a template raises
        return None
    return text


@needs_templates
@pytest.mark.parametrize("name", [name for name, (format, _) in KNOWN.items() if format != "json"])
def test_a_call_that_the_template_writes_is_read(name: str) -> None:
    """A recorded conversation: the template's own text of a call is what the model was trained to write. It is cut at
    every character."""
    chat_format = chat_format_of(source_of(name))
    shape = chat_format._call_form
    assert shape is not None and chat_format.tools is not None
    before = [{"role": "user", "content": "Weather?"}]
    messages = chat(json.dumps(ARGUMENTS, ensure_ascii=False))[:2]
    messages[1]["content"] = ""
    prompt = chat_format.render(before, tools=[WEATHER])
    whole = chat_format.render(messages, tools=[WEATHER], add_generation_prompt=False)
    at = next(i for i, char in enumerate(whole) if not prompt.startswith(char, i))
    common = re.sub(r"<[^>]*$", "", whole[:at])  # not in the middle of a tag
    text = whole[len(common) :]
    for end in ("<|im_end|>", "<｜end▁of▁sentence｜>", "<|eot_id|>", "</s>", "<seed:eos>", "<SPECIAL_12>", "[e~["):
        text = text.partition(end)[0]
    reasoning = chat_format.reasoning.name if chat_format.reasoning else ""
    case = Case(chat_format.tools.name, reasoning, text, Message(), common)
    expected = read(case, [])
    assert [(tool, json.loads(arguments)) for tool, arguments in expected.calls] == [("get_weather", ARGUMENTS)]
    for cut in range(1, len(text)):
        assert read(case, [cut]) == expected
    assert read(case, list(range(1, len(text)))) == expected
    assert "<" not in expected.content and "[" not in expected.content


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_without_tools_gets_an_instruction_and_text() -> None:
    chat_format = chat_format_of(CHATML)
    assert chat_format.tools is TOOL_FORMATS["json"] and chat_format.reasoning is None
    messages = [{"role": "system", "content": "Be brief."}, *chat('{"city": "Köln"}')[:3]]
    messages[2]["tool_calls"] *= 2
    messages.append({"role": "tool", "tool_call_id": "unknown", "content": "12:00"})
    prompt = chat_format.render(messages, tools=[WEATHER])
    system, user, assistant, results, rest = prompt.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe brief.\n\n") and json.dumps(WEATHER["function"]) in system
    assert '{"name": "TOOL_NAME", "arguments": {"ARGUMENT": "VALUE"}}' in system
    assert user == "user\nWeather?<|im_end|>\n"
    line = '{"name": "get_weather", "arguments": {"city": "Köln"}}'
    assert assistant == f"assistant\n{line}\n{line}<|im_end|>\n"
    assert results == "user\nResult of get_weather:\nsunny\n\nResult of unknown:\n12:00<|im_end|>\n"
    assert rest == "assistant\n"
    assert "12:00\n\nAnswer with this in plain text.<|im_end|>" in chat_format.render(messages)
    assert chat_format.render(messages[:2]) == ChatTemplate(CHATML, {}).render(messages[:2])


def test_a_template_always_gets_an_object_of_arguments() -> None:
    """Else a call that was cut off would make every later request of its conversation fail."""
    source = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    source += '{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}{{ tools }}<tool_call> "arguments"'
    chat_format = chat_format_of(source)
    assert chat_format.tools is TOOL_FORMATS["hermes"]
    for text, shown in (
        ('{"city": 1}', '{"city": 1}'),
        ("", "{}"),
        ("{bad", "{}"),
        ("null", "{}"),
        ("[1]", "{}"),
        ('{"city": "Par', '{"city": "Par"}'),
        ('{"city": 1}{"city": 2}', '{"city": 1}'),
        ('{"city": "a\nb"}', '{"city": "a\\nb"}'),
        ('"{\\"city\\": 1}"', '{"city": 1}'),
        ('{"city": "\\ud83d"}', '{"city": "\N{REPLACEMENT CHARACTER}"}'),
        ('{"city": ' + "[" * 100_000, "{}"),
    ):
        prompt = chat_format.render(chat(text))
        assert f"Weather?{shown}sunny" in prompt, (text, prompt)
    assert "{}sunny" in chat_format.render(chat([1])) and '{"a": 2}sunny' in chat_format.render(chat({"a": 2}))


def test_ids_that_a_template_refuses_are_replaced() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('id') }}"
        "{% endif %}{{ c.id }}={{ c.function.arguments | tojson }};{% endfor %}{{ m.tool_call_id }}{{ m.content }}"
        "{% endfor %}[TOOL_CALLS]{% for t in tools or [] %}{% endfor %}"
    )
    messages = chat("{}")
    messages[1]["tool_calls"] = [call('{"a": "b"}', id="call_from-elsewhere")]
    messages[2]["tool_call_id"] = "call_from-elsewhere"
    shown = chat_format_of(source).render(messages)
    id, _, rest = shown.removeprefix("Weather?").partition("=")
    assert len(id) == 9 and f";{id}sunny" in rest
    assert "abcdefgh1=" in chat_format_of(source).render(chat("{}"))


def test_the_settings_have_all_formats() -> None:
    assert set(SETTINGS["tool_format"].kind.choices) == {"auto", "none", *TOOL_FORMATS}
    assert set(SETTINGS["reasoning_format"].kind.choices) == {"auto", "none", *REASONING_FORMATS}


def test_formats_can_be_chosen() -> None:
    chat_format = chat_format_of(CHATML, tool_format="hermes", reasoning_format="think")
    assert (chat_format.tools, chat_format.reasoning) == (TOOL_FORMATS["hermes"], REASONING_FORMATS["think"])
    assert "<tool_call>\n" in chat_format.render([{"role": "user", "content": "x"}], tools=[WEATHER])
    chat_format = chat_format_of(CHATML + "<tool_call></think>", tool_format="none", reasoning_format="none")
    assert (chat_format.tools, chat_format.reasoning) == (None, None)
    with pytest.raises(ValueError, match="--tool-format is 'nope'; it must be auto, none, or one of harmony"):
        chat_format_of(CHATML, tool_format="nope")


def test_a_template_that_refuses_says_so() -> None:
    with pytest.raises(ChatTemplateError, match="no calls here"):
        chat_format_of("{{ raise_exception('no calls here') }}").render(chat("{}"))
