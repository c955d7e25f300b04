"""The same prompts as transformers' apply_chat_template makes."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from penstock.text import ChatTemplate, ChatTemplateError, Tokenizer, TokenizerError
from tests.text import tokenizers_on_disk

CHATML = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content if message.content is string else '' %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query_index and reasoning_content %}
            {{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' ~ tool_call.function.name ~ '", "arguments": ' }}
            {%- set arguments = tool_call.function.arguments %}
            {{- arguments | tojson if arguments is not string else arguments }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role != "system" %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content | string) + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>" }}
{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

INSTRUCT = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}\
{% set system_message = false %}{% endif %}{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if loop.index0 == 0 and system_message != false %}
        {% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
    {% else %}
        {% set content = message['content'] %}
    {% endif %}
    {% if message['role'] == 'user' %}
{{ '[INST] ' + content.strip() + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
{{ ' '  + content.strip() + ' ' + eos_token }}
    {% endif %}
{% endfor %}"""

PARTS = """\
{{ bos_token }}
{%- macro show(content) -%}
    {%- if content is string -%}{{ content | trim }}
    {%- else -%}
        {%- for item in content -%}
            {%- if item['type'] == 'image' -%}<image>
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
    {%- if message.role == 'skip' %}{% continue %}{% endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' ~ role ~ '\\n' }}
    {%- generation -%}{{ show(message['content']) }}{%- endgeneration -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

DATED = """\
{%- macro twice() %}{{ caller(1) }}{{ caller(2) }}{% endmacro %}
{{- "Cutting Knowledge Date: December 2023\\nToday: " + strftime_now("%d %b %Y") + "\\n" }}
{%- for message in messages %}
    {{- '%s: %s|' % (message.role, message.content | replace('\\n', ' ')) }}
    {{- "{}-{:>4}".format(loop.index, loop.length) }}
    {{- ', '.join(message.keys() | sort) | upper | indent(2) }}
    {{- message | tojson(indent=2, sort_keys=true) }}
    {{- dict(a=1, b=[1, 2]) | tojson }}{{ (message | items | list | length) * 2 ** 3 }}{{ 'ab' * 3 }}
    {%- if loop.index == 7 %}{% break %}{% endif %}
{%- endfor %}
{{- documents is defined }}{{ documents }}
{%- filter upper %}{% set x %}block {{ messages | length }}{% endset %}{{ x }}{% endfilter %}
{%- call(n) twice() %}<{{ n }}>{% endcall %}
"""

SOURCES: Mapping[str, str] = {"chatml": CHATML, "instruct": INSTRUCT, "parts": PARTS, "dated": DATED}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "It's <b>warm</b> & süß",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello, 世界 <b>&</b>\n"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  1 + 1?  "},
        {"role": "assistant", "content": "<think>\nadd\n</think>\n\n2", "name": None},
        {"role": "user", "content": "And 2 + 2?"},
    ],
    [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "call it",
            "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}],
        },
        {"role": "tool", "content": "sunny"},
    ],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The answer is "}],
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("reference")
    tokenizers_on_disk.llama2(folder)
    return AutoTokenizer.from_pretrained(folder)


def outcome(render: Callable[[], str], failures: tuple[type[Exception], ...]) -> str | None:
    try:
        return render()
    except failures:
        return None


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False, "enable_thinking": False},
        {"add_generation_prompt": True, "enable_thinking": False, "bos_token": "<BOS>"},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
)
def test_renders_as_transformers_does(
    chat: list[dict[str, Any]],
    name: str,
    tools: list[dict[str, Any]] | None,
    options: dict[str, Any],
    reference: PreTrainedTokenizerFast,
) -> None:
    template = ChatTemplate(SOURCES[name], SPECIAL)
    before = json.dumps(chat)
    ours = outcome(lambda: template.render(chat, tools=tools, **options), (ChatTemplateError,))
    theirs = outcome(
        lambda: reference.apply_chat_template(
            chat, tools=tools, chat_template=SOURCES[name], tokenize=False, **options
        ),
        (Exception,),
    )
    assert ours == theirs
    assert json.dumps(chat) == before


def test_the_comparison_compares_prompts_and_not_only_failures(reference: PreTrainedTokenizerFast) -> None:
    for source in SOURCES.values():
        assert ChatTemplate(source, SPECIAL).render(CHATS[1])


def test_the_words_of_raise_exception_reach_the_user() -> None:
    with pytest.raises(ChatTemplateError, match="Conversation roles must alternate"):
        ChatTemplate(INSTRUCT, SPECIAL).render([{"role": "assistant", "content": "x"}])


PARTS_OF_TEXT = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% for p in m['content'] %}{{ p.text }},{% endfor %}{% endfor %}",
        "{% for m in messages %}{% set c = m.content %}{% for p in c | list %}{{ p.text }},{% endfor %}{% endfor %}",
        "{% macro show(c) %}{% for p in c %}{{ p.text }},{% endfor %}{% endmacro %}{{ show(messages[0].content) }}",
    ],
)
def test_templates_that_read_parts_get_parts(source: str) -> None:
    template = ChatTemplate(source, {})
    assert template.takes_parts
    assert template.render([{"role": "user", "content": PARTS_OF_TEXT}]) == "one,two,"


def test_other_templates_get_parts_joined_by_line_breaks() -> None:
    template = ChatTemplate(INSTRUCT, SPECIAL)
    assert not template.takes_parts
    assert template.render([{"role": "user", "content": PARTS_OF_TEXT}]) == "<s>[INST] one\ntwo [/INST]\n"


def test_content_that_is_not_text_is_refused() -> None:
    image = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/cat.png"}}]
    with pytest.raises(
        ChatTemplateError, match="a content part is of type 'image_url', but this model reads only text"
    ):
        ChatTemplate(INSTRUCT, SPECIAL).render([{"role": "user", "content": image}])


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([], {}, "no messages"),
        (["hello"], {}, "a message is an object"),
        ([{"role": "user", "content": object()}], {}, "a value of type object; pass JSON values"),
        ([{"role": "user"}], {}, "fails|refuses"),
        ([{"role": "user", "content": "a"}], {"continue_final_message": True}, "exclude each other"),
        (
            [{"role": "user"}],
            {"continue_final_message": True, "add_generation_prompt": False},
            "needs content in the last message",
        ),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused(messages: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(INSTRUCT, SPECIAL).render(messages, **options)


def test_messages_nested_without_end_are_refused() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ChatTemplateError, match="nested too deeply"):
        ChatTemplate(PARTS, SPECIAL).render([{"role": "user", "content": nested}])


def test_variables_cannot_stand_in_for_what_the_server_gives() -> None:
    template = ChatTemplate("{{ messages[0].role }}{{ self }}{{ raise_exception is callable }}", {})
    shown = template.render([{"role": "user"}], messages=[{"role": "forged"}], self="x", raise_exception=1)
    assert shown.startswith("user")


@pytest.mark.parametrize(
    "source", ["{% for x in %}", "{{ 1 +", "{% endfor %}", "{{ a | nofilter }}", "(" * 3 + "{{ ((( }}"]
)
def test_a_broken_template_says_where(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="not valid Jinja in line 1"):
        ChatTemplate(source, {})


def test_a_template_nested_without_end_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match="nested too deeply"):
        ChatTemplate("{{ " + "(" * 50_000 + ")" * 50_000 + " }}", {})


def _config(folder: Path, value: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": value}))


def test_where_templates_are_found(tmp_path: Path) -> None:
    tokenizers_on_disk.llama2(tmp_path)
    chat = [{"role": "user", "content": "x"}]

    def rendered(tools: Any = None) -> str | None:
        template = Tokenizer.load(tmp_path).chat_template
        ours = None if template is None else template.render(chat, tools=tools)
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        if theirs.chat_template is not None:
            assert ours == theirs.apply_chat_template(chat, tools=tools, tokenize=False, add_generation_prompt=True)
        return ours

    assert rendered() is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ 'processor' }}"}))
    assert rendered() == "processor"
    _config(tmp_path, "{{ bos_token + 'config' }}")
    assert rendered() == "<s>config"
    _config(tmp_path, [{"name": "tool_use", "template": "listed tools"}, {"name": "default", "template": "listed"}])
    assert (rendered(), rendered(TOOLS)) == ("listed", "listed tools")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert (rendered(), rendered(TOOLS)) == ("file", "file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file tools")
    assert (rendered(), rendered(TOOLS)) == ("file", "file tools")


def test_a_template_of_no_known_name_is_refused(tmp_path: Path) -> None:
    tokenizers_on_disk.llama2(tmp_path)
    _config(tmp_path, [{"name": "rag", "template": "x"}])
    with pytest.raises(TokenizerError, match="none is called default or tool_use"):
        Tokenizer.load(tmp_path)
