"""Finds the engine for a request of a fleet's client, and sends it there."""

import math
import struct
from collections.abc import Callable, Mapping
from functools import partial

from msgspec.structs import replace

from penstock.cluster.costs import FleetView
from penstock.cluster.index import BlockIndex
from penstock.cluster.moving import MovingStream, StreamPart
from penstock.cluster.replica import Replica
from penstock.cluster.route import Route, RouteChoice
from penstock.cluster.view import RouteRequest
from penstock.messages import (
    BlockKeys,
    Clock,
    EngineError,
    GenerateRequest,
    PagesAt,
    QueueFull,
    RequestRejected,
    SamplingParams,
)

LOOK_SECONDS = 0.05  # between two pictures of the statistics; engines send them as often

Kind = tuple[int, str]  # block size and weights, on which the keys of blocks depend


class Placing:
    """Chooses among the replicas of a fleet with a policy, by what they are expected to have cached."""

    def __init__(
        self,
        replicas: Mapping[str, Replica],
        route: Route,
        news: Callable[[MovingStream, StreamPart], None],
        clock: Clock,
        *,
        front: str,
        seed: int,
        move_anywhere: bool,
    ) -> None:
        """`news` is called when an engine has sent something for a part. `front` begins the ids of requests at engines,
        which several fronts share. With `move_anywhere`, a request goes on with other weights or numerics rather than
        wait."""
        self.index = BlockIndex()
        self._replicas, self._route, self._news, self._clock = replicas, route, news, clock
        self._front, self._move_anywhere = front, move_anywhere
        self._turn = seed
        self._sent = 0  # requests sent to engines
        self._chains: dict[Kind, BlockKeys] = {}
        self._kinds: set[Kind] = set()  # of the engines
        self._view, self._viewed_at = FleetView(), -math.inf
        self._viewed: tuple[Replica, ...] = ()  # the engines in `_view`

    def choose(self, stream: MovingStream) -> RouteChoice:
        """Return the engines that may get a request, the best first."""
        now, record = self._clock(), stream.record
        view = self._look(now)
        stream.cached = self._cached(stream, now) if len(view.replicas) > 1 else {}
        request = RouteRequest(
            prompt_tokens=len(stream.request.prompt_ids) + record.longest_output,
            max_tokens=stream.request.sampling.max_tokens or 0,
            cached=stream.cached,
            pool=stream.pool if record.has_tokens else "",
            regions=stream.request.regions,
            reads_pages=stream.request.sampling.prompt_logprobs is None and stream.request.pooling is None,
            excluded=frozenset(stream.excluded),
        )
        self._turn += 1
        choice = self._route(view, request, self._turn)
        if not choice.replicas and request.pool and self._move_anywhere:
            choice = self._route(view, replace(request, pool=""), self._turn)
        if not choice.replicas and stream.excluded:  # rather an engine that has failed it than none
            stream.excluded.clear()
            choice = self._route(view, replace(request, excluded=frozenset()), self._turn)
        return choice

    def place(self, stream: MovingStream) -> QueueFull | None:
        """Send a request to the best engine that takes it, if there is one: then it has `parts`. Returns the refusal if
        only full queues are in the way. Raises RequestRejected for a request that no engine can take."""
        choice = self.choose(stream)
        stream.why_held = choice.reason
        if choice.too_large and not stream.record.has_tokens:
            raise RequestRejected(choice.reason)
        refusal: QueueFull | None = None
        for name in choice.replicas:
            try:
                self._send(stream, self._replicas[name], choice)
            except QueueFull as error:
                if refusal is None or error.retry_after < refusal.retry_after:
                    refusal = error
            except EngineError as error:
                stream.why_held = f"{name}: {error}"
            else:
                return None
        return refusal

    def _send(self, stream: MovingStream, replica: Replica, choice: RouteChoice) -> None:
        """Open a request, or what is left of it, on one engine. Raises what that raises, and then nothing is open."""
        now, record = self._clock(), stream.record
        cached = stream.cached.get(replica.name, 0)
        parts: list[StreamPart] = []
        requests = record.requests()
        pages = self._pages(stream, requests[0], replica, choice) if choice.source and requests else None
        if stream.prefill is not None:
            cached = stream.prefill.tokens
        try:
            for request in requests:
                inner = replica.engine.open(replace(request, request_id=self._name(request), pages=pages))
                tokens = len(request.prompt_ids) + len(request.output_ids)
                uncached = 1 if parts else max(tokens - cached, 1)  # other choices share the prompt
                parts.append(StreamPart(stream, replica, inner, tokens, uncached, now))
        except BaseException:
            record.sent = False
            for part in parts:
                replica.engine.release(part.stream)
            leave_prefill(stream)
            raise
        self.index.book(replica.name, stream.keys.get(_kind(replica), []), now)
        stream.parts, stream.pool = parts, replica.engine.info.identity.fingerprint
        for part in parts:
            replica.sent(part, now)
            part.stream.gather = stream.gather
            part.stream.notify = partial(self._news, stream, part)
        for part in parts:
            if part.stream.error is not None or part.stream.unread:
                self._news(stream, part)

    def _name(self, request: GenerateRequest) -> str:
        """Return an id for a request at an engine."""
        self._sent += 1
        return f"{self._front}.{self._sent}/{request.request_id}"

    def _pages(
        self, stream: MovingStream, request: GenerateRequest, replica: Replica, choice: RouteChoice
    ) -> PagesAt | None:
        """Return where `replica` reads KV blocks of a request. If they must be computed there, begin that: a failure of
        it costs time, since the replica then computes them."""
        source = self._replicas.get(choice.source)
        if source is None or source is replica or not source.page_address:
            return None
        if not choice.computes:
            return PagesAt(source.page_address, "")
        size = replica.engine.info.block_size
        tokens = [*request.prompt_ids, *request.output_ids]
        prompt = tuple(tokens[: len(tokens) // size * size])
        name, now = self._name(request), self._clock()
        asked = replace(
            request,
            request_id=name,
            prompt_ids=prompt,
            output_ids=(),
            sampling=SamplingParams(max_tokens=1, temperature=0.0, seed=0),
            grammar=None,
            n=1,
            first_choice=0,
        )
        try:
            inner = source.engine.open(asked)
        except (RequestRejected, EngineError):
            return None
        has = stream.cached.get(source.name, 0)
        part = StreamPart(stream, source, inner, len(prompt), max(len(prompt) - has, 1), now)
        stream.prefill, stream.cached_there = part, has
        inner.notify = partial(self._prefill_news, stream, part)
        source.sent(part, now)
        self.index.book(source.name, stream.keys.get(_kind(source), []), now)
        return PagesAt(source.page_address, name)

    def _prefill_news(self, stream: MovingStream, part: StreamPart) -> None:
        """Run when an engine has begun or computed a prompt for another, or has failed to."""
        if part.stream.begun:
            part.replica.begun(part, self._clock())
        for delta in part.stream.take():
            stream.cached_there = delta.cached_tokens
            if delta.timing is not None:
                stream.used_there = delta.timing.usage
        if stream.prefill is part and (part.stream.complete or part.stream.error is not None):
            leave_prefill(stream)

    def _look(self, now: float) -> FleetView:
        """Return what is known of the engines. Statistics are taken once in LOOK_SECONDS; what this front has sent, and
        states that change, count at once."""
        replicas = tuple(self._replicas.values())
        if replicas != self._viewed or now - self._viewed_at >= LOOK_SECONDS:
            self._viewed, self._viewed_at = replicas, now
            self._view = FleetView.of([replica.view(now) for replica in replicas])
            self._kinds = set(map(_kind, replicas))
        elif changed := [place for place, replica in enumerate(replicas) if replica.changed_since_view]:
            self._view = self._view.changed((place, replicas[place].view(now)) for place in changed)
        return self._view

    def _cached(self, stream: MovingStream, now: float) -> dict[str, int]:
        """Return how many tokens of a request each engine's prefix cache probably has."""
        found = {}
        for kind in self._kinds:
            for name, blocks in self.index.match(self._keys(stream, kind), now).items():
                found[name] = blocks * kind[0]
        return found

    def _keys(self, stream: MovingStream, kind: Kind) -> list[bytes]:
        """Return the keys of a prompt's blocks, which are computed once."""
        keys = stream.keys.get(kind)
        if keys is None:
            keys = stream.keys[kind] = []
            chain = self._chains.get(kind)
            if chain is None:
                chain = self._chains[kind] = BlockKeys(*kind)
            tokens = stream.request.prompt_ids
            try:
                chain.extend(keys, chain.root(stream.request.cache_salt), tokens, len(tokens) // kind[0])
            except (struct.error, TypeError, ValueError):
                keys.clear()  # the engine will refuse the request, and say why
        return keys


def leave(part: StreamPart) -> None:
    """End a request at its engine."""
    part.stream.notify = _nothing
    part.replica.engine.release(part.stream)
    if not part.answered:
        part.replica.answered(part)
    part.replica.left(part)


def leave_prefill(stream: MovingStream) -> None:
    """End the request that computes a prompt for another engine, if there is one."""
    part, stream.prefill = stream.prefill, None
    if part is not None:
        leave(part)


def _nothing() -> None:
    """The stream has left its engine."""


def _kind(replica: Replica) -> Kind:
    info = replica.engine.info
    return info.block_size, info.identity.weights
