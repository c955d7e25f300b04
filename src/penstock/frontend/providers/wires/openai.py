"""OpenAI's chat completions, which most providers speak.

Source: OpenAI's API reference, and the types of its Python package.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from penstock.frontend.errors import unavailable
from penstock.frontend.providers.file import URLS
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

_SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
_REASONS: Mapping[str, EndReason] = {"length": "length", "content_filter": "content_filter"}  # else stop


class OpenAIWire:
    def path(self, question: Question) -> str:
        return "/completions" if question.plain else "/chat/completions"

    def headers(self, key: str) -> Mapping[str, str]:
        return {"authorization": f"Bearer {key}"} if key else {}

    def body(self, question: Question) -> dict[str, Any]:
        """Returns the JSON of a request for a stream. Raises APIError 400 for a parameter that the API lacks."""
        chat, provider = question.chat, question.provider
        options, prompt = chat.options, chat.prompt
        body: dict[str, Any] = {
            "model": question.name,
            "stream": True,
            "stream_options": {"include_usage": True},
            **question.given(_SAMPLING),
            **(_text(question) if question.plain else _messages(question)),
        }
        if (most := question.max_tokens) is not None:
            body["max_completion_tokens" if provider.base_url == URLS["openai"] else "max_tokens"] = most
        optional: dict[str, Any] = {
            "n": options.n if options.n > 1 else None,
            "stop": list(options.stop) or None,
            "seed": options.seed,
            "logit_bias": dict(options.logit_bias) or None,
            "reasoning_effort": prompt.variables.get("reasoning_effort"),
            **_tool_fields(question),
            **_format(question),
        }
        return body | {name: value for name, value in optional.items() if value is not None}

    def reader(self) -> "OpenAIReader":
        return OpenAIReader()


def _text(question: Question) -> dict[str, Any]:
    prompt = question.chat.prompt
    text = prompt.messages[0]["content"] + question.begun
    return {"prompt": text, "suffix": prompt.suffix} if prompt.suffix else {"prompt": text}


def _messages(question: Question) -> dict[str, Any]:
    """The messages. Raises APIError 400 for an answer that goes on, if the provider has none."""
    messages = [_message(message) for message in question.chat.prompt.messages]
    if question.begun:
        messages.append({"role": "assistant", "content": question.begun})
    elif not question.chat.prompt.continues:
        return {"messages": messages}
    if "prefix" not in question.provider.accepts:
        raise unavailable("continue_final_message")
    return {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: value for name, value in message.items() if name != "reasoning_content"}
    calls = message.get("tool_calls")
    if not calls:
        return shown
    return {**shown, "content": shown["content"] or None, "tool_calls": [_call(call) for call in calls]}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call of an earlier answer, whose arguments are a text."""
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    return {"id": call["id"], "type": "function", "function": {"name": call["function"]["name"], "arguments": text}}


def _tool_fields(question: Question) -> dict[str, Any]:
    use = question.chat.use
    if not use.schemas:
        return {}
    named = {"type": "function", "function": {"name": use.name}}
    return {
        "tools": list(use.tools),
        "tool_choice": named if use.choice == "named" else use.choice,
        "parallel_tool_calls": None if use.parallel else False,
    }


def _format(question: Question) -> dict[str, Any]:
    """The grammar of the answer: OpenAI's API has JSON schemas only."""
    grammar = question.chat.grammar
    if grammar is None:
        return {}
    if grammar.kind != "json_schema":
        raise unavailable(grammar.param)
    schema = {"name": "answer", "schema": orjson.loads(grammar.text)}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


class OpenAIReader:
    """Reads the stream of one answer."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.complete = False  # the provider has said that nothing follows
        self._calls: dict[tuple[int, int], int] = {}  # by choice and the provider's number: ours, from 0 for a choice

    def read(self, data: bytes) -> list[AnswerPiece | Ending]:
        """Returns what one event says. Raises ProviderFailed if it is an error, and UNREADABLE."""
        if data == b"[DONE]":
            self.complete = True
            return []
        event = orjson.loads(data)
        if error := event.get("error"):
            raise stream_error(error if isinstance(error, str) else error.get("message") or error.get("type"))
        if usage := event.get("usage"):
            prompt, output = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
            reasoning = (output or {}).get("reasoning_tokens")
            self.counts = Counts(
                counted(usage["prompt_tokens"]),
                counted((prompt or {}).get("cached_tokens")),
                counted(usage.get("completion_tokens")),
                None if reasoning is None else counted(reasoning),
            )
        found: list[AnswerPiece | Ending] = []
        for choice in event.get("choices") or ():
            number, delta = choice.get("index", 0), choice.get("delta") or {}
            if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
                found.append(piece(number, "reasoning", reasoning))
            if text := delta.get("content") or delta.get("refusal") or choice.get("text"):
                found.append(piece(number, "content", text))
            for call in delta.get("tool_calls") or ():
                found += self._call(number, call)
            if reason := choice.get("finish_reason"):
                found.append(Ending(number, _REASONS.get(reason, "stop")))
        return found

    def _call(self, choice: int, call: dict[str, Any]) -> Iterator[AnswerPiece]:
        function, key = call.get("function") or {}, (choice, call.get("index", 0))
        if key not in self._calls:
            number = self._calls[key] = sum(1 for each, _ in self._calls if each == choice)
            yield piece(choice, "call", function["name"], number, call.get("id") or f"call_{choice}_{number}")
        if arguments := function.get("arguments"):
            yield piece(choice, "arguments", arguments, self._calls[key])
