"""Errors of requests, independent of the wire."""

from collections.abc import Mapping
from types import MappingProxyType

from penstock.messages import (
    GRAMMAR_TOO_COMPLEX,
    GRAMMARS_BUSY,
    OUT_OF_MEMORY,
    DeadlineExceeded,
    EndsEngines,
    EngineError,
    QueueFull,
    RequestRejected,
)

INTERNAL_ERROR = "internal_error"  # the code of an unexpected exception
_NO_RETRY = MappingProxyType({"x-should-retry": "false"})  # else OpenAI's client sends some requests twice more


class APIError(Exception):
    """An error answer. The message is for users: it names the value, the limit and the remedy."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        close: bool = False,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`close`: the connection cannot be reused, because the request was not read to its end."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.close = close
        self.headers = headers

    def http_headers(self) -> list[tuple[bytes, bytes]]:
        fields = [(name.encode(), value.encode()) for name, value in self.headers.items()]
        if self.retry_after is not None:
            fields.append((b"retry-after", b"%d" % self.retry_after))
        if self.status == 401:
            fields.append((b"www-authenticate", b"Bearer"))
        if self.status in (500, 504):
            fields += [(name.encode(), value.encode()) for name, value in _NO_RETRY.items()]
        if self.close:
            fields.append((b"connection", b"close"))
        return fields


class ContextOverflow(APIError):
    """APIError 400 for a prompt that leaves no room for an answer. Clients shorten the conversation when they recognise
    it, so each wire has the words of its own API."""

    def __init__(self, param: str, tokens: int, limit: int, *, counted: bool = True) -> None:
        """`counted`: the prompt has `tokens` tokens; else it has more, which were not counted."""
        size = f"{tokens} tokens: none are left for an answer" if counted else f"more than {tokens} tokens"
        super().__init__(
            400,
            f"the maximum context length is {limit} tokens, but {param} has {size}; shorten it",
            param=param,
            code="context_length_exceeded",
        )
        self.tokens = tokens if counted else tokens + 1  # at least
        self.limit = limit


class ProviderFailed(APIError):
    """A provider could not answer. Another model may."""

    def __init__(self, status: int, message: str, code: str, *, retry_after: int | None = None) -> None:
        super().__init__(status, message, code=code, retry_after=retry_after)


class ClientGone(Exception):
    """The client closed the connection before its answer was complete. No answer can be sent."""


class GenerationFailed(Exception):
    """The engine ended this request with an error. Other requests are not affected."""


def invalid(message: str, param: str | None = None, code: str | None = None) -> APIError:
    """Returns APIError 400."""
    return APIError(400, message, param=param, code=code)


def unavailable(param: str) -> APIError:
    """Returns APIError 400 for a parameter that a provider lacks."""
    message = f"{param} is not available: the model is at a provider that does not have it; leave it out"
    return invalid(message, param, "unsupported_parameter")


def digits(value: int) -> str:
    """An integer for an error message. A huge one is described, as writing it out would take long."""
    return str(value) if abs(value) < 2**64 else f"an integer of {value.bit_length()} bits"


def as_api_error(error: Exception, retry_after: int) -> APIError:
    """The error answer for an exception that a request raised."""
    match error:
        case APIError():
            return error
        case QueueFull():
            return APIError(429, str(error), code="queue_full", retry_after=error.retry_after)
        case DeadlineExceeded():
            return APIError(504, str(error), code="deadline_exceeded")
        case EndsEngines():
            return APIError(400, str(error), code="request_rejected", headers=_NO_RETRY)
        case RequestRejected():
            return invalid(str(error), getattr(error, "param", None), "request_rejected")
        case EngineError():
            return APIError(503, str(error), code="engine_unavailable", retry_after=retry_after)
        case GenerationFailed() if str(error).startswith(GRAMMAR_TOO_COMPLEX):
            return invalid(f"{error}; send a simpler one", code="invalid_grammar")
        case GenerationFailed() if str(error).startswith(OUT_OF_MEMORY):
            return APIError(503, str(error), code="out_of_memory", retry_after=retry_after)
        case GenerationFailed() if str(error).startswith(GRAMMARS_BUSY):
            return APIError(503, str(error), code="grammars_busy", retry_after=retry_after)
        case GenerationFailed():
            return APIError(500, str(error), code="generation_failed")
        case _:
            message = "internal error; the server's log has the details under this request's id"
            return APIError(500, message, code=INTERNAL_ERROR)
