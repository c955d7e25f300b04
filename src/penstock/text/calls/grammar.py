"""Makes grammars of tool calls, in llguidance's dialect of Lark, from the tables of formats.

A model that obeys the grammar writes only calls that the parser reads, with arguments that obey the tool's schema.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from penstock.text.calls.bodies import is_text
from penstock.text.calls.formats import (
    ChannelFormat,
    JsonArguments,
    JsonObject,
    PythonCall,
    ReasoningFormat,
    TaggedArguments,
    ToolFormat,
)


class ToolGrammar(NamedTuple):
    """A grammar in Lark. With a trigger, text is free until it contains the trigger; the grammar is of what follows."""

    text: str
    trigger: str = ""


Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments, by the tool's name
_ANY = r"/(.|\n)*/"
_OPEN = frozenset(("patternProperties", "allOf", "anyOf", "oneOf", "$ref"))  # keywords that declare more properties
_MOST_CALLS = 128
_NUMBER = "/[0-9]{1,3}/"
_SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as chat templates write JSON


def grammar_for(
    tools: ToolFormat | ChannelFormat,
    reasoning: ReasoningFormat | ChannelFormat | None,
    schemas: Schemas,
    *,
    required: bool,
    parallel: bool = True,
    special: Mapping[str, int] | None = None,
    prompt_end: str = "",
    answer: str | None = None,
) -> ToolGrammar:
    """Returns a grammar of whole messages.

    With `required` a message is calls, after reasoning; else it is any text, in which every call is well-formed, or
    with `answer`, a JSON schema, either calls or a value of the schema. With `parallel` false there is at most one
    call. `special` are the markers that are special tokens, with their ids. `prompt_end` is the end of the prompt,
    which may begin the reasoning.
    """
    rules = _Rules(special or {})
    held = "" if answer is None else _held(json.loads(answer))
    if isinstance(tools, ChannelFormat):
        start = _channels(tools, schemas, rules, required=required, answer=held, prompt_end=prompt_end)
        return ToolGrammar(rules.text(start))
    parallel = parallel and not tools.one_call
    group = functools.partial(_group, tools, schemas, rules, "calls", parallel=parallel)
    if not (required or held or tools.whole_answer or rules.is_special(tools.triggers[0])):
        trigger, rest, free = _after_trigger(tools, schemas, rules, parallel=parallel)
        again = f"({rules.up_to('before', trigger)} {rest})*" if parallel else ""
        return ToolGrammar(rules.text(f"{rest} {again} {free}"), trigger)
    think = _reasoning(reasoning, rules, prompt_end)
    if required or held:
        start = group() if required else f"({group()} | {held})"
    elif tools.whole_answer:
        start = f"({group()} | {_free(tools, rules)})"
    else:  # the trigger is a special token, which free text does not contain
        trigger, rest, free = _after_trigger(tools, schemas, rules, parallel=parallel)
        start = f"({rules.up_to('before', trigger)} {rest}){'*' if parallel else '?'} {free}"
    return ToolGrammar(rules.text(f"{think} {start}".strip()))


def reasoning_end(reasoning: ReasoningFormat | ChannelFormat | None, prompt_end: str) -> str:
    """Returns the text that ends the reasoning that the prompt has begun, or "" if it has begun none."""
    end = prompt_end.rstrip()
    if isinstance(reasoning, ReasoningFormat):
        return reasoning.end if end.endswith(reasoning.begin) else ""
    return f"final{reasoning.message}" if reasoning is not None else ""


class _Rules:
    """Collects rules, and writes texts with special tokens."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._lines: list[str] = []
        texts = sorted(filter(None, special), key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, texts)) + ")" if texts else r"((?!))")

    def text(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._lines, ""])

    def add(self, name: str, body: str) -> str:
        self._lines.append(f"{name}: {body}")
        return name

    def is_special(self, text: str) -> bool:
        return text in self._special

    def literal(self, text: str) -> str:
        """Returns a text as it is in a rule: strings, and tokens by their ids."""
        pieces = [piece for piece in self._split.split(text) if piece]
        return " ".join(
            f"<[{self._special[piece]}]>" if piece in self._special else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
        )

    def before_special(self, text: str) -> str:
        """Returns the part of a text before its first special token."""
        return self._split.split(text)[0]

    def up_to(self, name: str, end: str, sizes: str = "*") -> str:
        """Returns a rule for any text that ends with the first `end`. `sizes` is a quantifier of its characters."""
        if self.is_special(end):
            self._text()
            return self.add(name, f"TEXT {self.literal(end)}")
        return self.add(f"{name}[suffix={json.dumps(end, ensure_ascii=False)}]", rf"/(.|\n){sizes}/").partition("[")[0]

    def without(self, ends: Sequence[str]) -> str:
        """Returns a terminal for any text that contains none of these."""
        ordinary = [re.escape(end).replace("/", r"\/") for end in ends if not self.is_special(end)]
        if not ordinary:
            return self._text()
        return self.add("FREE", rf"/(.|\n)*/ & ~/(.|\n)*({'|'.join(ordinary)})(.|\n)*/")

    def _text(self) -> str:
        if f"TEXT: {_ANY}" not in self._lines:
            self.add("TEXT", _ANY)
        return "TEXT"


def _reasoning(reasoning: ReasoningFormat | ChannelFormat | None, rules: _Rules, prompt_end: str) -> str:
    if not isinstance(reasoning, ReasoningFormat):
        return ""
    rest = rules.up_to("thoughts", reasoning.end)
    rules.add("BLANKS", r"/\s{1,4}/")
    if prompt_end.rstrip().endswith(reasoning.begin):
        return f"{rest} BLANKS?"
    return f"({rules.literal(reasoning.begin)} {rest} BLANKS?)?"


def _free(tools: ToolFormat, rules: _Rules) -> str:
    if not tools.whole_answer:
        return rules.without(tools.triggers)
    if tools.listed:
        return rules.add("FREE", r"/(.|\n)*/ & ~/\s*\[\s*[A-Za-z_][A-Za-z0-9_.]*\((.|\n)*/")
    return rules.add("FREE", r'/(.|\n)*/ & ~/\s*\{\s*"name"(.|\n)*/')


def _after_trigger(tools: ToolFormat, schemas: Schemas, rules: _Rules, *, parallel: bool) -> tuple[str, str, str]:
    """Returns the text that begins calls, the rule of what follows it, and the rule of text without calls."""
    trigger = tools.triggers[0]
    rest = _group(tools, schemas, rules, "later", trigger, parallel=parallel and bool(tools.begin))
    return trigger, rest, _free(tools, rules)


def _group(
    tools: ToolFormat, schemas: Schemas, rules: _Rules, name: str, written: str = "", *, parallel: bool = True
) -> str:
    """Returns a rule for one group of calls, or for one call. `written` is its beginning that is there already.

    The text before the name is one lexeme, so that the lexer distinguishes it from free text, which is another lexeme.
    """
    begin = "" if tools.optional_begin else tools.begin
    opening = begin + ("[" if tools.listed else "")
    closing = ("]" if tools.listed else "") + ("" if tools.optional_begin else tools.end)
    first = _call(tools, schemas, rules, f"{name}_first", opening, written)
    more = ""
    if parallel:
        call = _call(tools, schemas, rules, f"{name}_next", tools.separator)
        more = f"{call}{{0,{_MOST_CALLS - 1}}}"
    return " ".join(filter(None, (first, more, rules.literal(closing))))


def _call(tools: ToolFormat, schemas: Schemas, rules: _Rules, name: str, before: str, written: str = "") -> str:
    """Returns the rule of a call to any of the tools, with the text before it."""
    opening = (before + "".join(tools.head)).removeprefix(written)
    each = [
        rules.add(f"{name}_{i}", _body(tools, tool, schema, rules, opening, f"{name}_{i}"))
        for i, (tool, schema) in enumerate(schemas.items())
    ]
    return rules.add(name, " | ".join(each))


def _body(tools: ToolFormat, name: str, schema: Mapping[str, Any], rules: _Rules, opening: str, rule: str) -> str:
    tail = rules.literal("".join(tools.tail))
    written = tools.written_name.format(name=name, index="")
    number = _NUMBER if "{index}" in tools.written_name else ""
    pieces: tuple[str, ...]
    match tools.body:
        case JsonObject() as body:
            opening += f'{{"{body.name_key}": {json.dumps(name)}, "{body.arguments_key}": '
            pieces = (rules.literal(opening), _json(schema), rules.literal("}" + "".join(tools.tail)))
        case JsonArguments():
            pieces = (rules.literal(opening + written), number, rules.literal(tools.mid), _json(schema), tail)
        case TaggedArguments() as tags:
            arguments = _TaggedRules(rule, tags, schema, "".join(tools.tail), rules)
            pieces = (rules.literal(opening + written + tools.mid), arguments.whole())
        case PythonCall():
            pieces = (rules.literal(f"{opening}{name}("), _python(rule, schema, rules), rules.literal(")"), tail)
    return " ".join(filter(None, pieces))


def _json(schema: Mapping[str, Any]) -> str:
    """Returns a JSON value of the arguments' schema. Arguments that are not declared are not allowed."""
    closed = dict(schema) or {"properties": {}}
    closed.setdefault("type", "object")
    declared = closed.get("properties")
    if isinstance(declared, dict) and not (_OPEN & closed.keys() or {*closed.get("required", ())} - declared.keys()):
        closed.setdefault("additionalProperties", False)
    return _held(closed)


def _held(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _SPACED})


def _value(schema: Any, root: Mapping[str, Any]) -> str:
    """Returns a JSON value of one argument's schema."""
    closed = dict(schema) if isinstance(schema, dict) else {}
    for key in ("$defs", "definitions"):
        if key in root:
            closed.setdefault(key, root[key])
    return _held(closed)


def _arguments(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """Returns each argument's name, its schema, and whether it is required."""
    properties = schema.get("properties")
    required = schema.get("required") or ()
    if not isinstance(properties, dict):
        return []
    return [(key, value, key in required) for key, value in properties.items()]


class _TaggedRules:
    """Makes the rules of tagged arguments, in the schema's order, and of the end of their call.

    A text may contain its closing tag. It ends where another argument or the end of the call follows the tag, as the
    parser reads it. So the tag and what follows are one lexeme, unless a special token is among them.
    """

    def __init__(self, name: str, tags: TaggedArguments, schema: Mapping[str, Any], end: str, rules: _Rules) -> None:
        self._name = name
        self._tags = tags
        self._schema = schema
        self._end = end  # of the call
        self._rules = rules
        self._line = "\n" if tags.line_breaks else ""
        self._closing = f"{self._line}{tags.value_close}"
        self._arguments = _arguments(schema)
        followers = [rules.before_special(tags.between + text).strip() for text in (tags.key_open, end)]
        self._one_lexeme = bool(rules.before_special(tags.value_close)) and all(followers)
        self._later: dict[int, str] = {}  # rules of argument i or, if that is optional, a later one, behind `key_open`

    def whole(self) -> str:
        """Returns all arguments and the end of the call."""
        for index in reversed(range(len(self._arguments))):
            self._later[index] = self._argument(index)
        return self._rest(0)

    def _rest(self, index: int, before: str = "") -> str:
        """Returns what follows argument `index - 1`: a later argument, or the end. `before` precedes it."""
        literal = self._rules.literal
        ways = [f"{literal(before + self._tags.key_open)} {self._later[index]}"] if self._has(index) else []
        if self._may_end(index):
            ways.append(literal(before + self._end))
        return f"({' | '.join(ways)})"

    def _has(self, index: int) -> bool:
        return index < len(self._arguments)

    def _may_end(self, index: int) -> bool:
        return not any(needed for _, _, needed in self._arguments[index:])

    def _argument(self, index: int) -> str:
        key, value, needed = self._arguments[index]
        opening = self._tags.opening(key).removeprefix(self._tags.key_open)
        ways = [f"{self._rules.literal(opening + self._line)} {self._value(index, value)}"]
        if not needed and self._has(index + 1):
            ways.append(self._later[index + 1])
        return self._rules.add(f"{self._name}_{index}", " | ".join(ways))

    def _value(self, index: int, schema: Any) -> str:
        """Returns a value, its closing tag, and the rest of the call."""
        after = self._closing + self._tags.between
        if not (isinstance(schema, dict) and is_text(schema)):
            return f"{_value(schema, self._schema)} {self._rest(index + 1, after)}"
        if "enum" in schema or "const" in schema:
            words = [str(word) for word in schema.get("enum", [schema.get("const")])]
            each = " | ".join(self._rules.literal(word) or json.dumps("") for word in words)
            return f"({each}) {self._rest(index + 1, after)}"
        return self._text(f"{self._name}_{index}", index, _sizes(schema))

    def _text(self, name: str, index: int, sizes: str) -> str:
        rules, tags = self._rules, self._tags
        if not self._one_lexeme:
            return f"{rules.up_to(f'{name}_text', self._closing, sizes)} {self._rest(index + 1, tags.between)}"
        after, ways = self._closing + tags.between, []
        if self._has(index + 1):
            ways.append(f"{rules.up_to(f'{name}_more', after + tags.key_open, sizes)} {self._later[index + 1]}")
        if self._may_end(index + 1):
            end = rules.before_special(after + self._end)
            rest = rules.literal((after + self._end).removeprefix(end))
            ways.append(f"{rules.up_to(f'{name}_last', end, sizes)} {rest}")
        return f"({' | '.join(ways)})"


def _sizes(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minLength"), schema.get("maxLength")
    low = low if isinstance(low, int) else 0
    if isinstance(high, int):
        return f"{{{low},{max(low, high)}}}"
    return f"{{{low},}}" if low else "*"


def _python(rule: str, schema: Mapping[str, Any], rules: _Rules) -> str:
    """Returns the arguments of a call in Python's syntax, in the schema's order."""
    tail = ""
    pieces = _arguments(schema)
    for i, (key, value, needed) in reversed(list(enumerate(pieces))):
        one = f"{rules.literal(key + '=')} {_value(value, schema)}"
        rest = f'(", " {rule}_{i + 1})' + ("" if any(more for _, _, more in pieces[i + 1 :]) else "?")
        body = one if i + 1 == len(pieces) else f"{one} {rest}"
        if not needed and i + 1 < len(pieces):
            body = f"{body} | {rule}_{i + 1}"
        tail = rules.add(f"{rule}_{i}", body)
    if tail and not any(needed for _, _, needed in pieces):
        return f"{tail}?"
    return tail


def _channels(
    format: ChannelFormat, schemas: Schemas, rules: _Rules, *, required: bool, answer: str, prompt_end: str
) -> str:
    """Returns the rule of messages with headers. The last message ends the answer: its end is a stop token."""
    channel, message, end = "<|channel|>", format.message, format.ends[0]
    begin = rules.literal(f"{format.starts[0]}assistant")
    text = rules.without((end, *format.ends, *format.starts))
    for rule, name in (("thoughts", "analysis"), ("preamble", "commentary")):
        header = rules.literal(f"{channel}{name}{message}")
        rules.add(rule, f"{header} {rules.up_to(f'{rule}_text', end)}")
    names = []
    for i, (name, schema) in enumerate(schemas.items()):
        header = format.call_header.format(name=name) + message
        names.append(rules.add(f"call_{i}", f"{rules.literal(header)} {_json(schema)}"))
    rules.add("call", " | ".join(names))
    rules.add("final", f"{rules.literal(f'{channel}final{message}')} {answer or text}")
    last = "call" if required else "(call | final)"
    start = f"((thoughts | preamble) {begin})* {last}"
    if not prompt_end.rstrip().endswith(f"{format.starts[0]}assistant"):
        start = f"{begin} {start}"
    return start
