"""The frame of OpenAI's server-sent events. All that is fixed for a request is encoded once."""

from typing import Any

import orjson

from penstock.frontend import sse
from penstock.frontend.errors import APIError
from penstock.frontend.generation import Usage
from penstock.frontend.openai.errors import encode_error
from penstock.frontend.openai.protocol import StreamOptions

DONE = sse.event(b"[DONE]")


class Frame:
    """The bytes around a choice. `id`, `created` and `model` are the same in every event and in a whole answer."""

    def __init__(self, fields: dict[str, Any], options: StreamOptions | None) -> None:
        self.fields = fields
        self._start = b"data: " + orjson.dumps(fields)[:-1]
        self._include_usage = bool(options and options.include_usage)
        self._usage_always = self._include_usage and bool(options and options.continuous_usage_stats)
        self._tail = b'}],"usage":null}\n\n' if self._include_usage else b"}]}\n\n"

    def head(self, index: int) -> bytes:
        """An event up to the first field of choice `index` after its index."""
        return self._start + b',"choices":[{"index":%d,' % index

    def tail(self, usage: Usage) -> bytes:
        """An event from the end of its choice."""
        if self._usage_always:
            return b'}],"usage":' + orjson.dumps(usage_fields(usage)) + b"}\n\n"
        return self._tail

    def closing(self, usage: Usage) -> bytes:
        """The usage, where it was asked for, and the end."""
        if not self._include_usage:
            return DONE
        return self._start + b',"choices":[],"usage":' + orjson.dumps(usage_fields(usage)) + b"}\n\n" + DONE


def failure(error: APIError) -> bytes:
    """The end of a stream that failed."""
    return sse.event(encode_error(error)) + DONE


def usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
