"""The ranks of an engine on the machines of a Ray cluster.

Ray finds the machines and starts an actor for each rank, which starts the rank's process, the same one as on one
machine. Plans and results travel over our own sockets; the actors pass their keys on.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.config import EngineConfig
from penstock.engine.child import STDERR, how_it_ended
from penstock.engine.ranks.keys import EngineKeys
from penstock.engine.ranks.rank_socket import RankSocket
from penstock.engine.ranks.wire import Report
from penstock.messages import EngineError

MODULE = "penstock.engine.ranks.worker"
PLACEMENT_SECONDS = 60.0  # for the cluster to find room
LOOK_SECONDS = 0.2  # between checks whether a rank has ended; less than supervision.LAST_WORDS

log = logging.getLogger(__name__)


class RankHost:
    """An actor that holds one rank's process, which ends with it."""

    def where(self) -> tuple[str, str]:
        """(node, address) of the machine."""
        import ray

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def start(self, arguments: Sequence[str], keys: bytes) -> int:
        """Start the rank with these arguments and this first line of input. Returns its pid."""
        self._process = subprocess.Popen([sys.executable, "-P", *arguments], stdin=subprocess.PIPE, stdout=STDERR)
        if self._process.stdin is None:
            raise RuntimeError("a process was started without standard input")
        self._process.stdin.write(keys + b"\n")
        self._process.stdin.flush()
        return self._process.pid

    def ended(self) -> str:
        """Wait for the end of the rank. Returns how it ended, in words."""
        return how_it_ended(self._process.wait())


class RayRanks:
    """Ranks on as few machines as have room for them, neighbours on the same one.

    Raises EngineError where there is no Ray, no cluster, or no room in it.
    """

    def __init__(self, config: EngineConfig) -> None:
        world = config.split.world
        self._ray = connect_ray()
        self._held = contextlib.ExitStack()
        self._held.callback(self._ray.shutdown)
        try:
            hosts = self._place(config)
            places = self._ray.get([host.where.remote() for host in hosts])
            order = sorted(range(world), key=lambda i: places[i])  # ranks of a machine are neighbours
            hosts = [hosts[i] for i in order]
            self.machines = [places[i][0] for i in order]
            addresses = [places[i][1] for i in order]
            self.host = addresses[0]
            keys = EngineKeys(world)
            self._socket = RankSocket(world, f"tcp://{self._ray.util.get_node_ip_address()}:*", keys)
            self._held.callback(self._socket.close)
            pids = self._ray.get(
                [
                    host.start.remote(("-m", MODULE, self._socket.endpoint, str(rank)), msgspec.json.encode(own))
                    for rank, (host, own) in enumerate(zip(hosts, keys.ranks, strict=True))
                ]
            )
            self.names = [f"rank {r} (pid {pids[r]} on {addresses[r]})" for r in range(world)]
            self._ends = {host.ended.remote(): rank for rank, host in enumerate(hosts)}
            self._ended: dict[int, str] = {}
            self._looked = time.monotonic()
        except BaseException:
            self.close()
            raise

    def connected(self) -> None:
        """Nothing to do: no process without a key can connect."""

    def send(self, rank: int, frame: bytes) -> None:
        self._socket.send(rank, frame)

    def receive(self, seconds: float) -> list[tuple[int, Report]]:
        """Return (rank, report) of every report received. Blocks up to `seconds` for one."""
        return self._socket.receive(seconds)

    def ended(self) -> dict[int, str]:
        """Return how the ranks that have ended did so, in words, by rank."""
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            done, _ = self._ray.wait(list(self._ends), num_returns=len(self._ends), timeout=0)
            for reference in done:
                self._ended[self._ends.pop(reference)] = self._how(reference)
            self._looked = time.monotonic()
        return self._ended

    def close(self) -> None:
        """End every actor and with it its rank. May be called twice."""
        self._held.close()

    def _place(self, config: EngineConfig) -> list[Any]:
        """Start an actor for each rank on machines that have room."""
        ray, world = self._ray, config.split.world
        need = {"CPU": float(max(config.threads, 1))} | ({"GPU": 1.0} if config.device.startswith("cuda") else {})
        group = ray.util.placement_group([need] * world, strategy="PACK")
        self._held.callback(ray.util.remove_placement_group, group)
        if not group.wait(PLACEMENT_SECONDS):
            each = " and ".join(f"{count:g} {name}" for name, count in need.items())
            raise EngineError(
                f"the Ray cluster has no room for {world} ranks of {each} each ({PLACEMENT_SECONDS:g} s waited; it has "
                f"{ray.cluster_resources()}): add machines, end other jobs or set a smaller split"
            )
        actor = ray.remote(num_cpus=need["CPU"], num_gpus=need.get("GPU", 0), max_restarts=0)(RankHost)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        hosts = []
        for index in range(world):
            host = actor.options(scheduling_strategy=strategy(group, index)).remote()
            self._held.callback(ray.kill, host)
            hosts.append(host)
        return hosts

    def _how(self, reference: Any) -> str:
        try:
            return str(self._ray.get(reference))
        except self._ray.exceptions.RayError as error:
            return f"is gone with its machine or its actor: {error}"


def connect_ray() -> Any:
    """Ray, connected to the cluster that RAY_ADDRESS names, or to the one that runs on this machine."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise EngineError("--distributed-executor ray needs Ray: pip install 'penstock[ray]'") from None
    ours = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=True, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise EngineError(
            f"no Ray cluster was found: run `ray start --head` here, or set RAY_ADDRESS ({error})"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, ours)  # Ray takes it
    return ray
