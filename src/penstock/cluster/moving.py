"""A request of a fleet's client: where it is, and what another engine needs to go on with it."""

import asyncio
from typing import TYPE_CHECKING

from msgspec.structs import replace

from penstock.messages import ComputeUsage, GenerateRequest, Stream, TokenDelta

if TYPE_CHECKING:
    from penstock.cluster.replica import Replica


class StreamPart:
    """A request as one engine has it. After a move there is one for each unfinished choice."""

    __slots__ = ("answered", "owner", "replica", "sent_at", "stream", "tokens", "uncached")

    def __init__(
        self, owner: "MovingStream", replica: "Replica", stream: Stream, tokens: int, uncached: int, now: float
    ) -> None:
        """`stream` is the engine's. `tokens` are those of the prompt and the output so far."""
        self.owner, self.replica, self.stream = owner, replica, stream
        self.tokens, self.uncached = tokens, uncached
        self.sent_at = now
        self.answered = False  # a token has come from this engine

    @property
    def name(self) -> str:
        """The request's id at the engine."""
        return self.stream.request.request_id

    def has(self, choice: int) -> bool:
        request = self.stream.request
        return request.first_choice <= choice < request.first_choice + request.n


class MovingStream:
    """A request and its output so far. `record` has both; its requests go on from there on any engine of the pool."""

    def __init__(self, request: GenerateRequest, gather: int) -> None:
        self.request, self.gather = request, gather
        self.record = Stream(request)
        self.record.notify = self.wake
        self.parts: list[StreamPart] = []  # none while it is held
        self.prefill: StreamPart | None = None  # its prompt at the engine that computes it for another
        self.cached_there: int | None = None  # prompt tokens that were cached at the engine that computed it
        self.used_there: ComputeUsage | None = None  # by that engine, until it is counted
        self.pool = ""  # of the engine that has sent its tokens
        self.moves = 0
        self.crashes = 0  # engines that ended while they computed its prompt, one after the other
        self.excluded: set[str] = set()  # engines that have refused or failed it; cleared when another has begun it
        self.keys: dict[tuple[int, str], list[bytes]] = {}  # of its blocks, by block size and weights
        self.cached: dict[str, int] = {}  # tokens that each engine probably had when it was placed last
        self.held_since = 0.0
        self.why_held = ""
        self._woken: asyncio.Future[None] | None = None  # while `read` blocks

    @property
    def over(self) -> bool:
        """True when nothing more will come."""
        return self.record.complete or self.record.error is not None

    @property
    def on_trial(self) -> bool:
        """True while an engine computes its prompt, and one has ended doing so."""
        return self.crashes > 0 and bool(self.parts) and not any(part.answered for part in self.parts)

    async def read(self) -> list[TokenDelta]:
        """Return new deltas merged per choice, none at the end. Raises the stream's error. See engine.streams."""
        record = self.record
        while True:
            self.collect()
            if record.unread:
                return record.take()
            if record.error is not None:
                raise record.error
            if record.complete:
                return []
            self._woken = asyncio.get_running_loop().create_future()
            await self._woken

    def collect(self) -> None:
        """Take what the engines have sent."""
        record, name = self.record, self.request.request_id
        for part in self.parts:
            if part.stream.unread:
                for delta in part.stream.take():
                    timing = delta.timing
                    if timing is not None:
                        usage = timing.usage
                        if usage is not None and self.used_there is not None:
                            usage, self.used_there = usage + self.used_there, None
                        timing = replace(timing, engine=part.replica.name, moves=self.moves, usage=usage)
                    if self.cached_there is not None and delta.cached_tokens > self.cached_there:
                        delta = replace(delta, cached_tokens=self.cached_there)
                    record.push(replace(delta, request_id=name, timing=timing))

    def wake(self) -> None:
        woken = self._woken
        if woken is not None and not woken.done():
            woken.set_result(None)
