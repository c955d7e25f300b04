"""Divides the machine among the engines of a server that has several language models."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from penstock.cli.serving.kv_budgets import KVBudgets
from penstock.config import ConfigError, Hardware, detect_hardware
from penstock.config.engine import LEASE_BYTES, LEASE_PLACES, LeasePlace
from penstock.engine.client import StreamingClient
from penstock.engine.link.ipc import spawn
from penstock.kernels.native.loader import instruction_sets
from penstock.messages.tensors import LoadFailed
from penstock.prepare.engine import verified
from penstock.prepare.model import FoundModel, PreparedModel, prepare_found
from penstock.repository.entry import CACHE_BYTES, Folder
from penstock.weights.manifest import ManifestCheck


class EngineShares:
    """Divides a server's machine among the engines of its language models. Engines on the CPU take turns on all
    processors, by a segment of memory, and memory moves between their KV caches. Engines on a GPU, engines with ranks,
    and those without native kernels have fixed shares."""

    def __init__(
        self, repository: str | Path, max_loaded: int | None, *, beside: bool = False, cache_bytes: int | None = None
    ) -> None:
        """The language models of a `repository` share the machine, at most `max_loaded` at a time; with `beside`, and
        the model on the command line. Files of a bucket take `cache_bytes` on disk. Called before the threads of this
        process are kept off a processor. Raises ConfigError."""
        try:
            self.folder = Folder(repository, cache_bytes or CACHE_BYTES)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self.languages = frozenset(self._languages())
        self.at_once = max(min(len(self.languages), max_loaded or len(self.languages)) + beside, 1)
        self._memory: int | None = None  # that was available at the first start
        self.budgets = KVBudgets()
        self.processors, self._cores = os.sched_getaffinity(0), detect_hardware().cores
        self._segment = os.memfd_create("penstock-step-lease")
        os.ftruncate(self._segment, LEASE_BYTES)
        self._engines: dict[int, StreamingClient | None] = {}  # by place; None: it is being started

    def prepare(self, found: FoundModel, hardware: Hardware) -> PreparedModel:
        """Resolves the settings of a model for its share of the machine, of which `hardware` is available now. If it
        takes turns, it gets all processors, and its KV cache may grow into the shares of others, unless the settings
        give its size or a disk tier. Raises what `prepare_found` raises."""
        if self._memory is None:
            self._memory = hardware.memory_available
        share = machine_share(hardware, self.at_once, self._memory)
        prepared = prepare_found(found, share)
        if not _takes_turns(prepared):
            return prepared
        prepared = prepare_found(found, msgspec.structs.replace(share, cores=self._cores))
        # Else the engine would take its KV cache from all memory that is available when it starts.
        kv_bytes = prepared.resolved.memory.kv_bytes
        fixed = found.given.sources.keys() & {"kv_cache_memory", "kv_disk"}
        return prepared.with_engine(
            kv_cache_bytes=kv_bytes, kv_reserve_bytes=None if fixed else kv_bytes * self.at_once
        )

    def enter(self, prepared: PreparedModel, weight: float = 1.0) -> PreparedModel:
        """Gives the engine of a model its place. `started` must follow, as in `start_engine`. Raises LoadFailed if
        there is no place."""
        if not _takes_turns(prepared):
            return prepared
        place = next((each for each in range(LEASE_PLACES) if self._is_free(each)), None)
        if place is None:
            raise LoadFailed(f"{LEASE_PLACES} engines share the processors, which is the limit; unload another model")
        self._engines[place] = None
        lease = LeasePlace(path=f"/proc/{os.getpid()}/fd/{self._segment}", place=place, weight=weight)
        return prepared.with_engine(lease=lease)

    async def start_engine(self, prepared: PreparedModel, check: ManifestCheck, weight: float = 1.0) -> StreamingClient:
        """Starts the engine of a model, with its place and its budget. Returns its client when it has computed a
        token. Raises LoadFailed if there is no place, and what `verified` raises."""
        prepared, client = self.enter(prepared, weight), None
        try:
            client = await verified(spawn(prepared.resolved.engine, resumes=True, processors=self.processors), check)
            return client
        finally:
            self.started(prepared, client)

    def started(self, prepared: PreparedModel, client: StreamingClient | None) -> None:
        """Notes the engine that has the place of a model; None: it did not start. The place is free when the engine has
        ended for good."""
        if (lease := prepared.resolved.engine.lease) is None:
            return
        if client is None:
            del self._engines[lease.place]
        else:
            self._engines[lease.place] = client
            self.budgets.add(client, prepared.resolved.engine)

    def _languages(self) -> Iterator[str]:
        for name in self.folder.names():
            with contextlib.suppress(LoadFailed):  # loading it gives the error
                if self.folder.kind(name) == "llm":
                    yield name

    def _is_free(self, place: int) -> bool:
        client = self._engines.get(place)
        return place not in self._engines or (client is not None and client.state.status == "ended")


def _takes_turns(prepared: PreparedModel) -> bool:
    one_rank = prepared.resolved.engine.split.world == 1
    return prepared.hardware.device == "cpu" and one_rank and bool(instruction_sets())


def machine_share(hardware: Hardware, engines: int, memory: int | None = None) -> Hardware:
    """Returns what one of `engines` engines may use: equal parts of the cores, and of `memory` bytes, which are those
    available now if None."""
    available = hardware.memory_available if memory is None else memory
    return msgspec.structs.replace(
        hardware,
        cores=max(hardware.cores // engines, 1),
        memory_available=min(available // engines, hardware.memory_available),
    )
