"""Several engines on this machine (`penstock serve --replicas N`): each has its share of the cores and the memory."""

import asyncio
import os
import time
from typing import TYPE_CHECKING

from penstock.cli.serving.shares import machine_share
from penstock.cluster.client import FleetClient
from penstock.cluster.route import ROUTES
from penstock.config import ConfigError, Hardware
from penstock.engine.link.ipc import spawn
from penstock.messages import EngineClient
from penstock.observe.fleet import FleetSeries
from penstock.observe.metrics import Metrics

if TYPE_CHECKING:
    from penstock.prepare.model import PreparedModel


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


def add_series(metrics: Metrics, fleet: EngineClient) -> None:
    """Adds the series of each replica."""
    assert isinstance(fleet, FleetClient)
    FleetSeries(metrics.registry, fleet)


async def start_replicas(prepared: "PreparedModel") -> FleetClient:
    """Returns a client of the engines when all are ready. Raises EngineError, and then none is left running."""
    server, engine = prepared.resolved.server, prepared.resolved.engine
    starts = (spawn(engine, resumes=True, processors=own) for own in processors_of(server.replicas))
    results = await asyncio.gather(*starts, return_exceptions=True)
    clients = [result for result in results if not isinstance(result, BaseException)]
    if len(clients) < len(results):
        await asyncio.gather(*(client.close() for client in clients))
        raise next(result for result in results if isinstance(result, BaseException))
    fleet = FleetClient(ROUTES[server.route], clock=time.monotonic)
    for number, client in enumerate(clients):
        fleet.join(f"local-{number}", client)
    return fleet
