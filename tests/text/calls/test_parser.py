"""Messages are divided in the same way, however their text is cut."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.text.calls import REASONING_FORMATS, TOOL_FORMATS, CallLimits, MessageParser, ToolOutputError
from penstock.text.calls.formats import TaggedArguments
from penstock.text.calls.writing import WrittenCall, write_calls
from tests.text.calls.messages import CALLS, OTHERS, SCHEMAS, Case, Message, read

CASES = [*CALLS, *OTHERS]
TAGGED = {
    name: item.body for name, item in TOOL_FORMATS.items() if isinstance(getattr(item, "body", None), TaggedArguments)
}


@pytest.mark.parametrize("case", CASES)
def test_every_cut_gives_the_same(case: Case) -> None:
    size = len(case.text)
    assert read(case, []) == case.message
    assert read(case, list(range(1, size))) == case.message
    for cut in range(1, size):
        assert read(case, [cut]) == case.message
    draw = random.Random(case.text)
    for _ in range(20):
        assert read(case, sorted(draw.sample(range(1, size), min(5, size - 1)))) == case.message


def test_every_format_has_a_case() -> None:
    assert {case.tools for case in CALLS} == set(TOOL_FORMATS)
    assert {case.reasoning for case in CALLS} - {""} == set(REASONING_FORMATS)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_no_marker_contains_another(name: str) -> None:
    """The parser looks for the first of them."""
    format = TOOL_FORMATS[name]
    for reasoning in REASONING_FORMATS.values():
        markers = {*getattr(format, "triggers", ()), *reasoning.markers}
        assert not [(a, b) for a in markers for b in markers if a != b and a in b]


# Fragments of markers and of what surrounds them, and characters that JSON, XML and Python quote.
PIECES = sorted(
    {
        *(marker for item in (*TOOL_FORMATS.values(), *REASONING_FORMATS.values()) for marker in item.markers),
        *('{"name": "now", "arguments": ', '{"a": [1, "\\"]}"]}', "}", "]", "[", '"', "\\", "now", "functions.now:0"),
        *(
            "<",
            "<tool",
            " ",
            "\n",
            "ö",
            "🌧",
            "now()",
            "get_weather(city='a')",
            ",",
            ";",
            "2",
            "```",
            "<parameter=city>",
        ),
    }
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=25),
    st.sampled_from([*TOOL_FORMATS, "none"]),
    st.sampled_from([*REASONING_FORMATS, "none"]),
    st.sampled_from(["", "<think>\n", "<|start|>assistant"]),
    st.randoms(),
)
def test_any_text_cut_anywhere_gives_the_same(
    pieces: list[str], tools: str, reasoning: str, prompt_end: str, draw: random.Random
) -> None:
    text = "".join(pieces)
    case = Case(tools, reasoning, text, Message(), prompt_end)
    whole = read(case, [])
    assert read(case, list(range(1, len(text)))) == whole
    if len(text) > 1:
        assert read(case, sorted(draw.sample(range(1, len(text)), min(4, len(text) - 1)))) == whole


VALUES = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\n\r<"), min_size=1, max_size=20)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([*TOOL_FORMATS]), VALUES.filter(lambda text: text == text.strip()), st.integers(0, 9))
def test_what_is_written_is_read(name: str, city: str, days: int) -> None:
    calls = [WrittenCall("get_weather", {"city": city, "days": days})]
    prompt_end = "<|start|>assistant" if name == "harmony" else ""
    case = Case(name, "", write_calls(TOOL_FORMATS[name], calls), Message(), prompt_end)
    message = read(case, list(range(3, len(case.text), 3)))
    assert [(tool, json.loads(arguments)) for tool, arguments in message.calls] == [("get_weather", calls[0].arguments)]


@pytest.mark.parametrize("name", TAGGED)
def test_a_value_ends_where_an_argument_or_the_end_of_the_call_follows(name: str) -> None:
    """Tools write files, which may contain the tag that closes an argument."""
    format, tags = TOOL_FORMATS[name], TAGGED[name]
    close = tags.value_close
    for city in (
        f"see {close} tag",
        f'"{close}"\nx = 1',
        f"{tags.opening('x')}1{close}\nend",
        f"{close}{close}",
        close * 9,
    ):
        for arguments in ({"city": city, "days": 2}, {"city": city}):
            text = write_calls(format, [WrittenCall("get_weather", arguments), WrittenCall("now", {})])
            for cuts in ([], list(range(1, len(text))), list(range(5, len(text), 5))):
                message = read(Case(name, "", text, Message()), cuts)
                assert message.content == "" and [tool for tool, _ in message.calls] == ["get_weather", "now"]
                assert json.loads(message.calls[0][1]) == arguments
    schema = {"type": "object", "properties": {"box": {"type": "object"}}}
    parser = MessageParser(format, None, {"get_weather": schema})  # type: ignore[arg-type]
    text = write_calls(format, [WrittenCall("get_weather", {"box": {"a": f"{close} b"}})])
    arguments = "".join(part.text for part in parser.push(text) + parser.finish() if part.kind == "arguments")
    assert json.loads(arguments) == {"box": {"a": f"{close} b"}}


@pytest.mark.parametrize("name", TAGGED)
def test_a_model_may_leave_out_the_end_of_a_call(name: str) -> None:
    format, tags = TOOL_FORMATS[name], TAGGED[name]
    line = "\n" if tags.line_breaks else ""
    text = f"{''.join(format.head)}get_weather{format.mid}{tags.opening('city')}{line}a{line}{tags.value_close}"
    begin = format.begin
    for end in ("", "\n", f"\n{''.join(format.head)}now{format.mid}{''.join(format.tail)}{format.end}"):
        message = read(Case(name, "", begin + text + end, Message()), list(range(1, len(begin + text + end))))
        assert message.calls[0] == ("get_weather", '{"city": "a"}') and not message.content.strip()


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (OPTIONAL, "12345", "12345"),
        (OPTIONAL, "true", "true"),
        (OPTIONAL, '{"a": 1}', '{"a": 1}'),
        (OPTIONAL, "  indented\n", "  indented\n"),
        (OPTIONAL, "null", None),
        (OPTIONAL, "None", None),
        (OPTIONAL, '"quoted"', "quoted"),
        ({"type": ["string", "integer"]}, "12345", 12345),
        ({"type": ["string", "integer"]}, "1.5", "1.5"),
        ({"type": ["string", "number"]}, "12345", 12345),
        ({"enum": ["1", None]}, "1", "1"),
        ({"oneOf": [{"type": "string"}, {"$ref": "#/$defs/x"}]}, "1", 1),
        ({"type": "integer"}, "True", True),
        ({"type": "number"}, "Infinity", "Infinity"),
        ({"type": "object"}, "{bad", "{bad"),
    ],
)
def test_a_value_is_of_a_kind_that_the_schema_has(schema: object, text: str, value: object) -> None:
    tool = {"get_weather": {"type": "object", "properties": {"city": schema}}}
    parser = MessageParser(TOOL_FORMATS["qwen3-coder"], None, tool)
    call = f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{text}\n</parameter>\n</function>\n</tool_call>"
    parts = parser.push(call) + parser.finish()
    arguments = "".join(part.text for part in parts if part.kind == "arguments")
    assert json.loads(arguments) == {"city": value} and "Infinity}" not in arguments


def test_numbers_that_json_does_not_have() -> None:
    for format in ("pythonic", "lfm2"):
        text = "[get_weather(city=1e999, days=[1, -1e999, {'a': (1e999,)}])]"
        begin, end = TOOL_FORMATS[format].begin, TOOL_FORMATS[format].end  # type: ignore[union-attr]
        ((_, arguments),) = read(Case(format, "", begin + text + end, Message()), []).calls
        assert json.loads(arguments) == {"city": None, "days": [1, None, {"a": [None]}]}


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("Hi there", "Hi there"),
        ("Hi <there>", "Hi <there>"),
        ("Hi there<|end|>", "Hi there"),
        ("<|channel|>analysis", ""),
        (" to=functions.now", ""),
        ("<|channel|>analysis<|message|>x<|end|><|start|>assist", ""),
    ],
)
def test_harmony_without_a_header(text: str, content: str) -> None:
    """An answer without a header is content; a header that is cut off is not."""
    case = Case("harmony", "harmony", text, Message(), "<|start|>assistant")
    for cuts in ([], list(range(1, len(text)))):
        assert read(case, cuts).content == content


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("text {} more text", "text more text"),
        ("text\n\n{}\n\nmore", "text\n\nmore"),
        ("text{}more", "text\nmore"),
        ("a {}\n{} b", "a b"),
        ("{} more", "more"),
        ("text {}", "text"),
    ],
)
def test_texts_around_a_call_are_apart(text: str, content: str) -> None:
    text = text.replace("{}", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    for cuts in ([], list(range(1, len(text)))):
        assert read(Case("hermes", "", text, Message()), cuts).content == content


def pushes(format: str, text: str, reasoning: str = "think") -> list[str]:
    """The text of content and arguments that each character releases."""
    parser = MessageParser(TOOL_FORMATS[format], REASONING_FORMATS[reasoning], SCHEMAS)
    return ["".join(part.text for part in parser.push(char) if part.kind != "call") for char in text]


def test_no_text_is_held_longer_than_needed() -> None:
    assert pushes("hermes", "a<b") == ["a", "", "<b"]
    assert pushes("hermes", "<tox") == ["", "", "", "<tox"]
    assert pushes("hermes", "a b") == ["a", "", " b"]
    head = '<tool_call>{"name": "now", "arguments": '
    assert "".join(pushes("hermes", head)) == ""
    assert pushes("hermes", head + '{"a": "é"}')[len(head) :] == list('{"a": "é"}')
    head = "<function=get_weather>\n<parameter=city>\n"
    assert pushes("qwen3-coder", head + "ab<c")[len(head) :] == ["a", "b", "", "<c"]


def test_ids_of_calls() -> None:
    def ids(format: str, text: str) -> list[str]:
        parts = MessageParser(TOOL_FORMATS[format], None, SCHEMAS).push(text)
        return [part.id for part in parts if part.kind == "call"]

    (made,) = ids("hermes", '<tool_call>{"name": "now", "arguments": {}}')
    assert made.startswith("call_") and len(made) > 20
    text = "[TOOL_CALLS]now[CALL_ID]abcdefgh1[ARGS]{}[TOOL_CALLS]now[ARGS]{}"
    written, made = ids("mistral", text)
    assert written == "abcdefgh1" and len(made) == 9 and made.isalnum()
    section = "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:3<|tool_call_argument_begin|>{}"
    assert ids("kimi-k2", section) == ["functions.now:3"]


def test_calls_after_the_first_are_dropped_if_one_is_allowed() -> None:
    parser = MessageParser(TOOL_FORMATS["hermes"], None, SCHEMAS, parallel=False)
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    parts = parser.push(text * 3 + "end") + parser.finish()
    assert [(part.kind, part.text) for part in parts] == [("call", "now"), ("arguments", "{}"), ("content", "end")]


def test_limits() -> None:
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    parser = MessageParser(TOOL_FORMATS["hermes"], None, SCHEMAS, limits=CallLimits(calls=2))
    with pytest.raises(ToolOutputError, match="more than 2 tool calls"):
        parser.push(text * 3)
    parser = MessageParser(TOOL_FORMATS["hermes"], None, SCHEMAS, limits=CallLimits(argument_chars=10))
    with pytest.raises(ToolOutputError, match="more than 10 characters"):
        parser.push('<tool_call>{"name": "now", "arguments": {"a": "' + "x" * 10)
    parser = MessageParser(TOOL_FORMATS["hermes"], None, SCHEMAS, limits=CallLimits(header_chars=50))
    text = '<tool_call>{"name": "' + "x" * 60
    parts = parser.push(text) + parser.finish()
    assert "".join(part.text for part in parts) == text


def test_a_call_nested_without_end_is_read() -> None:
    for format, text in (
        ("hermes", '<tool_call>{"name": "now", "arguments": ' + '{"a":' * 100_000),
        ("pythonic", "[now(a=" + "[" * 100_000 + "]" * 100_000 + ")]"),
        ("glm", "<tool_call>get_weather<arg_key>days</arg_key><arg_value>" + "[" * 100_000 + "</arg_value>"),
    ):
        parser = MessageParser(TOOL_FORMATS[format], None, SCHEMAS)
        assert parser.push(text) + parser.finish()
