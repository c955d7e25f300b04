"""What went wrong, before a dialect has spelled it."""

from collections.abc import Mapping
from types import MappingProxyType

from penstock.messages import EngineError, QueueFull, RequestRejected

INTERNAL_ERROR = "internal_error"  # the code of what nobody foresaw


class APIError(Exception):
    """An answer that is not a result. The message names the value, the limit and the remedy, and is fit for a user."""

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
        """`close` says that the connection cannot be used again: its request was not read to the end."""
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
        if self.status == 500:
            fields.append((b"x-should-retry", b"false"))  # the openai client would send what failed here again, twice
        if self.close:
            fields.append((b"connection", b"close"))
        return fields


class ClientGone(Exception):
    """The client closed the connection before its answer was complete. Nobody is left to tell."""


class GenerationFailed(Exception):
    """The engine ended this request with an error that concerns no other."""


def invalid(message: str, param: str | None = None, code: str | None = None) -> APIError:
    return APIError(400, message, param=param, code=code)


def digits(value: int) -> str:
    """An integer for an error message. A huge one is described, as writing it out would take long."""
    return str(value) if abs(value) < 2**64 else f"an integer of {value.bit_length()} bits"


def as_api_error(error: Exception, retry_after: int) -> APIError:
    """The answer to an exception on a request's way through the engine."""
    match error:
        case APIError():
            return error
        case QueueFull():
            return APIError(429, str(error), code="queue_full", retry_after=retry_after)
        case RequestRejected():
            return invalid(str(error), getattr(error, "param", None), "request_rejected")
        case EngineError():
            return APIError(503, str(error), code="engine_unavailable", retry_after=retry_after)
        case GenerationFailed():
            return APIError(500, str(error), code="generation_failed")
        case _:
            message = "an internal error; the server's log has it under this request's id"
            return APIError(500, message, code=INTERNAL_ERROR)
