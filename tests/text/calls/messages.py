"""Messages as models of each format write them, and what they mean."""

from typing import NamedTuple

from penstock.text.calls import REASONING_FORMATS, TOOL_FORMATS, MessageParser

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
    "now": {"type": "object", "properties": {}},
}
WEATHER = ("get_weather", '{"city": "Köln 🌧", "days": 2}')
NOW = ("now", "{}")


class Message(NamedTuple):
    """A message: content, reasoning, and the calls with their arguments. `spans` are the texts that are reasoning."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    spans: tuple[str, ...] = ()


class Case(NamedTuple):
    tools: str
    reasoning: str
    text: str
    message: Message
    prompt_end: str = ""


def read(case: Case, cuts: list[int]) -> Message:
    """Reads the case's text, cut at these characters."""
    parser = MessageParser(
        TOOL_FORMATS.get(case.tools), REASONING_FORMATS.get(case.reasoning), SCHEMAS, prompt_end=case.prompt_end
    )
    parts = []
    for begin, end in zip([0, *cuts], [*cuts, len(case.text)], strict=True):
        parts += parser.push(case.text[begin:end])
    parts += parser.finish()
    calls: list[list[str]] = []
    for part in parts:
        if part.kind == "call":
            assert part.call == len(calls) and part.id
            calls.append([part.text, ""])
        elif part.kind == "arguments":
            assert part.call == len(calls) - 1
            calls[-1][1] += part.text
    text = {kind: "".join(part.text for part in parts if part.kind == kind) for kind in ("content", "reasoning")}
    spans = tuple(case.text[begin:end] for begin, end in parser.reasoning_spans)
    return Message(text["content"], text["reasoning"], tuple((name, args) for name, args in calls), spans)


CALLS = [
    Case(
        "hermes",
        "think",
        "<think>\nHm, Köln…\n</think>\n\nI look.\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Köln 🌧", "days": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        Message("I look.", "Hm, Köln…", (WEATHER, NOW), ("<think>\nHm, Köln…\n</think>",)),
    ),
    Case(
        "hermes",
        "think",
        'Hm\n</think>\n<tool_call>{"arguments": {"city": "a}\\"]<tool_call>"}, "name": "get_weather"}</tool_call>',
        Message("", "Hm", (("get_weather", '{"city": "a}\\"]<tool_call>"}'),), ("Hm\n</think>",)),
        "<|im_start|>assistant\n<think>\n",
    ),
    Case(
        "hermes",
        "",
        '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"a\\"}"}\n</tool_call>',
        Message(calls=(("get_weather", '{"city": "a"}'),)),
    ),
    Case(
        "qwen3-coder",
        "",
        "I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln 🌧\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        Message("I look.", calls=(WEATHER, NOW)),
    ),
    Case(
        "qwen3-coder",
        "",
        '<function=get_weather>\n<parameter=city>\na "b"\n\n</x>\n</parameter>\n</function>',
        Message(calls=(("get_weather", '{"city": "a \\"b\\"\\n\\n</x>"}'),)),
    ),
    Case(
        "glm",
        "think",
        "\n<think>x</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln 🌧</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        Message("", "x", (WEATHER, NOW), ("<think>x</think>",)),
    ),
    Case(
        "llama3-json",
        "",
        '{"name": "get_weather", "parameters": {"city": "Köln 🌧", "days": 2}}; {"name": "now", "parameters": {}}',
        Message(calls=(WEATHER, NOW)),
    ),
    Case(
        "llama3-json",
        "",
        '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}',
        Message(calls=(NOW,)),
    ),
    Case("pythonic", "", '[get_weather(city="Köln 🌧", days=2), now()]', Message(calls=(WEATHER, NOW))),
    Case(
        "pythonic",
        "",
        "[get_weather('(it\\'s]', days=None)]",
        Message(calls=(("get_weather", '{"city": "(it\'s]", "days": null}'),)),
    ),
    Case(
        "lfm2",
        "think",
        '<|tool_call_start|>[get_weather(city="Köln 🌧", days=2)]<|tool_call_end|>I asked.',
        Message("I asked.", calls=(WEATHER,)),
    ),
    Case(
        "mistral-list",
        "",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Köln 🌧", "days": 2}, "id": "abcdefgh1"}, '
        '{"name": "now", "arguments": {}}]',
        Message(calls=(WEATHER, NOW)),
    ),
    Case(
        "mistral",
        "mistral",
        '[THINK]hm[/THINK]ok[TOOL_CALLS]get_weather[CALL_ID]abcdefgh1[ARGS]{"city": "Köln 🌧", "days": 2}'
        "[TOOL_CALLS]now[ARGS]{}",
        Message("ok", "hm", (WEATHER, NOW), ("[THINK]hm[/THINK]",)),
    ),
    Case(
        "deepseek-v3",
        "think",
        "hm</think>\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Köln 🌧", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n'
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Message("", "hm", (WEATHER, NOW), ("hm</think>",)),
        "<｜Assistant｜><think>\n",
    ),
    Case(
        "deepseek-v3.1",
        "think",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Köln 🌧", "days": 2}'
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Message(calls=(WEATHER, NOW)),
        "<｜Assistant｜></think>",
    ),
    Case(
        "kimi-k2",
        "",
        "ok<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Köln 🌧", "days": 2}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>'
        "{}<|tool_call_end|><|tool_calls_section_end|>",
        Message("ok", calls=(WEATHER, NOW)),
    ),
    Case(
        "seed-oss",
        "seed",
        "<seed:think>a</seed:think><seed:tool_call>\n<function=get_weather>\n<parameter=city>Köln 🌧</parameter>\n"
        "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>",
        Message("", "a", (WEATHER,), ("<seed:think>a</seed:think>",)),
    ),
    Case(
        "minimax",
        "think",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Köln 🌧</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        Message(calls=(WEATHER, NOW)),
    ),
    Case(
        "nemotron",
        "",
        '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Köln 🌧", "days": 2}}]</TOOLCALL>',
        Message(calls=(WEATHER,)),
    ),
    Case(
        "harmony",
        "harmony",
        "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Köln 🌧", "days": 2}<|call|>',
        Message("I look.", "Need it.", (WEATHER,), ("<|channel|>analysis<|message|>Need it.<|end|>",)),
        "<|start|>assistant",
    ),
    Case(
        "harmony",
        "harmony",
        " to=functions.now<|channel|>commentary json<|message|>{}",
        Message(calls=(NOW,)),
        "<|start|>assistant",
    ),
    Case(
        "json",
        "",
        '{"name": "get_weather", "arguments": {"city": "Köln 🌧", "days": 2}}\n{"name": "now", "arguments": {}}',
        Message(calls=(WEATHER, NOW)),
    ),
]

# Texts that are no calls, or only in part.
OTHERS = [
    Case("hermes", "think", "Bye <3 <tool_ca\n", Message("Bye <3 <tool_ca\n")),
    Case("hermes", "", "  <tool_call>nope</tool_call> a\n", Message("  <tool_call>nope</tool_call> a\n")),
    Case("hermes", "", '<tool_call>{"x": {}} é', Message('<tool_call>{"x": {}} é')),
    Case("hermes", "", '<tool_call>{"name": "now", "argu', Message('<tool_call>{"name": "now", "argu')),
    Case("hermes", "", '<tool_call>{"name": ["now"]}', Message('<tool_call>{"name": ["now"]}')),
    Case("hermes", "", '<tool_call>{"name": "no\\x"}', Message('<tool_call>{"name": "no\\x"}')),
    Case("hermes", "", '<tool_call>{"name": "\\ud800"}', Message('<tool_call>{"name": "\\ud800"}')),
    Case(
        "hermes",
        "",
        '<tool_call>{"name": "now", "arguments": "\\ud800"}',
        Message(calls=(NOW,)),
    ),
    Case("pythonic", "", "[now(a='\\ud800')]", Message("[now(a='\\ud800')]")),
    Case("hermes", "", '<tool_call>{"name": "now"}', Message(calls=(NOW,))),
    Case(
        "hermes",
        "",
        '<tool_call>{"name": "now", "arguments": {"a": "b',
        Message(calls=(("now", '{"a": "b'),)),
    ),
    Case(
        "hermes",
        "",
        '<tool_call>{"name": "now", "arguments": {"a": nope}} x',
        Message(" x".strip(), calls=(("now", '{"a": nope}'),)),
    ),
    Case("hermes", "think", "<think>a", Message("", "a", (), ("<think>a",))),
    Case("hermes", "think", "a</think>b", Message("ab")),
    Case(
        "hermes",
        "think",
        "<think>a</think>b<think>c</think>d",
        Message("bd", "ac", (), ("<think>a</think>", "<think>c</think>")),
    ),
    Case(
        "none",
        "think",
        "<think>\n\n</think>\n\n<tool_call>b",
        Message("<tool_call>b", "", (), ("<think>\n\n</think>",)),
    ),
    Case("none", "none", "<think>a</think> b", Message("<think>a</think> b")),
    Case(
        "llama3-json", "", '{"name": "other", "parameters": {}} and', Message('{"name": "other", "parameters": {}} and')
    ),
    Case("llama3-json", "", '{"city": "Köln"}', Message('{"city": "Köln"}')),
    Case("json", "", '\n {"name": "now", "arguments": {}} x', Message("x", calls=(NOW,))),
    Case("json", "", 'It is {"name": "now", "arguments": {}}', Message('It is {"name": "now", "arguments": {}}')),
    Case("pythonic", "", "[1, 2, 3] are", Message("[1, 2, 3] are")),
    Case("pythonic", "", "[other(a=1)] x", Message("[other(a=1)] x")),
    Case("pythonic", "", "[now(a=lambda: 1)]", Message("[now(a=lambda: 1)]")),
    Case("mistral-list", "", "[TOOL_CALLS] nothing", Message("[TOOL_CALLS] nothing")),
    Case("mistral", "", "[TOOL_CALLS]a b[ARGS]{}", Message("[TOOL_CALLS]a b[ARGS]{}")),
    Case("kimi-k2", "", "<|tool_calls_section_begin|>é", Message("<|tool_calls_section_begin|>é")),
    Case("glm", "", "<tool_call>" + "é" * 300, Message("<tool_call>" + "é" * 300)),
    Case("qwen3-coder", "", "<tool_call>\n<function=now", Message("<tool_call>\n<function=now")),
    Case(
        "qwen3-coder",
        "",
        "<function=get_weather>\n<parameter=city>\nKö\n",
        Message(calls=(("get_weather", '{"city": "Kö\\n"}'),)),
    ),
    Case(
        "qwen3-coder",
        "",
        "<function=get_weather>\n<parameter=days>\nTrue\n</parameter>\n<parameter=x>\n{bad\n</parameter>\n",
        Message(calls=(("get_weather", '{"days": true, "x": "{bad"}'),)),
    ),
    Case("harmony", "harmony", "<|channel|>final<|message|>Hallo <|x", Message("Hallo <|x"), "<|start|>assistant"),
    Case("harmony", "harmony", "<|channel|>fin", Message(), "<|start|>assistant"),
    Case("harmony", "none", "<|channel|>analysis<|message|>a<|end|>", Message("a"), "<|start|>assistant"),
]
