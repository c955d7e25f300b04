"""Connects the ranks that share a model. The mesh carries tensors only; the engine sends plans and receives results.

The tensor ranks of a stage sum and gather. Each rank sends hidden states to the rank with the same tensor rank in the
next stage.
"""

import logging
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from penstock.config import RankPlace
from penstock.config.split import part
from penstock.kernels.native.session import Session
from penstock.models import Collectives
from penstock.runtime.mesh.device_links import DeviceLink, ExchangeLimits
from penstock.runtime.mesh.process_groups import BACKENDS, GroupRankLink, GroupStageLink
from penstock.runtime.mesh.shared_memory import SharedMemory, SharedRankLink, SharedStageLink, open_shared_memory

START_SECONDS = 1800.0  # for all ranks to connect: some read more weights than others, or from slower disks

log = logging.getLogger(__name__)


class MeshError(RuntimeError):
    """Ranks could not connect, or an exchange failed. The message names this rank, the operation, the other ranks and
    the cause."""


@dataclass
class Traffic:
    """Counts the bytes of tensors that a rank has sent, for each operation. A tensor counts once, however many ranks
    receive it."""

    sum: int = 0
    gather: int = 0
    send: int = 0


class RankLink(Protocol):
    """Connects the tensor ranks of a stage. All of them must make the same calls in the same order, with the same
    number of rows. Raises RuntimeError or TimeoutError when a rank does not take part in time."""

    def sum(self, x: Tensor) -> None:
        """Overwrites x [rows, width] on every rank with the sum of all, added in rank order."""

    def gather(self, x: Tensor, whole: Tensor | None, columns: Sequence[range]) -> None:
        """Writes each rank's x [rows, len(columns[rank])] into those columns of `whole` on tensor rank 0. On the other
        ranks `whole` is None."""


class StageLink(Protocol):
    """Sends hidden states from one stage to the next. Errors are as for RankLink."""

    def send(self, x: Tensor) -> None:
        """Blocks only when as many messages as there are stages have not been received. The caller may overwrite x
        after the call."""

    def receive(self, x: Tensor) -> None:
        """Fills x with the next message, which must have its shape and dtype."""


class Mesh:
    """Holds one rank's links to the other ranks. Only one thread may call it. All ranks of a stage must make the same
    calls in the same order."""

    def __init__(
        self,
        place: RankPlace,
        rendezvous: str,
        *,
        message_bytes: int,
        backend: str = "gloo",
        limits: ExchangeLimits | None = None,
        timeout: float = 120.0,
        start_timeout: float = START_SECONDS,
    ) -> None:
        """Connects to the other ranks within `start_timeout` seconds. `rendezvous` is the "HOST:PORT" of a store that
        rank 0 serves. Later, no operation may take longer than `timeout` seconds. A message between stages has at most
        `message_bytes`. Ranks on one machine exchange tensors through shared memory.

        With `limits`, tensors are on devices: all exchanges use the backend, in the order of the device's stream.

        Raises MeshError when ranks are missing, and ValueError for a malformed address or an unknown backend.
        """
        if backend not in BACKENDS:
            raise ValueError(f"no backend {backend!r}: use {' or '.join(BACKENDS)}")
        self.place = place
        self.traffic = Traffic()
        self._rank_link: RankLink | DeviceLink | None = None  # the other tensor ranks of this stage
        self._previous_stage: StageLink | None = None
        self._next_stage: StageLink | None = None
        host, port = _address(rendezvous)
        split, began = place.split, time.perf_counter()
        try:
            self._store: TCPStore | None = _store(host, port, place, start_timeout)
            address = _own_address(host, port)
            connector = _Connector(place, self._store, address, backend, limits, start_timeout, timeout)
            if split.tensor > 1:
                self._rank_link = connector.rank_link()
            if not place.first:
                self._previous_stage = connector.stage_link(place.stage - 1, 1, message_bytes)
            if not place.last:
                self._next_stage = connector.stage_link(place.stage, 0, message_bytes)
        except (RuntimeError, OSError) as error:
            waited = time.perf_counter() - began
            raise MeshError(
                f"{self._name} did not connect to all of {split.world} ranks at {rendezvous} in {waited:.1f} s: {error}"
            ) from error

    def sum(self, x: Tensor) -> None:
        """Sums as `Collectives.sum`. The bits of the result do not depend on the kind of link or the number of rows,
        unless `limits` allow sums in any order."""
        if self._rank_link is None:
            return
        with self._explain_failure("sum", x, self._ranks_of_stage):
            self._rank_link.sum(x)
        self.traffic.sum += x.nbytes

    def gather(self, x: Tensor, total: int) -> Tensor | None:
        """Gathers as `Collectives.gather`."""
        whole = x.new_empty(len(x), total) if self.place.tensor_rank == 0 else None
        self.gather_into(x, whole, total)
        return whole

    def gather_into(self, x: Tensor, whole: Tensor | None, total: int) -> None:
        """Gathers like `gather`, into `whole` on tensor rank 0; `whole` is None on the others."""
        if self._rank_link is None:
            raise ValueError("gather needs several tensor ranks: this stage has one")
        ranks = self._ranks_of_stage
        columns = [part(total, len(ranks), rank) for rank in range(len(ranks))]
        with self._explain_failure("gather", x, ranks):
            self._rank_link.gather(x, whole, columns)
        if whole is None:
            self.traffic.gather += x.nbytes

    @property
    def broadcasts_tokens(self) -> bool:
        """True when the ranks of this stage get sampled tokens by `broadcast`: in the last stage, on devices. Other
        ranks get them with a later plan."""
        return self.place.last and isinstance(self._rank_link, DeviceLink)

    def broadcast(self, x: Tensor) -> None:
        """Overwrites x on every tensor rank of a stage on devices with the x of tensor rank 0."""
        if self._rank_link is None:
            return
        if not isinstance(self._rank_link, DeviceLink):
            raise ValueError("only ranks on devices broadcast tokens: ranks on CPUs get them with a plan")
        with self._explain_failure("broadcast", x, self._ranks_of_stage):
            self._rank_link.broadcast(x)

    def minimum(self, what: str, number: int) -> int:
        """Returns the least `number` of all ranks. `what` names it; each rank must call once per name. Raises MeshError
        when a rank does not."""
        world = self.place.split.world
        if self._store is None:
            raise ValueError("the mesh is closed")
        try:
            self._store.set(f"{what} {self.place.rank}", str(number))
            return min(int(self._store.get(f"{what} {rank}")) for rank in range(world))
        except RuntimeError as error:
            raise MeshError(f"{self._name}: not all of {world} ranks sent their {what}: {_reason(error)}") from error

    def send(self, x: Tensor) -> None:
        """Sends hidden states [tokens, hidden] to the next stage: see StageLink."""
        if self._next_stage is None:
            raise ValueError("there is no stage after this one")
        with self._explain_failure("send", x, self._rank_of_stage(1)):
            self._next_stage.send(x)
        self.traffic.send += x.nbytes

    def receive(self, x: Tensor) -> None:
        """Fills x with hidden states [tokens, hidden] of the previous stage: see StageLink."""
        if self._previous_stage is None:
            raise ValueError("there is no stage before this one")
        with self._explain_failure("receive", x, self._rank_of_stage(-1)):
            self._previous_stage.receive(x)

    def close(self) -> None:
        """Closes all links. Calls of other ranks that need this rank fail from then on."""
        self._rank_link = self._previous_stage = self._next_stage = self._store = None

    @property
    def _name(self) -> str:
        return f"rank {self.place.rank} (stage {self.place.stage}, tensor rank {self.place.tensor_rank})"

    @property
    def _ranks_of_stage(self) -> range:
        tensor = self.place.split.tensor
        return range(self.place.stage * tensor, (self.place.stage + 1) * tensor)

    def _rank_of_stage(self, stages: int) -> range:
        """Returns the rank that has the same tensor rank as this one, `stages` stages later."""
        rank = self.place.rank + stages * self.place.split.tensor
        return range(rank, rank + 1)

    @contextmanager
    def _explain_failure(self, operation: str, x: Tensor, ranks: Sequence[int]) -> Iterator[None]:
        """Turns the errors of a link into MeshError, with the operation and the ranks that take part."""
        began = time.perf_counter()
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            shape = " x ".join(map(str, x.shape))
            others = ", ".join(str(rank) for rank in ranks if rank != self.place.rank)
            raise MeshError(
                f"{self._name}: {operation} of {shape} numbers with rank {others} failed after "
                f"{time.perf_counter() - began:.1f} s: {_reason(error)}"
            ) from error


@dataclass(frozen=True)
class _Connector:
    """Creates the links of one rank. All ranks at the ends of a link must call for it."""

    place: RankPlace
    store: TCPStore
    address: str  # of this machine
    backend: str
    limits: ExchangeLimits | None
    start_timeout: float
    timeout: float

    def rank_link(self) -> "RankLink | DeviceLink":
        """Returns the link between the tensor ranks of this rank's stage."""
        name, ranks = f"stage {self.place.stage}", (self.place.tensor_rank, self.place.split.tensor)
        memory = self._memory(name, *ranks, SharedRankLink.size(self.place.split.tensor))
        if memory:
            return SharedRankLink(memory, *ranks, self.timeout)
        group = self._join(name, *ranks)
        return DeviceLink(group, *ranks, self.limits) if self.limits else GroupRankLink(group, *ranks, self.timeout)

    def stage_link(self, stage: int, rank: int, message_bytes: int) -> StageLink:
        """Returns the link from `stage` to the next one. The sender is rank 0 of the link, the receiver rank 1."""
        name, slots = f"stage {stage} to {stage + 1}, tensor rank {self.place.tensor_rank}", self.place.split.pipeline
        memory = self._memory(name, rank, 2, slots * message_bytes)
        if memory:
            return SharedStageLink(memory, slots, self.timeout)
        timeout = self.timeout if BACKENDS[self.backend].blocks_host else None
        return GroupStageLink(self._join(name, rank, 2), slots, timeout)

    def _memory(self, name: str, rank: int, ranks: int, size: int) -> SharedMemory | None:
        """Returns the shared memory of a link, or None if the ranks cannot share memory or tensors are on devices."""
        memory = None if self.limits else open_shared_memory(PrefixStore(name, self.store), rank, ranks, size)
        if rank == self.place.tensor_rank == 0:
            log.info("%s: tensors go through %s", name, "shared memory" if memory else self.backend)
        return memory

    def _join(self, name: str, rank: int, ranks: int) -> Any:
        timeouts = self.start_timeout, self.timeout
        return BACKENDS[self.backend].join(PrefixStore(name, self.store), rank, ranks, self.address, *timeouts)


def collectives(mesh: Mesh | None, session: Session | None) -> Collectives | None:
    """Returns the collectives of a rank's model, or None if the rank has whole layers."""
    if mesh is None or mesh.place.split.tensor == 1:
        return None
    return mesh if session is None else SessionCollectives(mesh, session)


class SessionCollectives:
    """Runs a mesh's collectives as ops of a session: at once, or recorded while the session records."""

    def __init__(self, mesh: Mesh, session: Session) -> None:
        self._mesh = mesh
        self._session = session

    def sum(self, x: Tensor) -> None:
        self._session.call(self._mesh.sum, x)

    def gather(self, x: Tensor, total: int) -> Tensor | None:
        if self._mesh.place.tensor_rank:
            self._session.call(lambda x: self._mesh.gather_into(x, None, total), x)
            return None
        whole = self._session.empty(x, total, dtype=x.dtype)
        self._session.call(lambda x, whole: self._mesh.gather_into(x, whole, total), x, whole)
        return whole


def _reason(error: Exception) -> str:
    """Returns the error's text without gloo's source location and its generic advice."""
    return str(error).split("] ", 1)[-1].split(". This is typically", 1)[0]


def _address(rendezvous: str) -> tuple[str, int]:
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"the rendezvous {rendezvous!r} is not HOST:PORT: use an address such as 127.0.0.1:29500")
    return host.strip("[]"), int(port)


def _store(host: str, port: int, place: RankPlace, timeout: float) -> TCPStore:
    """Returns the store through which ranks exchange addresses. Rank 0 serves it, and listens at `host` only."""
    seconds, world = timedelta(seconds=timeout), place.split.world
    if place.rank:
        return TCPStore(host, port, world, False, seconds)
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listening = socket.create_server((host, port), family=family).detach()
    return TCPStore(host, port, world, True, seconds, master_listen_fd=listening)


def _own_address(host: str, port: int) -> str:
    """Returns this machine's address on the route to `host`."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
