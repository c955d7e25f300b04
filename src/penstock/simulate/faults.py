"""What goes wrong in a simulation, and when. Replicas are named, or a group is, or "any" for one chosen by chance."""

import random
from collections.abc import Mapping

import msgspec

from penstock.simulate.clock import NANO
from penstock.simulate.replica import SimulatedReplica
from penstock.simulate.simulation import Simulation


class _Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", kw_only=True):
    at: float = 0.0  # seconds

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float) and not 0 <= value <= 1e9:
                raise ValueError(f"{name} {value}: give seconds, or a factor, from 0 to 1e9")


class Kill(_Fault, frozen=True, tag="kill", kw_only=True):
    """A replica ends. Its requests go elsewhere after `detect` seconds. Another one is started in its place."""

    replica: str = "any"
    detect: float = 0.1
    restart: bool = True


class Hang(_Fault, frozen=True, tag="hang", kw_only=True):
    """A replica takes requests and makes no step. It is found and ended after `detect` seconds."""

    replica: str = "any"
    detect: float = 30.0


class Slow(_Fault, frozen=True, tag="slow", kw_only=True):
    """The steps of a replica take `factor` times as long, for `seconds`."""

    replica: str = "any"
    factor: float = 5.0
    seconds: float = 60.0


class Cut(_Fault, frozen=True, tag="cut", kw_only=True):
    """A region cannot be reached for `seconds`. Requests there go elsewhere after `detect` seconds."""

    region: str
    seconds: float = 60.0
    detect: float = 2.0


class Spot(_Fault, frozen=True, tag="spot", kw_only=True):
    """The cloud takes back each replica of a group, every `every` seconds on average, `notice` seconds after it says
    so. The replica gets no new requests meanwhile, and what is left of its requests goes elsewhere. Another one is
    started when it has gone."""

    group: str
    every: float
    notice: float = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every < 1.0:
            raise ValueError(f"every {self.every}: give 1 second or more")


Fault = Kill | Hang | Slow | Cut | Spot


class Faults:
    """Schedules faults in a simulation, and executes them."""

    def __init__(
        self, simulation: Simulation, groups: Mapping[str, list[str]], regions: set[str], seed: int, duration: float
    ) -> None:
        """`groups`: the names of each group's replicas."""
        self._simulation, self._groups, self._regions, self._duration = simulation, groups, regions, duration
        self._chance = random.Random(f"{seed}/faults")

    def schedule(self, name: str, fault: Fault) -> None:
        """Schedules one fault. Raises ValueError for a group, region or replica that does not exist."""
        simulation = self._simulation
        match fault:
            case Cut():
                target, known = fault.region, self._regions
            case Spot():
                target, known = fault.group, set(self._groups)
            case _:
                target = fault.replica
                known = {"any", *self._groups, *(replica for group in self._groups.values() for replica in group)}
        if target not in known:
            raise ValueError(
                f"the fault {name!r} concerns {target!r}, which does not exist: name one of {sorted(known)}"
            )
        begin = round(fault.at * NANO)
        match fault:
            case Kill():
                simulation.at(begin, self._kill, fault)
            case Hang():
                simulation.at(begin, self._hang, fault)
            case Slow():
                simulation.at(begin, self._slow, fault)
            case Cut():
                simulation.at(begin, self._cut, fault)
            case Spot():
                for replica in self._groups[fault.group]:
                    simulation.at(begin + self._until_notice(fault), self._notice, fault, replica)

    def _ready(self, target: str) -> list[SimulatedReplica]:
        """Returns the replicas of a target that are ready; of "any" and of a group, one."""
        replicas = self._simulation.replicas
        names = [target] if target in replicas else self._groups.get(target, list(replicas))
        able = [replicas[name] for name in names if name in replicas and replicas[name].state == "ready"]
        return [self._chance.choice(able)] if able else []

    def _kill(self, fault: Kill) -> None:
        for replica in self._ready(fault.replica):
            moved = self._simulation.end(replica.name, moves_after=fault.detect)
            self._simulation.say(f"{replica.name} ends with {len(moved)} requests")
            if fault.restart:
                self._simulation.start(replica.name)

    def _hang(self, fault: Hang) -> None:
        for replica in self._ready(fault.replica):
            replica.stalled = True
            self._simulation.say(f"{replica.name} makes no further step")
            self._simulation.later(fault.detect, self._found, replica)

    def _found(self, replica: SimulatedReplica) -> None:
        if replica.state == "ready":
            moved = self._simulation.end(replica.name)
            self._simulation.say(f"{replica.name} is found to hang with {len(moved)} requests, and started again")
            self._simulation.start(replica.name)

    def _slow(self, fault: Slow) -> None:
        for replica in self._ready(fault.replica):
            replica.slowdown = fault.factor
            self._simulation.say(f"{replica.name} takes {fault.factor:g} times as long")
            self._simulation.later(fault.seconds, self._cure, replica)

    def _cure(self, replica: SimulatedReplica) -> None:
        replica.slowdown = 1.0
        self._simulation.say(f"{replica.name} is as fast as before")

    def _cut(self, fault: Cut) -> None:
        there = [replica for replica in self._simulation.replicas.values() if replica.region == fault.region]
        lost = 0
        for replica in there:
            replica.reachable = False
            for request in list(replica.in_flight.values()):
                replica.abort(request)
                self._simulation.later(fault.detect, self._simulation.move, request)
                lost += 1
        self._simulation.say(f"region {fault.region} cannot be reached: {len(there)} replicas with {lost} requests")
        self._simulation.later(fault.seconds, self._heal, fault.region)

    def _heal(self, region: str) -> None:
        for replica in self._simulation.replicas.values():
            if replica.region == region:
                replica.reachable = True
        self._simulation.say(f"region {region} can be reached again")

    def _until_notice(self, fault: Spot) -> int:
        return round(self._chance.expovariate(1.0 / fault.every) * NANO)

    def _notice(self, fault: Spot, name: str) -> None:
        now = self._simulation.clock.ns
        if now >= self._duration * NANO:
            return
        replica = self._simulation.replicas.get(name)
        if replica is not None and replica.state == "ready":
            replica.state = "draining"
            self._simulation.say(f"{name} will be taken back, with {len(replica.in_flight)} requests")
            self._simulation.at(now + round(fault.notice * NANO), self._taken, name)
        self._simulation.at(now + self._until_notice(fault), self._notice, fault, name)

    def _taken(self, name: str) -> None:
        if name not in self._simulation.replicas:
            return  # it has ended by itself
        moved = self._simulation.end(name)
        self._simulation.say(f"{name} is taken back; {len(moved)} requests go on elsewhere")
        self._simulation.start(name)
