"""One engine of a fleet: its client, and what this front has sent there and measured."""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from penstock.cluster.rates import StepRates
from penstock.cluster.view import ReplicaStatus, ReplicaView
from penstock.messages import BlockChanges, EngineClient, EngineStats, GenerateRequest, Stream

if TYPE_CHECKING:
    from penstock.cluster.moving import StreamPart

STATS_SECONDS = 0.06  # for statistics of a step to arrive: what was sent less long before them is not in them
VIEW_SECONDS = 0.5  # after which a picture is made anew, if nothing has changed
HALF_LIFE = 300.0  # seconds in which `recent_tokens` halves
# Without a step for so long, while requests are there, an engine counts as hung. It is longer where steps are long.
LEAST_SILENCE = 3.0
LONGEST_STEPS = 10.0  # times the longest step lately
LARGEST_STEPS = 4.0  # times an estimate of the largest step
UNMEASURED_SILENCE = 30.0  # before any step was measured
ASSUMED_STEP_TOKENS = 2048


class FleetEngine(EngineClient, Protocol):
    """A client of one engine that gives its streams away, such as engine.client.StreamingClient."""

    @property
    def failure(self) -> str:
        """Why the engine has ended for good, or ""."""

    @property
    def round_trip(self) -> Callable[[], float]:
        """Returns the seconds to the engine's machine and back."""

    def open(self, request: GenerateRequest) -> Stream:
        """Send a request. The caller must `release` the stream. Raises what `generate` raises before its deltas."""

    def release(self, stream: Stream) -> None:
        """Forget a stream, and abort what is unfinished of it."""

    def on_change(self, call: Callable[[], None]) -> None:
        """Let `call` be called when `state` has changed."""

    def on_blocks(self, call: Callable[[BlockChanges], None]) -> None:
        """Let `call` get the reports of the prefix cache, which `WatchBlocks` asks for."""


class Replica:
    """An engine that the fleet may use."""

    def __init__(self, name: str, engine: FleetEngine, now: float, host: str = "127.0.0.1") -> None:
        """Other engines reach it at `host`."""
        self.name, self.engine, self._host = name, engine, host
        self.parts: dict[StreamPart, None] = {}  # requests of this front that are there, the oldest first
        self.leaves_at: float | None = None  # when its requests must have left; None: it is not draining
        self._drained_at: float | None = None  # the same, as this front has ordered it
        self.gone = asyncio.Event()  # set when it has ended for good, or cannot be reached
        self.hung = False  # it has made no step for too long
        self.incarnation = 0  # of the engine whose blocks are reported
        self.requests = 0  # sent so far
        self.moved = 0  # requests that had to leave
        self.cached_tokens = 0  # prompt tokens that the index expected there, of all requests sent
        self.prompt_tokens = 0
        self._rates = StepRates()
        self._stats: EngineStats | None = None  # the last that were seen
        self._stats_at = now
        self._sent: deque[StreamPart] = deque()  # that may be too new for the last statistics
        self._own: list[StreamPart] = []  # that may wait in the last statistics
        self._others = 0  # prompt tokens of other fronts that waited in the last statistics
        self._prefilling = 0  # uncached tokens of this front's requests that have no token yet
        self._computing: dict[StreamPart, float] = {}  # those of them that the engine has begun, and since when
        self._recent, self._recent_at = 0.0, now
        self._steps, self._steps_at = -1, now  # the last number of steps, and since when it is that
        self._view: ReplicaView | None = None  # None: something has changed
        self._viewed_at = now

    @property
    def status(self) -> ReplicaStatus:
        status = self.engine.state.status
        if self.engine.failure or status == "ended":
            return "gone"
        if status == "restarting":
            return "starting"
        if self.leaves_at is not None:
            return "draining"
        return "suspect" if self.hung else "ready"

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats()

    @property
    def page_address(self) -> str:
        """The address at which other engines read its KV blocks; "": they do not."""
        host, port = self._host, self.engine.info.page_port
        return "" if not port else f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def region(self) -> str:
        return self.engine.info.region

    @property
    def round_trip(self) -> float:
        return self.engine.round_trip()

    @property
    def open_requests(self) -> int:
        """Requests of this front that are there."""
        return len(self.parts)

    # -- what is sent there ---------------------------------------------------------------------------------------

    def sent(self, part: "StreamPart", now: float) -> None:
        """Count a request that was sent."""
        self.parts[part] = None
        self.requests += 1
        self.prompt_tokens += part.tokens
        self.cached_tokens += part.tokens - part.uncached
        self._prefilling += part.uncached
        self._sent.append(part)
        self._own.append(part)
        self._recent = self._faded(now) + part.uncached
        self._recent_at = now
        self._view = None

    def begun(self, part: "StreamPart", now: float) -> None:
        """Note that the engine computes a request that has no token yet."""
        self._computing[part] = now

    def answered(self, part: "StreamPart") -> None:
        """Note that a request has its first token, or has left without one."""
        self._prefilling -= part.uncached
        self._computing.pop(part, None)
        self._view = None

    def left(self, part: "StreamPart") -> None:
        """Note that a request has ended or has moved."""
        self.parts.pop(part, None)
        self._view = None

    def changed(self, now: float) -> None:
        """Call when the engine's state has changed."""
        self._view = None
        within = self.engine.state.leave_within
        if within is None:
            self.leaves_at = self._drained_at
        else:  # the grace of a drain may become shorter
            self.leaves_at = min(now + within, math.inf if self.leaves_at is None else self.leaves_at)

    def drain(self, grace: float, now: float) -> None:
        """Send no new requests. Those that are there may stay for `grace` seconds."""
        self._drained_at = now + grace
        self.changed(now)

    # -- what is known of it --------------------------------------------------------------------------------------

    @property
    def changed_since_view(self) -> bool:
        """True when requests were sent or have left, or the state has changed, since `view` was called."""
        return self._view is None

    def view(self, now: float) -> ReplicaView:
        """Return what is known of the engine."""
        old = self.engine.stats() is not self._stats or now - self._viewed_at > VIEW_SECONDS
        if self._view is None or old or self._computing:
            self.look(now)
            self._view, self._viewed_at = self._picture(now), now
        return self._view

    def look(self, now: float) -> None:
        """Take the engine's statistics."""
        stats = self.engine.stats()
        if stats is not self._stats:
            self._stats, self._stats_at, self._view = stats, now, None
            self._rates.observe(stats)
            # The engine counts whole prompts. Of its own ones, this front knows what is cached. Those that have begun
            # since the statistics before may wait in these.
            own = sum(part.stream.request.queued_tokens for part in self._own)
            self._others = max(stats.waiting_tokens - own, 0)
            self._own = [part for part in self._own if part in self.parts and not part.stream.begun]
            if stats.steps != self._steps:
                self._steps, self._steps_at, self.hung = stats.steps, now, False
        while self._sent and self._sent[0].sent_at < self._stats_at - STATS_SECONDS:
            self._sent.popleft()

    def silent(self, now: float) -> float:
        """Return for how many seconds the engine has made no step while requests of this front were in its batch; 0 if
        it may do so."""
        begun = [part for part in self.parts if part.stream.begun and not part.stream.complete]
        if not begun:
            self._steps_at = now
            return 0.0
        seconds = now - max(self._steps_at, min(part.sent_at for part in begun))
        return seconds if seconds >= self._longest_silence else 0.0

    @property
    def _step_tokens(self) -> int:
        return self.engine.info.max_step_tokens or ASSUMED_STEP_TOKENS

    @property
    def _longest_silence(self) -> float:
        rates = self._rates
        if not rates.longest:
            return UNMEASURED_SILENCE
        largest = self._step_tokens * rates.prefill_seconds
        return max(LEAST_SILENCE, LONGEST_STEPS * rates.longest, LARGEST_STEPS * largest)

    def _faded(self, now: float) -> float:
        return self._recent * math.exp2((self._recent_at - now) / HALF_LIFE)

    def _picture(self, now: float) -> ReplicaView:
        info, stats, rates = self.engine.info, self.engine.stats(), self._rates
        booked = [part.uncached for part in self._sent if part in self.parts and not part.answered]
        begun = sum([part.uncached for part in self._computing])
        # Statistics do not say how far a step has come.
        left = self._prefilling - rates.computed(begun, self._step_tokens, self._computing.values(), now)
        booked_tokens = min(sum(booked), left)
        blocks = min(info.num_blocks, default=1) - 1  # block 0 is the null page
        return ReplicaView(
            name=self.name,
            incarnation=info.incarnation,
            status=self.status,
            pool=info.identity.fingerprint,
            role=info.role,
            region=info.region,
            round_trip=self.round_trip,
            max_num_seqs=info.max_num_seqs,
            max_model_len=info.max_model_len,
            kv_tokens=max(blocks, 0) * info.block_size,
            running=stats.running,
            waiting=stats.waiting,
            backlog_tokens=self._others + left - booked_tokens,
            kv_usage=stats.kv_usage,
            stats_age=now - self._stats_at if stats.running or stats.waiting else 0.0,
            prefill_seconds=rates.prefill_seconds,
            step_seconds=rates.step_seconds,
            row_seconds=rates.row_seconds,
            measured=rates.trust,
            request_seconds=128 * (rates.step_seconds + rates.row_seconds * max(stats.running, 1)),
            booked_requests=len(booked),
            booked_tokens=booked_tokens,
            recent_tokens=self._faded(now),
        )
