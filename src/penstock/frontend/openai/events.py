"""Encodes OpenAI's server-sent events. The bytes that do not change during a request are encoded once."""

from typing import Any

import orjson

from penstock.frontend.call import ModelContext
from penstock.frontend.error_body import error_body
from penstock.frontend.errors import APIError
from penstock.frontend.generation import Usage
from penstock.frontend.http.sse import sse_event
from penstock.frontend.openai.fields import StreamOptions

DONE = sse_event(b"[DONE]")


class EventFrame:
    """The bytes of an event around its choice. `fields` are the same in every event of a request."""

    def __init__(self, fields: dict[str, Any], options: StreamOptions | None) -> None:
        self.fields = fields
        self._start = b"data: " + orjson.dumps(fields)[:-1]
        self._include_usage = bool(options and options.include_usage)
        self._usage_always = self._include_usage and bool(options and options.continuous_usage_stats)
        self._tail = b'}],"usage":null}\n\n' if self._include_usage else b"}]}\n\n"

    def head(self, index: int) -> bytes:
        """The start of an event, up to the index of choice `index`. The choice's other fields follow."""
        return self._start + b',"choices":[{"index":%d,' % index

    def tail(self, usage: Usage) -> bytes:
        """The end of an event, after its choice's fields."""
        if self._usage_always:
            return b'}],"usage":' + orjson.dumps(usage_fields(usage)) + b"}\n\n"
        return self._tail

    def closing(self, usage: Usage) -> bytes:
        """Returns the event with the usage if the request includes it, and the end of the stream."""
        if not self._include_usage:
            return DONE
        return self._start + b',"choices":[],"usage":' + orjson.dumps(usage_fields(usage)) + b"}\n\n" + DONE


def served_fields(context: ModelContext) -> dict[str, Any]:
    """The fields of an answer that say when it was made, and by which model and version."""
    fields = {"created": context.created, "model": context.model.name}
    return {**fields, "system_fingerprint": context.model.fingerprint} if context.model.fingerprint else fields


def encode_failure(error: APIError) -> bytes:
    """The error event, and the end of the stream."""
    return sse_event(error_body(error)) + DONE


def usage_fields(usage: Usage) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
    }
    if usage.reasoning_tokens is not None:
        fields["completion_tokens_details"]["reasoning_tokens"] = usage.reasoning_tokens
    fields |= usage.left_out.usage
    if usage.price is not None:
        computed = usage.prompt_tokens - usage.cached_tokens
        fields["cost"] = usage.price.cost(computed, usage.cached_tokens, usage.completion_tokens)
    return fields
