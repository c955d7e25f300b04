"""Classes of traffic, and the requests that they send: a function of a seed."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from penstock.simulate.clock import NANO
from penstock.simulate.traffic.arrivals import Arrivals, Closed, times
from penstock.simulate.traffic.lengths import Length, check_length, draw
from penstock.simulate.traffic.request import Runs, SimulatedRequest, TokenIds, TokenRun
from penstock.simulate.traffic.traces import TraceRow, read_trace

MAX_REQUESTS = 1_000_000  # of a simulation


class SessionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A conversation of `turns` requests. Each prompt begins with the one before and its answer. A user thinks for
    `think` seconds on average."""

    turns: int
    think: float = 10.0


class Shared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prompts begin with one of `groups` different system prompts of `tokens` tokens."""

    tokens: int
    groups: int = 1


class RecordedTrace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Recorded requests, `speed` times as fast, of which the first `requests` are used (0: all). Lengths are multiplied
    by `scale`."""

    file: str
    speed: float = 1.0
    requests: int = 0
    scale: float = 1.0


class TrafficSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A class of traffic, as a scenario has it."""

    name: str = "requests"
    arrivals: Arrivals | None = None
    prompt: Length = 128
    output: Length = 128
    shared: Shared | None = None
    session: SessionSpec | None = None
    trace: RecordedTrace | None = None
    model: str = ""
    models: int = 1  # more: a request is for one of MODEL-0, MODEL-1, ...; number k is 1/(k+1)**skew times as likely
    skew: float = 1.0
    tenant: str = ""
    weight: float = 1.0  # of the tenant's share, with `tenants` of the replicas
    regions: tuple[str, ...] = ()  # that its requests stay in; (): any
    priority: int = 0
    timeout: float = 0.0
    first_token_timeout: float = 0.0

    def __post_init__(self) -> None:
        check_length("prompt", self.prompt)
        check_length("output", self.output)
        if self.arrivals is None and self.trace is None:
            raise ValueError(f"the traffic {self.name!r} has neither arrivals nor a trace: give one of them")
        if self.trace is not None and not (self.trace.speed > 0 and self.trace.scale > 0):
            raise ValueError(f"speed {self.trace.speed} and scale {self.trace.scale}: give numbers above 0")
        if not 0 < self.weight <= 1000:
            raise ValueError(f"weight {self.weight}: give a number above 0, up to 1000")
        if not 1 <= self.models <= 1000:
            raise ValueError(f"models {self.models}: give 1 to 1000")
        if self.session is not None and not (1 <= self.session.turns <= 1000 and self.session.think >= 0):
            raise ValueError(f"a session of {self.session.turns} turns: give 1 to 1000, and think of 0 or more seconds")


@dataclass
class TrafficSource:
    """Makes the requests of one class. Each class has its own randomness, so another class changes none of it."""

    spec: TrafficSpec
    duration: float
    seed: int
    folder: Path  # of the scenario: a trace's path may be relative to it
    ids: TokenIds
    numbers: Iterator[int]
    _shared: list[Runs] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chance = random.Random(f"{self.seed}/{self.spec.name}")
        self._weights = [1.0 / (k + 1) ** self.spec.skew for k in range(self.spec.models)]
        if (shared := self.spec.shared) is not None:
            self._shared = [self.ids.run(shared.tokens) for _ in range(shared.groups)]

    def requests(self) -> Iterator[SimulatedRequest]:
        """Yields requests in order of time. Further turns, and those of closed loops, come from `after`."""
        spec = self.spec
        if spec.trace is not None:
            yield from self._recorded(spec.trace)
        elif spec.arrivals is not None:
            chance = random.Random(f"{self.seed}/{spec.name}/times")
            for user, at in enumerate(times(spec.arrivals, self.duration, chance)):
                yield self._first_turn(at, user)

    def after(self, request: SimulatedRequest, now: int) -> SimulatedRequest | None:
        """Returns the request that follows a completed one, if any: the next turn, or the next of a closed loop."""
        session, arrivals = self.spec.session, self.spec.arrivals
        if session is not None and request.turn < session.turns:
            at = now + self._pause(session.think)
            asked = self.ids.run(draw(self.spec.prompt, self._chance))
            said = (*request.prompt, TokenRun(request.token, request.output), *asked)
            return self._request(at, said, draw(self.spec.output, self._chance), request.turn + 1, request.user)
        if isinstance(arrivals, Closed):
            at = now + self._pause(arrivals.think)
            if at < self.duration * NANO:
                return self._first_turn(at / NANO, request.user)
        return None

    def _pause(self, mean: float) -> int:
        return round(self._chance.expovariate(1.0 / mean) * NANO) if mean > 0 else 0

    def _first_turn(self, at: float, user: int) -> SimulatedRequest:
        chance = self._chance
        shared = chance.choice(self._shared) if self._shared else ()
        prompt = (*shared, *self.ids.run(draw(self.spec.prompt, chance)))
        return self._request(round(at * NANO), prompt, draw(self.spec.output, chance), 1, user)

    def _recorded(self, trace: RecordedTrace) -> Iterator[SimulatedRequest]:
        rows = read_trace(self.folder / trace.file, self.ids)
        for row in rows[: trace.requests or len(rows)]:
            at = row.at / trace.speed
            if self.duration and at >= self.duration:
                return
            scaled = row if trace.scale == 1.0 else _scaled(row, trace.scale)
            yield self._request(round(at * NANO), scaled.prompt, scaled.output, 1, 0)

    def _request(self, at: int, prompt: Runs, output: int, turn: int, user: int) -> SimulatedRequest:
        spec = self.spec
        model = spec.model
        if spec.models > 1:
            model = f"{model}-{self._chance.choices(range(spec.models), self._weights)[0]}"
        return SimulatedRequest(
            next(self.numbers),
            at,
            prompt,
            output,
            self.ids.take(),
            spec.name,
            model,
            spec.priority,
            spec.tenant,
            spec.weight,
            spec.regions,
            spec.timeout,
            spec.first_token_timeout,
            turn,
            user,
        )


def _scaled(row: TraceRow, scale: float) -> TraceRow:
    prompt = tuple(TokenRun(run.token, max(round(run.length * scale), 1)) for run in row.prompt)
    return TraceRow(row.at, prompt, max(round(row.output * scale), 1))
