"""Keeps as many engines as the load needs: observes a fleet, decides, and lets a provider start and drain engines."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.cluster.client import FleetClient
from penstock.cluster.load import LoadMeter
from penstock.cluster.place import PlacedEngine, Placement, PlacementError, reconcile
from penstock.cluster.scale import Observation, ScalePolicy, ScaleState, decide
from penstock.messages import Clock

LOOK_SECONDS = 1.0  # between decisions, unless a provider reports a change
START_SECONDS = 60.0  # assumed until an engine was seen to start
MOST_DECISIONS = 64  # that are kept

log = logging.getLogger(__name__)


class TakenDecision(NamedTuple):
    """A decision that changed the number of engines."""

    at: float  # seconds since the epoch
    wanted: int
    reason: str


class Autoscaler:
    """Runs `scale.decide` on what a fleet measures."""

    def __init__(
        self,
        fleet: FleetClient,
        placement: Placement,
        policy: ScalePolicy,
        *,
        held: Callable[[], int] = lambda: 0,
        wall: Clock = time.time,
    ) -> None:
        """`held` returns the requests that wait at other servers. `wall` returns seconds since the epoch, because
        forecasts know the hours of a day."""
        self._fleet, self._placement, self._policy = fleet, placement, policy
        self._held, self._wall = held, wall
        self._meter = LoadMeter()
        self._state: ScaleState | None = None  # until the first decision
        self._engines: Sequence[PlacedEngine] = ()
        self._start_seconds = START_SECONDS
        self._trouble = ""
        self.decisions: deque[TakenDecision] = deque(maxlen=MOST_DECISIONS)

    @property
    def wanted(self) -> int:
        """How many engines there should be."""
        return self._state.wanted if self._state else 0

    async def run(self) -> None:
        """Go on until cancelled."""
        while True:
            await self.step()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._placement.changed()
                    await asyncio.sleep(LOOK_SECONDS / 4)  # changes come together

    async def step(self) -> None:
        """Decide once, and order what the decision needs. A provider that cannot be reached is logged."""
        try:
            engines = await self._placement.engines()
            self._note_starts(engines)
            wanted = self._decide(engines)
            self._fleet.expect(wanted)
            await reconcile(self._placement, engines, wanted)
            self._trouble = ""
        except PlacementError as error:
            if str(error) != self._trouble:  # once for each reason
                self._trouble = str(error)
                log.error("engines cannot be started or ended now: %s", error)

    def _decide(self, engines: Sequence[PlacedEngine]) -> int:
        fleet = self._fleet
        seen = Observation(
            at=self._wall(),
            ready=sum(replica.status == "ready" for replica in fleet.replicas),
            held=fleet.held + self._held(),
            start_seconds=self._start_seconds,
            **self._meter.measure(fleet.replicas, fleet.clock())._asdict(),
        )
        state = self._state
        if state is None:  # what another process has left stays until the load is known
            count = sum(engine.status != "draining" for engine in engines)
            state = ScaleState(wanted=count, used_at=seen.at - (0.0 if count else self._policy.idle))
        decision = decide(seen, state, self._policy)
        if self._state is None or decision.wanted != state.wanted:
            self.decisions.append(TakenDecision(seen.at, decision.wanted, decision.reason))
            log.info("%d engines are wanted, %d serve: %s", decision.wanted, seen.ready, decision.reason)
        self._state = decision.state
        return decision.wanted

    def _note_starts(self, engines: Sequence[PlacedEngine]) -> None:
        """Measure how long engines take to start: the longest of late counts."""
        began = {one.name: one.seconds for one in self._engines if one.status == "starting"}
        for one in engines:
            if one.status == "ready" and one.name in began:
                took = began[one.name] + LOOK_SECONDS
                self._start_seconds = max(took, (self._start_seconds + took) / 2)
        self._engines = engines
