"""Several engines on this machine (`penstock serve --replicas N`, or MIN:MAX): each has its share of the cores and the
memory."""

import asyncio
import os
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from penstock.cli.serving.shares import machine_share
from penstock.cluster.autoscaler import Autoscaler
from penstock.cluster.client import FleetClient
from penstock.cluster.place import PlacedEngine, PlacementError, PlaceStatus
from penstock.cluster.route import ROUTES
from penstock.cluster.scale import ScalePolicy
from penstock.config import ConfigError, Hardware
from penstock.config.engine import EngineConfig, PageAccess
from penstock.config.sizes import replica_limits
from penstock.engine.link.ipc import spawn
from penstock.messages import EngineClient, EngineError, EngineRole
from penstock.observe.fleet import FleetSeries
from penstock.observe.metrics import Metrics

if TYPE_CHECKING:
    from penstock.prepare.model import PreparedModel

IDLE_SECONDS = 900.0  # without a request, after which the last engine of 0:MAX ends
LOOK_SECONDS = 0.1  # between looks whether the last request has left an engine that drains


def share_of(hardware: Hardware, replicas: int) -> Hardware:
    """Returns what one of the replicas may use. Raises ConfigError if there is not a core for each."""
    if hardware.device == "cuda":
        raise ConfigError(
            f"--replicas is {replicas}, which is for processors; on GPUs start CUDA_VISIBLE_DEVICES=0 penstock engine "
            "for each GPU, and serve --engines"
        )
    if replicas > hardware.cores:
        raise ConfigError(
            f"--replicas is {replicas}, but this process may use {hardware.cores} cores: set --replicas "
            f"{hardware.cores} or less"
        )
    return machine_share(hardware, replicas)


def processors_of(replicas: int) -> list[list[int]]:
    """Returns the processors of each replica. Neighbours stay together, since they share caches."""
    processors = sorted(os.sched_getaffinity(0))
    each = len(processors) // replicas
    return [processors[number * each : (number + 1) * each] for number in range(replicas)]


class LocalEngine:
    """An engine in its place, a share of the machine."""

    def __init__(self, name: str, starting: asyncio.Task[None], now: float) -> None:
        self.name = name
        self.starting: asyncio.Task[None] | None = starting  # None: it has joined the fleet
        self.draining: asyncio.Task[None] | None = None
        self.since = now  # when it began to start, to serve or to drain


class LocalEngines:
    """A Placement: processes of this machine, which join a fleet when they are ready."""

    def __init__(self, prepared: "PreparedModel", fleet: FleetClient) -> None:
        self._prepared, self._fleet = prepared, fleet
        self._places: dict[int, LocalEngine] = {}
        self._processors = processors_of(replica_limits(prepared.resolved.server.replicas)[1])
        self._changed = asyncio.Event()
        self._key = secrets.token_hex(16)  # for engines to read KV blocks from each other
        self._failure = ""  # why the last start failed
        self._started = 0

    async def engines(self) -> Sequence[PlacedEngine]:
        """See Placement. One that has ended for good leaves its place."""
        replicas = {replica.name: replica for replica in self._fleet.replicas}
        for place, engine in list(self._places.items()):
            replica = replicas.get(engine.name)
            if replica is not None and replica.status == "gone" and engine.draining is None:
                await self._end(place)
        if self._failure:
            failure, self._failure = self._failure, ""
            raise PlacementError(failure)
        now, found = self._fleet.clock(), []
        for engine in self._places.values():
            status: PlaceStatus = "draining" if engine.draining else "starting" if engine.starting else "ready"
            replica = replicas.get(engine.name)
            requests = 0 if replica is None else replica.open_requests
            found.append(PlacedEngine(name=engine.name, status=status, seconds=now - engine.since, requests=requests))
        return found

    async def ensure(self, count: int) -> None:
        """See Placement. A place is free when the engine that drains there has ended."""
        missing = count - sum(engine.draining is None for engine in self._places.values())
        free = [place for place in range(len(self._processors)) if place not in self._places]
        for place in free[: max(missing, 0)]:
            name = f"local-{self._started}"
            self._started += 1
            starting = asyncio.create_task(self._start(place, name))
            self._places[place] = LocalEngine(name, starting, self._fleet.clock())

    async def drain(self, name: str) -> None:
        for place, engine in self._places.items():
            if engine.name == name and engine.starting is not None:
                await self._end(place)
                return
            if engine.name == name and engine.draining is None:
                self._fleet.drain(name, self._prepared.resolved.server.drain_timeout)
                engine.draining, engine.since = asyncio.create_task(self._drained(place)), self._fleet.clock()

    async def kill(self, name: str) -> None:
        for place in [place for place, engine in self._places.items() if engine.name == name]:
            await self._end(place)

    async def changed(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    async def started(self) -> None:
        """Return when all engines are ready that were started. Raises EngineError."""
        await asyncio.gather(*(engine.starting for engine in self._places.values() if engine.starting))
        if self._failure:
            raise EngineError(self._failure)

    async def close(self) -> None:
        """End all engines."""
        for place in list(self._places):
            await self._end(place)

    async def _start(self, place: int, name: str) -> None:
        try:
            processors = self._processors[place]
            client = await spawn(self._config(place), resumes=True, processors=processors)
        except EngineError as error:
            self._failure = str(error)
            self._places.pop(place, None)
        else:
            self._fleet.join(name, client)
            self._places[place].starting, self._places[place].since = None, self._fleet.clock()
        self._changed.set()

    def _config(self, place: int) -> EngineConfig:
        """Returns the settings of the engine in a place: the first ones compute prompts for the others."""
        resolved = self._prepared.resolved
        if not resolved.server.prefill_replicas:
            return resolved.engine
        role: EngineRole = "prefill" if place < resolved.server.prefill_replicas else "decode"
        return replace(resolved.engine, role=role, pages=PageAccess(key=self._key))

    async def _drained(self, place: int) -> None:
        """End an engine when its last request has ended or left."""
        name = self._places[place].name
        while any(replica.name == name and replica.parts for replica in self._fleet.replicas):
            await asyncio.sleep(LOOK_SECONDS)
        await self._end(place)

    async def _end(self, place: int) -> None:
        """End the engine in a place. Its requests go on elsewhere."""
        engine = self._places.pop(place)
        for task in (engine.starting, engine.draining):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        for replica in self._fleet.replicas:
            if replica.name == engine.name:
                self._fleet.leave(engine.name)
                await replica.engine.close()
        self._changed.set()


async def start_replicas(prepared: "PreparedModel") -> FleetClient:
    """Returns a client of the engines when they are ready, with MIN:MAX the least of them, but one at least, since it
    gives the facts about the model. Closing it ends all. Raises EngineError, and then none is left running."""
    server = prepared.resolved.server
    least, most = replica_limits(server.replicas)
    fleet = FleetClient(ROUTES[server.route], clock=time.monotonic, hold_seconds=server.hold_timeout)
    engines = LocalEngines(prepared, fleet)
    try:
        await engines.ensure(max(least, 1))
        await engines.started()
    except BaseException:
        await engines.close()
        await fleet.close()
        raise
    policy = ScalePolicy(
        least=least, most=most, window=server.scale_down_after, idle=server.sleep_after or IDLE_SECONDS
    )
    if least < most:
        fleet.keep(_scale(Autoscaler(fleet, engines, policy), engines))
    return fleet


async def _scale(scaler: Autoscaler, engines: LocalEngines) -> None:
    """Keeps as many engines as are needed until the fleet is closed, and ends them all."""
    try:
        await scaler.run()
    finally:
        await engines.close()


def add_series(metrics: Metrics, fleet: EngineClient) -> None:
    """Adds the series of each replica."""
    assert isinstance(fleet, FleetClient)
    FleetSeries(metrics.registry, fleet)
