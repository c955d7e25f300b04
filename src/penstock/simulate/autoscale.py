"""The number of a group's replicas follows the load: by the production autoscaler, and by others to compare it with."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from penstock.cluster.scale import BUCKET, DAY, Observation, ScalePolicy, ScaleState, decide
from penstock.simulate.clock import NANO
from penstock.simulate.replica import SimulatedReplica
from penstock.simulate.simulation import Simulation

RATE_SECONDS = 60.0  # over which the load is averaged
# The horizontal autoscaler of Kubernetes, autoscaling/v2, with its defaults but no limit to how fast it goes up.
HPA_TOLERANCE = 0.1
HPA_STABILIZATION = 300.0  # seconds for which the highest recommendation counts

Rate = Callable[[float], float]  # second of the simulation -> tokens a second that are expected


class PolicySpec(ScalePolicy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of ScalePolicy. `most` is the group's `count`."""


class AutoscaleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An autoscaler of one group of replicas. It begins with `policy.least` of them, and one at least."""

    group: str
    capacity: float  # tokens a second that a replica computes within the targets, as measured
    scaler: Literal["penstock", "hpa", "oracle"] = "penstock"
    every: float = 15.0  # seconds between decisions
    yesterday: float = 0.0  # the load a day before, relative to today's; 0: there is no record of it
    policy: PolicySpec = PolicySpec()

    def __post_init__(self) -> None:
        for name, low, high in (("capacity", 1e-3, 1e9), ("every", 1.0, 3600.0), ("yesterday", 0.0, 100.0)):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} {getattr(self, name)}: give {low:g} to {high:g}")


class ReplicaScaler:
    """Decides every few seconds, and starts and drains replicas of a simulation."""

    def __init__(
        self, simulation: Simulation, spec: AutoscaleSpec, names: Sequence[str], start_seconds: float, expected: Rate
    ) -> None:
        """`names` of the group's replicas; `expected`: the mean of the load, which only the oracle and the record of
        yesterday know."""
        self._simulation, self._spec, self._names = simulation, spec, names
        self._policy = msgspec.structs.replace(spec.policy, most=len(names))
        self._start_seconds, self._expected = start_seconds, expected
        self._arrived: deque[tuple[float, int]] = deque([(0.0, 0)])  # tokens that had come by a time
        self._recommended: deque[tuple[float, int]] = deque()  # of the HPA
        self._state = ScaleState(buckets=self._record_of_yesterday())

    def begin(self) -> None:
        """Starts the first replicas, and schedules decisions."""
        for name in self._names[: max(self._policy.least + self._policy.standby, 1)]:
            self._simulation.start(name, 0.0)
        self._simulation.later(self._spec.every, self._tick)

    def _record_of_yesterday(self) -> dict[int, float]:
        share = self._spec.yesterday
        if not share:
            return {}
        points = [(each + 0.5) / 10 for each in range(10)]
        buckets = range(math.ceil(DAY / BUCKET))
        return {each: share * sum(self._expected(BUCKET * (each + point)) for point in points) / 10 for each in buckets}

    def _tick(self) -> None:
        now = self._simulation.clock.now
        present = [self._simulation.replicas[name] for name in self._names if name in self._simulation.replicas]
        for replica in present:
            if replica.state == "draining" and not replica.in_flight:
                self._simulation.end(replica.name)
        present = [replica for replica in present if replica.state != "dead"]
        serving = [replica for replica in present if replica.state != "draining"]
        seen = self._observed(now, serving)
        match self._spec.scaler:
            case "penstock":
                decision = decide(seen, self._state, self._policy)
                wanted, reason, self._state = decision.wanted, decision.reason, decision.state
            case "hpa":
                wanted, reason = self._hpa(seen, len(serving)), "HPA"
            case "oracle":
                wanted, reason = self._oracle(now), "oracle"
        self._scale(present, wanted, reason)
        self._simulation.later(self._spec.every, self._tick)

    def _observed(self, now: float, serving: Sequence[SimulatedReplica]) -> Observation:
        self._arrived.append((now, self._simulation.arrived_tokens))
        while self._arrived[1][0] <= now - RATE_SECONDS:
            self._arrived.popleft()
        before, tokens = self._arrived[0]
        ready = [replica for replica in serving if replica.state == "ready"]
        oldest = [next(iter(replica.waiting.values())).at / NANO for replica in ready if replica.waiting]
        return Observation(
            at=DAY + now,
            ready=len(ready),
            held=self._simulation.held,
            load=(self._simulation.arrived_tokens - tokens) / (now - before),
            capacity=self._spec.capacity,
            kv_usage=sum(each.scheduler.stats().kv_usage for each in ready) / len(ready) if ready else 0.0,
            wait=now - min(oldest) if oldest else 0.0,
            start_seconds=self._start_seconds,
        )

    def _hpa(self, seen: Observation, current: int) -> int:
        """desired = ceil(current * metric / target), where the metric is the load of a replica."""
        target = self._spec.capacity * self._policy.target_use
        ratio = (seen.load or 0.0) / (max(current, 1) * target)
        desired = current if abs(ratio - 1.0) <= HPA_TOLERANCE else math.ceil(current * ratio)
        self._recommended.append((seen.at, desired))
        while self._recommended[0][0] <= seen.at - HPA_STABILIZATION:
            self._recommended.popleft()
        highest = max(count for _, count in self._recommended)
        return min(max(desired, min(highest, current), self._policy.least), self._policy.most)

    def _oracle(self, now: float) -> int:
        """The least that suffices from now until a replica that is ordered at the next decision is ready."""
        until = now + self._start_seconds + 2 * self._spec.every
        load = max(self._expected(now + (until - now) * step / 20) for step in range(21))
        need = math.ceil(load / (self._spec.capacity * self._policy.target_use) - 1e-9)
        return min(max(need, self._policy.least), self._policy.most)

    def _scale(self, present: Sequence[SimulatedReplica], wanted: int, reason: str) -> None:
        """Starts replicas or takes them back, the newest first. One that drains serves again before another starts."""
        simulation = self._simulation
        serving = [replica for replica in present if replica.state != "draining"]
        if wanted == len(serving):
            return
        simulation.say(f"{self._spec.group}: {len(serving)} to {wanted} replicas: {reason}")
        for replica in present:
            if replica.state == "draining" and len(serving) < wanted:
                replica.state = "ready"
                serving.append(replica)
        missing = [name for name in self._names if name not in simulation.replicas]
        for name in missing[: max(wanted - len(serving), 0)]:
            simulation.start(name)
        # Those that are not ready end first, since they have nothing to finish.
        serving.sort(key=lambda replica: (replica.state != "starting", -self._names.index(replica.name)))
        for replica in serving[: max(len(serving) - wanted, 0)]:
            if replica.state == "starting":
                simulation.end(replica.name)
            else:
                replica.state = "draining"
