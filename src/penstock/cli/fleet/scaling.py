"""Implements `penstock fleet scale`: keeps as many engines as the load needs, on Kubernetes or Ray."""

import asyncio
import os
import shlex
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from penstock.cli.fleet.ray_engines import RayEngines
from penstock.cli.serving.front import engines_tls
from penstock.cli.top.scrape import NoServer, scrape, server_url
from penstock.cluster.autoscaler import Autoscaler
from penstock.cluster.client import FleetClient
from penstock.cluster.kubernetes import KINDS, KubernetesApi, KubernetesEngines
from penstock.cluster.members import Members, find_addresses
from penstock.cluster.place import Placement
from penstock.cluster.scale import ScalePolicy
from penstock.config.sizes import replica_limits
from penstock.config.texts import checked_flag
from penstock.engine.remote.connector import connect_engine
from penstock.observe.logs import configure_logging

LOOK_SECONDS = 1.0  # between looks at the requests that servers hold


class ScaleSettings(NamedTuple):
    """The flags of `penstock fleet scale`."""

    engines: str
    on: str
    replicas: str
    run: str
    threads: int
    servers: str
    window: float
    idle: float
    standby: int
    api: str
    key: str | None
    authority: str


def keep_scaled(given: ScaleSettings) -> int:
    """Runs until SIGTERM or SIGINT. Returns the exit status. Raises ValueError and PlacementError."""
    try:
        least, most = replica_limits(given.replicas)
    except ValueError as error:
        raise ValueError(f"--replicas is {given.replicas!r}: {error}") from None
    policy = ScalePolicy(least=least, most=most, window=given.window, idle=given.idle, standby=given.standby)
    configure_logging("info", "text")
    asyncio.run(_keep_scaled(given, policy))
    return 0


async def _keep_scaled(given: ScaleSettings, policy: ScalePolicy) -> None:
    key, tls = checked_flag("--fleet-key", given.key) or "", engines_tls(given.authority)
    fleet = FleetClient(clock=time.monotonic)
    addresses = find_addresses(given.engines)
    servers = HeldElsewhere([_checked_url("--servers", url) for url in given.servers.split(",") if url])
    placement, close = _placement(given, fleet, key)
    members = Members(fleet, addresses, lambda address: connect_engine(address, key, tls, front="penstock fleet scale"))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        fleet.keep(members.run())
        fleet.keep(servers.watch())
        fleet.keep(Autoscaler(fleet, placement, policy, held=lambda: servers.count).run())
        await stop.wait()
    finally:
        await fleet.close()
        await close()


def _placement(given: ScaleSettings, fleet: FleetClient, key: str) -> tuple[Placement, Callable[[], Awaitable[None]]]:
    """Returns what --on names, and what closes it."""

    def load(prefix: str) -> int | None:
        """The requests of the engine whose address begins so; None: it is not ready."""
        for replica in fleet.replicas:
            if replica.name.startswith(prefix) and replica.status == "ready":
                return replica.stats.running + replica.stats.waiting
        return None

    where, _, workload = given.on.partition(":")
    if where == "ray" and not workload:
        kind, _, path = given.engines.partition(":")
        if kind != "file" or not given.run:
            raise ValueError(
                "--on ray needs --run 'MODEL FLAGS', as for penstock engine, and ENGINES as file:PATH, where it writes "
                "the engines' addresses"
            )
        engines = RayEngines(shlex.split(given.run), key, given.threads, Path(path), load)
        return engines, engines.close
    *namespace, kind, name = ["", *workload.split("/")][-3:] if where == "kubernetes" else ["", ""]
    if kind not in KINDS or not name:
        kinds = ", ".join(KINDS)
        raise ValueError(f"--on is {given.on!r}: give ray, or kubernetes:[NAMESPACE/]KIND/NAME, KIND being {kinds}")
    if given.run:
        raise ValueError(f"--run is {given.run!r}, but only Ray starts engines from it: leave it out")
    api = KubernetesApi(given.api and _checked_url("--kubernetes-api", given.api))
    return KubernetesEngines(api, kind, name, *namespace, load=lambda ip: load(f"{ip}:") or 0), api.close


def _checked_url(flag: str, text: str) -> str:
    try:
        return server_url(text)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


class HeldElsewhere:
    """The requests that servers hold because no engine serves, from their metrics."""

    def __init__(self, servers: list[str]) -> None:
        self._servers = servers
        self.count = 0

    async def watch(self) -> None:
        """Keep `count` up to date, until cancelled. A server that does not answer counts as 0."""
        while self._servers:
            found = await asyncio.gather(*(asyncio.to_thread(self._held, url) for url in self._servers))
            self.count = sum(found)
            await asyncio.sleep(LOOK_SECONDS)

    def _held(self, url: str) -> int:
        try:
            return int(scrape(url, os.environ.get("PENSTOCK_API_KEY")).value("penstock_fleet_requests_held") or 0)
        except NoServer:
            return 0
