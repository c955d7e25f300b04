"""Writes tool calls as a model of a format does: for histories and instructions that a chat template cannot show."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from penstock.text.calls.formats import (
    ChannelFormat,
    JsonArguments,
    JsonObject,
    PythonCall,
    TaggedArguments,
    ToolFormat,
)


class WrittenCall(NamedTuple):
    """A call of an earlier message."""

    name: str
    arguments: Mapping[str, Any]


def write_calls(format: ToolFormat | ChannelFormat, calls: Sequence[WrittenCall]) -> str:
    """Returns the text of the calls, with the markers around them."""
    if isinstance(format, ChannelFormat):
        return format.ends[0].join(
            f"{format.call_header.format(name=call.name)}{format.message}{_json(call.arguments)}" for call in calls
        )
    written = [_call(format, call, index) for index, call in enumerate(calls)]
    begin = "" if format.optional_begin else format.begin
    end = "" if format.optional_begin else format.end
    joined = format.separator.join(written)
    return f"{begin}[{joined}]{end}" if format.listed else f"{begin}{joined}{end}"


def _call(format: ToolFormat, call: WrittenCall, index: int) -> str:
    name = format.written_name.format(name=call.name, index=index)
    match format.body:
        case JsonObject() as body:
            text = f'{{"{body.name_key}": {_json(call.name)}, "{body.arguments_key}": {_json(call.arguments)}}}'
        case JsonArguments():
            text = f"{name}{format.mid}{_json(call.arguments)}"
        case TaggedArguments() as tags:
            line = "\n" if tags.line_breaks else ""
            values = "".join(
                f"{tags.opening(key)}{line}{_plain(value)}{line}{tags.value_close}{tags.between}"
                for key, value in call.arguments.items()
            )
            text = f"{name}{format.mid}{values}"
        case PythonCall():
            text = f"{name}({', '.join(f'{key}={_json(value)}' for key, value in call.arguments.items())})"
    return f"{''.join(format.head)}{text}{''.join(format.tail)}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
