"""Engines on the machines of a Ray cluster: an actor for each holds a process of `penstock engine`."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.cluster.place import PlacedEngine, PlacementError, PlaceStatus
from penstock.engine.child import STDERR, die_at_end_of_input
from penstock.engine.ranks.ray_cluster import connect_ray
from penstock.messages import EngineError

LOOK_SECONDS = 1.0  # between looks at the actors


class EngineActor:
    """An actor that holds an engine, which ends with it."""

    def __init__(self, arguments: Sequence[str], key: str) -> None:
        """`arguments` are those of `penstock engine` after its name."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            self._address = f"{host}:{probe.getsockname()[1]}"
        command = [sys.executable, "-P", "-m", __name__, "engine", *arguments, "--listen", self._address]
        environment = {**os.environ, "PENSTOCK_FLEET_KEY": key}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=STDERR, env=environment)

    def address(self) -> str:
        """Return where the engine listens, or will."""
        return self._address

    def drain(self) -> None:
        """Let the engine end when its requests have ended or left."""
        self._process.send_signal(signal.SIGTERM)

    def ended(self) -> int:
        """Return the engine's exit status when it has ended."""
        return self._process.wait()


class RayEngine:
    """An engine as the driver knows it."""

    def __init__(self, name: str, actor: Any, address: Any, ended: Any, now: float) -> None:
        """`address` and `ended` are references to what the actor will return."""
        self.name, self.actor, self.address_reference, self.ended = name, actor, address, ended
        self.address = ""  # until the actor runs
        self.draining = False
        self.since = now


class RayEngines:
    """A Placement: actors that Ray spreads over its machines. The addresses of their engines are in a file, which
    servers with `--engines file:PATH` read."""

    def __init__(
        self, arguments: Sequence[str], key: str, threads: int, file: Path, load: Callable[[str], int | None]
    ) -> None:
        """`arguments` are those of `penstock engine`, `threads` the processors that an engine needs. `load` returns the
        requests of the engine at an address; None: it is not ready. Raises PlacementError without a cluster."""
        try:
            self._ray = connect_ray()
        except EngineError as error:
            raise PlacementError(str(error)) from error
        self._arguments, self._key, self._threads = arguments, key, threads
        self._file, self._load = file, load
        self._engines: dict[str, RayEngine] = {}
        self._started = 0

    async def engines(self) -> Sequence[PlacedEngine]:
        """See Placement. Those whose process, actor or machine is gone are left out."""
        await asyncio.to_thread(self._look)
        now, found = time.monotonic(), []
        for engine in self._engines.values():
            requests = self._load(engine.address) if engine.address else None
            status: PlaceStatus = "draining" if engine.draining else "starting" if requests is None else "ready"
            found.append(
                PlacedEngine(name=engine.name, status=status, seconds=now - engine.since, requests=requests or 0)
            )
        return found

    async def ensure(self, count: int) -> None:
        staying = sum(not engine.draining for engine in self._engines.values())
        for _ in range(count - staying):
            await asyncio.to_thread(self._start)

    async def drain(self, name: str) -> None:
        """See Placement. One that has no machine yet ends at once."""
        engine = self._engines.get(name)
        if engine is not None and not engine.address:
            await self.kill(name)
        elif engine is not None and not engine.draining:
            engine.draining, engine.since = True, time.monotonic()
            engine.actor.drain.remote()

    async def kill(self, name: str) -> None:
        engine = self._engines.pop(name, None)
        if engine is not None:
            await asyncio.to_thread(self._ray.kill, engine.actor)
            self._write()

    async def changed(self) -> None:
        await asyncio.sleep(LOOK_SECONDS)

    async def close(self) -> None:
        """End all engines, and leave the cluster."""
        for name in list(self._engines):
            await self.kill(name)
        await asyncio.to_thread(self._ray.shutdown)

    def _start(self) -> None:
        """Order an actor, which waits until a machine has room."""
        self._started += 1
        name = f"engine-{self._started}"
        kind = self._ray.remote(num_cpus=self._threads, max_restarts=0)(EngineActor)
        actor = kind.options(scheduling_strategy="SPREAD", max_concurrency=4).remote(self._arguments, self._key)
        self._engines[name] = RayEngine(name, actor, actor.address.remote(), actor.ended.remote(), time.monotonic())

    def _look(self) -> None:
        """Find the addresses of actors that run by now, and forget engines that have ended."""
        engines = list(self._engines.values())
        if not engines:
            return
        waiting = [reference for one in engines for reference in (one.address_reference, one.ended)]
        done, _ = self._ray.wait(waiting, num_returns=len(waiting), timeout=0)
        for engine in engines:
            if engine.ended in done:  # its process has ended, or the actor has with its machine
                del self._engines[engine.name]
                self._ray.kill(engine.actor)
            elif engine.address_reference in done and not engine.address:
                engine.address = str(self._ray.get(engine.address_reference))
        self._write()

    def _write(self) -> None:
        """Write the addresses of all engines that a server may connect to."""
        text = "".join(f"{engine.address}\n" for engine in self._engines.values() if engine.address)
        if not self._file.exists() or self._file.read_text() != text:
            beside = self._file.with_name(self._file.name + ".new")
            beside.write_text(text)
            beside.replace(self._file)


if __name__ == "__main__":  # in an actor: `penstock engine`, which ends with the actor
    import runpy

    die_at_end_of_input()
    runpy.run_module("penstock", run_name="__main__")
