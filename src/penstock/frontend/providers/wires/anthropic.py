"""Anthropic's messages.

Source: Anthropic's API reference, and the types of its Python package.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from penstock.frontend.errors import invalid, unavailable
from penstock.frontend.providers.wires.parts import (
    AnswerPiece,
    Counts,
    Ending,
    EndReason,
    Question,
    counted,
    piece,
    stream_error,
)
from penstock.frontend.requests.tools import parse_arguments

_VERSION = "2023-06-01"
_SAMPLING = ("temperature", "top_p", "top_k")
_REASONS: Mapping[str, EndReason] = {  # else stop
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "content_filter",
}
_COUNTS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
_CHOICES = {"auto": "auto", "required": "any", "named": "tool"}


class AnthropicWire:
    def path(self, question: Question) -> str:
        return "/messages"

    def headers(self, key: str) -> Mapping[str, str]:
        return {"anthropic-version": _VERSION} | ({"x-api-key": key} if key else {})

    def body(self, question: Question) -> dict[str, Any]:
        """Returns the JSON of a request for a stream. Raises APIError 400 for a parameter that the API lacks."""
        chat = question.chat
        options, prompt = chat.options, chat.prompt
        for name, given in (
            ("n", options.n > 1),
            ("seed", options.seed is not None),
            ("logit_bias", options.logit_bias),
        ):
            if given:
                raise unavailable(name)
        system = [message["content"] for message in prompt.messages if message["role"] == "system"]
        messages = _messages([message for message in prompt.messages if message["role"] != "system"])
        if not messages:
            raise invalid(f"{prompt.param} has no message of a user; send one", prompt.param)
        if question.begun:
            messages.append({"role": "assistant", "content": question.begun})
        body: dict[str, Any] = {
            "model": question.name,
            "max_tokens": question.max_tokens or question.model.max_output,
            "messages": messages,
            "stream": True,
            **question.given(_SAMPLING),
            **_tool_fields(question),
        }
        if config := _output_config(question):
            body["output_config"] = config
        if system:
            body["system"] = "\n\n".join(system)
        if options.stop:
            body["stop_sequences"] = list(options.stop)
        if chat.thinking_budget:
            body["thinking"] = {"type": "enabled", "budget_tokens": chat.thinking_budget}
        return body

    def reader(self) -> "AnthropicReader":
        return AnthropicReader()


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with users and assistants in turn: results of tools are the user's."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        role = "assistant" if message["role"] == "assistant" else "user"
        blocks = _blocks(message)
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        elif blocks:
            turns.append({"role": role, "content": blocks})
    return turns


def _blocks(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    if message["role"] == "tool":
        return [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}]
    blocks: list[dict[str, Any]] = [{"type": "text", "text": content}] if content else []
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        given = parse_arguments(arguments) if isinstance(arguments, str) else arguments
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given})
    return blocks


def _tool_fields(question: Question) -> dict[str, Any]:
    use = question.chat.use
    if not use.schemas:
        return {}
    tools = []
    for tool in use.tools:
        function = tool["function"]
        schema = function.get("parameters") or {"type": "object"}
        described = {"description": function["description"]} if function.get("description") else {}
        tools.append({"name": function["name"], "input_schema": schema, **described})
    choice: dict[str, Any] = {"type": _CHOICES[use.choice]}
    if use.choice == "named":
        choice["name"] = use.name
    if not use.parallel:
        choice["disable_parallel_tool_use"] = True
    return {"tools": tools, "tool_choice": choice}


def _output_config(question: Question) -> dict[str, Any]:
    """The effort to reason, and the grammar of the answer: Anthropic's API has JSON schemas only."""
    config: dict[str, Any] = {}
    effort = question.chat.prompt.variables.get("reasoning_effort")
    if effort not in (None, "none"):
        config["effort"] = "low" if effort == "minimal" else effort
    if (grammar := question.chat.grammar) is not None:
        if grammar.kind != "json_schema":
            raise unavailable(grammar.param)
        config["format"] = {"type": "json_schema", "schema": orjson.loads(grammar.text)}
    return config


class AnthropicReader:
    """Reads the stream of one answer. Blocks that chats do not have, such as a provider's own tools, are left out."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.complete = False  # the provider has said that nothing follows
        self._calls: dict[int, int] = {}  # by the number of a block: that of its call
        self._usage: dict[str, Any] = {}

    def read(self, data: bytes) -> list[AnswerPiece | Ending]:
        """Returns what one event says. Raises ProviderFailed if it is an error, and UNREADABLE."""
        event = orjson.loads(data)
        match event["type"]:
            case "error":
                raise stream_error(event["error"].get("message") or event["error"].get("type"))
            case "message_start":
                self._count(event["message"].get("usage") or {})
            case "content_block_start":
                return list(self._start(event["index"], event["content_block"]))
            case "content_block_delta":
                return list(self._delta(event["index"], event["delta"]))
            case "message_delta":
                self._count(event.get("usage") or {})
                if reason := event["delta"].get("stop_reason"):
                    return [Ending(0, _REASONS.get(reason, "stop"), event["delta"].get("stop_sequence"))]
            case "message_stop":
                self.complete = True
        return []

    def _start(self, index: int, block: dict[str, Any]) -> Iterator[AnswerPiece]:
        if block["type"] == "tool_use":
            number = self._calls[index] = len(self._calls)
            yield piece(0, "call", block["name"], number, block["id"])
        elif text := block.get("text"):
            yield piece(0, "content", text)

    def _delta(self, index: int, delta: dict[str, Any]) -> Iterator[AnswerPiece]:
        match delta["type"]:
            case "text_delta":
                yield piece(0, "content", delta["text"])
            case "thinking_delta":
                yield piece(0, "reasoning", delta["thinking"])
            case "input_json_delta" if index in self._calls and delta["partial_json"]:
                yield piece(0, "arguments", delta["partial_json"], self._calls[index])

    def _count(self, usage: dict[str, Any]) -> None:
        """Counts are cumulative, and those of the prompt leave out what was read from the cache or written to it."""
        self._usage |= {name: count for name, count in usage.items() if count is not None}
        new, written, cached, output = (counted(self._usage.get(name)) for name in _COUNTS)
        self.counts = Counts(new + written + cached, cached, output)
