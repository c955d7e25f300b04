"""Sends requests to one provider: within its limits, again after a failure, and not at all while it is down."""

import asyncio
import itertools
import logging
import math
import random
import socket
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import aiohttp
import orjson

from penstock.frontend.errors import APIError, ProviderFailed, invalid
from penstock.frontend.providers.circuit import Circuit
from penstock.frontend.providers.event_stream import EventStream
from penstock.frontend.providers.file import ProviderEntry, is_private
from penstock.frontend.providers.wires.anthropic import AnthropicReader, AnthropicWire
from penstock.frontend.providers.wires.openai import OpenAIReader, OpenAIWire
from penstock.frontend.providers.wires.parts import UNREADABLE, AnswerPiece, Ending, Question, one_line, stream_broken
from penstock.messages import DeadlineExceeded, QueueFull

_log = logging.getLogger("penstock.providers")
MOST_ERROR_BYTES = 1 << 16  # of an error's body
_SHOWN = 400  # characters of an error
_LEAST_SECRET = 8  # characters: a shorter key is none, and could be a part of any word
CONNECT_SECONDS = 10.0
FIRST_DELAY = 0.25  # seconds before the second try; each later one is twice as long
MOST_RETRY_AFTER = 3600.0
_WIRES: dict[str, type[OpenAIWire | AnthropicWire]] = {"openai": OpenAIWire, "anthropic": AnthropicWire}
Reader = OpenAIReader | AnthropicReader
_REFUSED = (400, 404, 413, 422)  # the request is at fault
_KEY_REFUSED = (401, 402, 403)
_BUSY = (429, 529)  # 529: Anthropic's "overloaded"


class ProviderAnswer:
    """An answer that a provider streams."""

    reader: Reader | None = None  # of the latest try


class ProviderClient:
    """One provider. Used from one event loop."""

    def __init__(self, name: str, entry: ProviderEntry, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ValueError if there is no key."""
        self.name, self.entry = name, entry
        self.wire = _WIRES[entry.kind]()
        self.circuit = Circuit()
        self.open_requests = 0
        self.results: Counter[str] = Counter()  # tries by result
        self.cost: defaultdict[str, float] = defaultdict(float)  # of all answers, by model
        self._clock = clock
        self._key = entry.key()
        self._headers = {
            **self.wire.headers(self._key),
            "content-type": "application/json",
            "accept": "text/event-stream",
            "accept-encoding": "identity",
        }
        self._session: aiohttp.ClientSession | None = None

    @property
    def up(self) -> bool:
        """True if a request may be sent now."""
        return self.circuit.allows(self._clock()) and self.open_requests < self.entry.concurrent

    def check(self) -> None:
        """Raises QueueFull if the provider has as many requests as it may have, and ProviderFailed while it is down."""
        now, entry, shown = self._clock(), self.entry, f"provider {self.name!r}"
        if not self.circuit.allows(now):
            wait = int(self.circuit.wait(now)) + 1
            message = f"{shown} fails or refuses requests, and gets none for {wait} s; send it again after that"
            raise ProviderFailed(503, message, "provider_down", retry_after=wait)
        if self.open_requests >= entry.concurrent:
            message = f"{self.open_requests} requests are at {shown}; the limit is {entry.concurrent} (concurrent)"
            raise QueueFull(f"{message}: send it again later", 1)

    async def ask(
        self, question: Question, body: bytes, answer: ProviderAnswer
    ) -> AsyncGenerator[list[AnswerPiece | Ending], None]:
        """Yields what the stream of an answer says, as it arrives, until the provider has said that it is complete.
        `body` is the question in the provider's API.

        A request that fails before its first piece is sent again, within the limits of the provider's entry. Raises
        QueueFull, ProviderFailed, and APIError 400 for a request that the provider refuses.
        """
        self.check()
        stop = min(self._clock() + self.entry.retry_seconds, question.deadline, question.first_deadline)
        self.open_requests += 1
        try:
            for tries in itertools.count():
                begun = False
                answer.reader = reader = self.wire.reader()
                try:
                    async with aclosing(self._once(question, body, reader)) as pieces:
                        async for found in pieces:
                            begun = True
                            yield found
                    return
                except ProviderFailed as error:
                    if begun or not await self._waits(error, tries, stop):
                        raise
        finally:
            self.open_requests -= 1

    async def close(self) -> None:
        """Ends all connections."""
        if self._session is not None:
            await self._session.close()

    async def _waits(self, error: ProviderFailed, tries: int, stop: float) -> bool:
        """Waits until the request may be sent again. Returns False if it must not be."""
        if tries >= self.entry.retries or error.code == "provider_key_refused":
            return False
        delay = max(FIRST_DELAY * 2**tries * random.uniform(0.5, 1.0), float(error.retry_after or 0))
        if self._clock() + delay > stop:
            return False
        await asyncio.sleep(delay)
        self.results["retried"] += 1
        return self.circuit.allows(self._clock())

    async def _once(
        self, question: Question, body: bytes, reader: Reader
    ) -> AsyncGenerator[list[AnswerPiece | Ending], None]:
        """Sends a request once. See `ask`."""
        self.circuit.begin()
        result = ""
        try:
            async with aclosing(self._events(question, body, reader)) as pieces:
                async for found in pieces:
                    yield found
            result = "ok"
        except APIError as error:
            result = error.code or "failed"
            error.message = self._shown(error.message)
            error.args = (error.message,)
            raise
        except TimeoutError:
            if self._clock() >= min(question.deadline, question.first_deadline):
                raise DeadlineExceeded("the provider did not answer within the request's timeout") from None
            result = "provider_timeout"
            message = f"provider {self.name!r} did not answer in time; send the request again"
            raise ProviderFailed(504, message, result) from None
        except (aiohttp.ClientError, OSError) as error:
            result = "provider_connection_failed"
            message = (
                f"the connection to provider {self.name!r} failed ({type(error).__name__}); send the request again"
            )
            raise ProviderFailed(502, message, result) from error
        finally:
            self._note(result)

    def _shown(self, message: str) -> str:
        """Shortens a message that has a provider's words, and takes out the key, which some providers repeat."""
        if len(self._key) >= _LEAST_SECRET:
            message = message.replace(self._key, "(key)")
        return message if len(message) <= _SHOWN else f"{message[:_SHOWN]}..."

    def _note(self, result: str) -> None:
        """Tells the circuit how a try has ended; "": the client has gone."""
        self.results[result or "aborted"] += 1
        if not result:
            self.circuit.gave_up()
        elif result in ("ok", "provider_refused"):
            self.circuit.succeeded()
        elif result != "provider_busy":  # which has said when it takes requests again
            self.circuit.failed(self._clock())
            _log.warning("provider %s: %s", self.name, result)

    async def _events(
        self, question: Question, body: bytes, reader: Reader
    ) -> AsyncGenerator[list[AnswerPiece | Ending], None]:
        entry, events, now = self.entry, EventStream(), self._clock
        end = min(now() + entry.timeout, question.deadline)
        due = min(now() + entry.first_token_timeout, question.first_deadline)
        # A timeout must not go on while the consumer has the pieces, so each step has one of its own.
        async with asyncio.timeout(min(end, due) - now()):
            url = f"{entry.base_url}{self.wire.path(question)}"
            response = await self._http().post(url, data=body, headers=self._headers, allow_redirects=False)
        async with response:
            if response.status != 200 or response.content_type != "text/event-stream":
                async with asyncio.timeout(CONNECT_SECONDS):
                    raise await self._failure(response)
            while not reader.complete:
                async with asyncio.timeout(min(end, due) - now()):
                    chunk = await response.content.readany()
                if not chunk:
                    raise stream_broken("ended before the answer was complete")
                try:
                    found = [piece for data in events.push(chunk) for piece in reader.read(data)]
                except UNREADABLE as error:
                    raise stream_broken(f"has an event that cannot be read ({error})") from None
                if found:
                    yield found
                    due = now() + entry.idle_timeout

    async def _failure(self, response: aiohttp.ClientResponse) -> APIError:
        """The error for an answer that is not a stream. What a provider says of keys is for the operator, not for
        clients."""
        data, status, shown = await response.content.read(MOST_ERROR_BYTES), response.status, f"provider {self.name!r}"
        try:
            said = one_line(str(orjson.loads(data)["error"]["message"]))  # as both APIs have it
        except UNREADABLE:
            said = ""
        if status == 200:
            kind = response.content_type
            message = f"{shown} sent {kind} in the place of an event stream: {said or 'check its url and its kind'}"
            return ProviderFailed(502, message, "provider_stream_broken")
        if status in _REFUSED:
            return invalid(
                f"{shown} refused the request: {said or f'HTTP {status}; is its url right?'}", code="provider_refused"
            )
        if status in _KEY_REFUSED:
            _log.error("%s refuses the key or the account (HTTP %d): %s", shown, status, self._shown(said))
            return ProviderFailed(502, f"{shown} refuses this server's key; tell its operator", "provider_key_refused")
        wait = _retry_after(response.headers.get("retry-after", ""))
        if status in _BUSY:
            self.circuit.hold(self._clock() + (wait or 0))
            message = f"{shown} has too many requests (HTTP {status}): {said}; send it again later"
            return ProviderFailed(429, message, "provider_busy", retry_after=1 if wait is None else wait)
        message = f"{shown} failed (HTTP {status}): {said}; send the request again"
        return ProviderFailed(502, message, "provider_failed", retry_after=wait)

    def _http(self) -> aiohttp.ClientSession:
        """The connections to the provider. Proxies and credentials of the environment are not used."""
        if self._session is None:
            resolver = aiohttp.ThreadedResolver() if self.entry.private else _PublicResolver()
            connector = aiohttp.TCPConnector(limit=self.entry.concurrent, resolver=resolver)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
            jar = aiohttp.DummyCookieJar()
            # Compressed answers were not asked for. They are not expanded: a small one may become very large.
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=timeout, cookie_jar=jar, auto_decompress=False
            )
        return self._session


class _PublicResolver(aiohttp.ThreadedResolver):
    """Finds no private addresses, whatever a name resolves to."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[aiohttp.abc.ResolveResult]:
        public = [each for each in await super().resolve(host, port, family) if not is_private(each["host"])]
        if not public:
            raise OSError(f"{host} has only private addresses; set private: true in the providers file")
        return public


def _retry_after(text: str) -> int | None:
    """The seconds of a Retry-After header; None if it has none."""
    try:
        return math.ceil(min(max(float(text), 0.0), MOST_RETRY_AFTER))
    except ValueError:
        return None
