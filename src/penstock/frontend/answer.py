"""Sends the output of a generation, as a stream of events or as one answer. A wire's codec makes the bytes."""

import io
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from types import MappingProxyType
from typing import Protocol

from penstock.frontend.errors import INTERNAL_ERROR, APIError, as_api_error
from penstock.frontend.generation import ChoiceUpdate, Updates, Usage
from penstock.frontend.http.asgi import Headers, Send
from penstock.frontend.http.buffers import HeldBytes
from penstock.frontend.http.sse import HEARTBEAT, STREAM_TYPE
from penstock.frontend.http.streamed import StreamedResponse
from penstock.frontend.offload import offload_if_large
from penstock.messages import FinishReason

_log = logging.getLogger("penstock.frontend")
_JSON_OF_PACKED = 12  # bytes of JSON for a byte of packed log-probabilities
_GATHERED = 32  # tokens for which the task of an answer that is not streamed is woken: once for each token costs more


class CollectedChoice:
    """One choice, collected from its updates."""

    __slots__ = ("_ids", "_last", "_text", "choice", "logprobs", "offsets", "prompt_logprobs")

    def __init__(self, first: ChoiceUpdate) -> None:
        self.choice = first.choice
        self.prompt_logprobs = first.prompt_logprobs
        self.logprobs = bytearray()
        self.offsets: list[int] = []  # for each token: where it begins in the choice's text
        self._ids: list[int] = []
        self._text = io.StringIO()
        self.add(first)

    def add(self, update: ChoiceUpdate) -> None:
        self._text.write(update.text)
        self._ids += update.token_ids
        self.offsets += update.offsets
        if update.logprobs:
            self.logprobs += update.logprobs
        self._last = update

    @property
    def text(self) -> str:
        return self._text.getvalue()

    @property
    def tokens(self) -> int:
        return self._last.tokens

    @property
    def ids(self) -> list[int]:
        return self._ids[: self.tokens]

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._last.finish_reason

    @property
    def stopped(self) -> str | None:
        """The stop string that ended it."""
        return self._last.stopped


class Codec(Protocol):
    """Encodes the output of one call as one wire's bytes. A codec that is derived from it has a stream of events."""

    stream_type: bytes = STREAM_TYPE  # content type of a stream
    heartbeat: bytes = HEARTBEAT  # what clients of the wire skip: it is sent while a stream has nothing else to send

    def opening(self, usage: Usage) -> bytes:
        """The bytes that start a stream. `usage` holds the counts so far."""
        return b""

    def chunk(self, update: ChoiceUpdate, usage: Usage) -> bytes:
        """An update as events, or nothing if the wire does not send it. `usage` holds the counts so far."""

    def closing(self, usage: Usage) -> bytes:
        """The bytes that end a stream."""
        return b""

    def failure(self, error: APIError) -> bytes:
        """The bytes that end a stream that failed after it began."""

    def whole(self, answers: list[CollectedChoice], usage: Usage) -> bytes:
        """The whole answer, with the choices in order."""


# Stores a complete answer. Takes the bytes that end it, and returns those to send: they may say that it is not stored.
Keep = Callable[[bytes], Awaitable[bytes]]


async def stream(
    generation: Updates,
    codec: Codec,
    send: Send,
    retry_after: int,
    keep: Keep | None = None,
    more: Mapping[str, str] = MappingProxyType({}),
    silent: float | None = None,
) -> None:
    """Sends each update as events. `keep` is awaited before the end of a complete answer is sent. `more` are headers.

    The response starts with the first update, or after `silent` seconds (None: SILENT_SECONDS). Errors before it are
    raised, so that the answer has an error status. Later errors become the wire's error event.
    """
    headers: Headers = [
        (b"content-type", codec.stream_type),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # a proxy must not buffer events
        *((name.encode(), value.encode()) for name, value in more.items()),
    ]
    updates = generation.updates()
    async with (
        aclosing(updates),
        StreamedResponse(send, headers, lambda: codec.opening(generation.usage), codec.heartbeat, silent) as response,
    ):
        try:
            first = await anext(updates)
            await response.start(partial(_chunk, codec, first, generation.usage))
        except Exception as error:
            if not await response.is_started():
                raise
            end = _failure(error, generation, codec, retry_after)
        else:
            end = await _send_rest(updates, generation, codec, response, retry_after, keep)
    await send({"type": "http.response.body", "body": end})


def _failure(error: Exception, generation: Updates, codec: Codec, retry_after: int) -> bytes:
    """The bytes that end a stream that failed after it began."""
    failure = as_api_error(error, retry_after)
    if failure.code == INTERNAL_ERROR:
        _log.error("a stream failed", exc_info=error, extra={"fields": {"request_id": generation.request_id}})
    return codec.failure(failure)


async def _chunk(codec: Codec, update: ChoiceUpdate, usage: Usage) -> bytes:
    """Encodes an update that may hold the prompt's logprobs, which are many."""
    return await offload_if_large(partial(codec.chunk, update, usage), len(update.prompt_logprobs))


async def collect(
    generation: Updates, codec: Codec, keep: Keep | None = None, unread: HeldBytes | None = None
) -> bytes:
    """Returns one answer once every choice is complete, and `keep` is. `unread` counts its bytes as it grows.

    Raises what the generation raises, and APIError 429 if too many bytes of answers are held.
    """
    answers: dict[int, CollectedChoice] = {}
    updates = generation.updates(_GATHERED)
    async with aclosing(updates):
        async for update in updates:
            if unread is not None:
                unread.add_made(len(update.text) + len(update.logprobs) * _JSON_OF_PACKED)
            answer = answers.get(update.choice)
            if answer is None:
                answers[update.choice] = CollectedChoice(update)
            else:
                answer.add(update)
    ordered = [answers[choice] for choice in sorted(answers)]
    size = sum(len(answer.logprobs) + len(answer.prompt_logprobs) for answer in ordered)
    whole = await offload_if_large(partial(codec.whole, ordered, generation.usage), size)
    return whole if keep is None else await keep(whole)


async def _send_rest(
    updates: AsyncGenerator[ChoiceUpdate, None],
    generation: Updates,
    codec: Codec,
    response: StreamedResponse,
    retry_after: int,
    keep: Keep | None,
) -> bytes:
    """Sends every update after the first. Returns the bytes that end the stream."""
    encode, usage = codec.chunk, generation.usage
    try:
        async for update in updates:
            data = await _chunk(codec, update, usage) if update.prompt_logprobs else encode(update, usage)
            if data:
                await response.write(data)
    except Exception as error:
        return _failure(error, generation, codec, retry_after)
    end = codec.closing(usage)
    return end if keep is None else await keep(end)
