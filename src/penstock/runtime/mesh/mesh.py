"""The ranks that share a model, and the tensors that travel between them: nothing else does here.

Ranks of a stage sum and gather; a rank sends hidden states to the one with the same tensor rank in the next stage.
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

from penstock.config import Place
from penstock.config.split import part
from penstock.kernels.native.session import Session
from penstock.models import Collectives
from penstock.runtime.mesh.device_links import DeviceLink, ExchangeLimits
from penstock.runtime.mesh.process_groups import BACKENDS, GroupRankLink, GroupStageLink
from penstock.runtime.mesh.shared_memory import SharedMemory, SharedRankLink, SharedStageLink, share

SHARED = "shared memory"  # for people
START_SECONDS = 1800.0  # for all ranks to come: those with more weights to read, or slower disks, are waited for

log = logging.getLogger(__name__)


class MeshError(RuntimeError):
    """Ranks did not come together. The message names this rank, what it did with whom, and what went wrong."""


@dataclass
class Traffic:
    """Bytes of tensors that a rank has handed over. What is summed or sent counts once, whoever gets it."""

    sum: int = 0
    gather: int = 0
    send: int = 0


class RankLink(Protocol):
    """How the tensor ranks of a stage exchange tensors. All make the same calls, with as many rows, in the same order.
    RuntimeError or TimeoutError where a rank does not come."""

    def sum(self, x: Tensor) -> None:
        """Every rank's x [rows, width] added in rank order, in the place of each."""
        ...

    def gather(self, x: Tensor, whole: Tensor | None, columns: Sequence[range]) -> None:
        """Each rank's x [rows, len(columns[rank])] into those columns of the first rank's `whole`; None on others."""
        ...


class StageLink(Protocol):
    """How hidden states get from a stage to the next. Errors are as for RankLink."""

    def send(self, x: Tensor) -> None:
        """Does not wait until x is taken, unless as many as there are stages are on their way; x may be overwritten."""
        ...

    def receive(self, x: Tensor) -> None:
        """Fill x with what was sent next; it has that shape and dtype."""
        ...


class Mesh:
    """One rank's way to the others. One thread calls; the ranks of a stage call the same, in the same order."""

    def __init__(
        self,
        place: Place,
        rendezvous: str,
        *,
        message_bytes: int,
        backend: str = "gloo",
        limits: ExchangeLimits | None = None,
        timeout: float = 120.0,
        start_timeout: float = START_SECONDS,
    ) -> None:
        """Meets the other ranks at `rendezvous`, "HOST:PORT" of a store that rank 0 keeps, within `start_timeout`
        seconds. After that nothing may take longer than `timeout` seconds. A stage sends at most `message_bytes` of
        hidden states at once. Ranks that are on one machine use memory that they share.

        With `limits`, tensors are on devices, and travel by the backend alone, in the order of a device's work.

        Raises MeshError where they do not all come, ValueError for what is no address or an unknown backend.
        """
        if backend not in BACKENDS:
            raise ValueError(f"no backend {backend!r}: use {' or '.join(BACKENDS)}")
        self.place = place
        self.traffic = Traffic()
        self._link: RankLink | DeviceLink | None = None  # to the other ranks of this stage,
        self._before: StageLink | None = None  # from the stage before,
        self._after: StageLink | None = None  # and to the next
        host, port = _address(rendezvous)
        split, began = place.split, time.perf_counter()
        try:
            self._store: TCPStore | None = _store(host, port, place, start_timeout)
            here = _own_address(host, port)
            meeting = _Meeting(place, self._store, here, backend, limits, start_timeout, timeout)
            if split.tensor > 1:
                self._link = meeting.link()
            if not place.first:
                self._before = meeting.stage_link(place.stage - 1, 1, message_bytes)
            if not place.last:
                self._after = meeting.stage_link(place.stage, 0, message_bytes)
        except (RuntimeError, OSError) as error:
            waited = time.perf_counter() - began
            raise MeshError(
                f"{self._name} did not meet all of {split.world} ranks at {rendezvous} in {waited:.1f} s: {error}"
            ) from error

    def sum(self, x: Tensor) -> None:
        """See `Collectives`. The bits depend neither on how tensors travel nor on the number of rows."""
        if self._link is None:
            return
        with self._doing("sum", x, self._stage):
            self._link.sum(x)
        self.traffic.sum += x.nbytes

    def gather(self, x: Tensor, total: int) -> Tensor | None:
        """See `Collectives`."""
        whole = x.new_empty(len(x), total) if self.place.tensor_rank == 0 else None
        self.gather_into(x, whole, total)
        return whole

    def gather_into(self, x: Tensor, whole: Tensor | None, total: int) -> None:
        """`gather`, with memory for its result on the first rank, and None on the others."""
        if self._link is None:
            raise ValueError("there is nobody to gather from: this rank has whole layers")
        columns = [part(total, len(self._stage), rank) for rank in range(len(self._stage))]
        with self._doing("gather", x, self._stage):
            self._link.gather(x, whole, columns)
        if whole is None:
            self.traffic.gather += x.nbytes

    @property
    def shares_tokens(self) -> bool:
        """Whether the ranks of this stage get sampled tokens by `share`: the last stage's, on devices. Other ranks
        learn them with a plan."""
        return self.place.last and isinstance(self._link, DeviceLink)

    def share(self, x: Tensor) -> None:
        """Give the first rank's x to every tensor rank of a stage on devices."""
        if self._link is None:
            return
        if not isinstance(self._link, DeviceLink):
            raise ValueError("ranks on processors share no tokens: they learn them with a plan")
        with self._doing("share", x, self._stage):
            self._link.share(x)

    def least(self, what: str, number: int) -> int:
        """The least of what all ranks say, each of them once, of `what`. MeshError where one does not."""
        world = self.place.split.world
        try:
            self._store.set(f"{what} {self.place.rank}", str(number))
            return min(int(self._store.get(f"{what} {rank}")) for rank in range(world))
        except RuntimeError as error:
            raise MeshError(f"{self._name}: not all of {world} ranks said their {what}: {_reason(error)}") from error

    def send(self, x: Tensor) -> None:
        """Hand hidden states [tokens, hidden] to the next stage: see StageLink."""
        if self._after is None:
            raise ValueError("there is no stage after this one")
        with self._doing("send", x, self._neighbour(1)):
            self._after.send(x)
        self.traffic.send += x.nbytes

    def receive(self, x: Tensor) -> None:
        """Take hidden states [tokens, hidden] from the stage before: see StageLink."""
        if self._before is None:
            raise ValueError("there is no stage before this one")
        with self._doing("receive", x, self._neighbour(-1)):
            self._before.receive(x)

    def close(self) -> None:
        """Leave. What others still expect of this rank fails, with them."""
        self._link = self._before = self._after = self._store = None

    @property
    def _name(self) -> str:
        return f"rank {self.place.rank} (stage {self.place.stage}, tensor rank {self.place.tensor_rank})"

    @property
    def _stage(self) -> range:
        """The ranks of this stage."""
        tensor = self.place.split.tensor
        return range(self.place.stage * tensor, (self.place.stage + 1) * tensor)

    def _neighbour(self, stages: int) -> range:
        """The rank with this tensor rank so many stages on."""
        rank = self.place.rank + stages * self.place.split.tensor
        return range(rank, rank + 1)

    @contextmanager
    def _doing(self, what: str, x: Tensor, ranks: Sequence[int]) -> Iterator[None]:
        """Says what could not be done."""
        began = time.perf_counter()
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            shape = " x ".join(map(str, x.shape))
            others = ", ".join(str(rank) for rank in ranks if rank != self.place.rank)
            raise MeshError(
                f"{self._name}: {what} of {shape} numbers with rank {others} failed after "
                f"{time.perf_counter() - began:.1f} s: {_reason(error)}"
            ) from error


@dataclass(frozen=True)
class _Meeting:
    """How a rank comes to its links and lanes. All that are to have one ask for it."""

    place: Place
    store: TCPStore
    here: str  # this machine's address
    backend: str
    limits: ExchangeLimits | None
    start_timeout: float
    timeout: float

    def link(self) -> "RankLink | DeviceLink":
        """Between the tensor ranks of this rank's stage."""
        name, ranks = f"stage {self.place.stage}", (self.place.tensor_rank, self.place.split.tensor)
        memory = self._memory(name, *ranks, SharedRankLink.size(self.place.split.tensor))
        if memory:
            return SharedRankLink(memory, *ranks, self.timeout)
        group = self._join(name, *ranks)
        return DeviceLink(group, *ranks, self.limits) if self.limits else GroupRankLink(group, *ranks, self.timeout)

    def stage_link(self, stage: int, rank: int, message_bytes: int) -> StageLink:
        """From a stage to the next; the sender is rank 0."""
        name, plans = f"lane {self.place.tensor_rank} from stage {stage}", self.place.split.pipeline
        memory = self._memory(name, rank, 2, plans * message_bytes)
        if memory:
            return SharedStageLink(memory, plans, self.timeout)
        timeout = self.timeout if BACKENDS[self.backend].waits else None
        return GroupStageLink(self._join(name, rank, 2), plans, timeout)

    def _memory(self, name: str, rank: int, ranks: int, size: int) -> SharedMemory | None:
        """Where it can be shared. That of a device is not."""
        memory = None if self.limits else share(PrefixStore(name, self.store), rank, ranks, size)
        if rank == self.place.tensor_rank == 0:
            log.info("%s: tensors go through %s", name, SHARED if memory else self.backend)
        return memory

    def _join(self, name: str, rank: int, ranks: int) -> Any:
        timeouts = self.start_timeout, self.timeout
        return BACKENDS[self.backend].join(PrefixStore(name, self.store), rank, ranks, self.here, *timeouts)


def collectives(mesh: Mesh | None, session: Session | None) -> Collectives | None:
    """What a rank's model needs of the mesh: nothing where it has its layers to itself."""
    if mesh is None or mesh.place.split.tensor == 1:
        return None
    return mesh if session is None else SessionCollectives(mesh, session)


class SessionCollectives:
    """A mesh's collectives, called at once or recorded, as the session's ops are."""

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
    """Without gloo's place in its sources, and its good wishes."""
    return str(error).split("] ", 1)[-1].split(". This is typically", 1)[0]


def _address(rendezvous: str) -> tuple[str, int]:
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"the rendezvous {rendezvous!r} is no HOST:PORT, as 127.0.0.1:29500 is")
    return host.strip("[]"), int(port)


def _store(host: str, port: int, place: Place, timeout: float) -> TCPStore:
    """Where ranks find each other. It listens at that address alone."""
    seconds, world = timedelta(seconds=timeout), place.split.world
    if place.rank:
        return TCPStore(host, port, world, False, seconds)
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listening = socket.create_server((host, port), family=family).detach()
    return TCPStore(host, port, world, True, seconds, master_listen_fd=listening)


def _own_address(host: str, port: int) -> str:
    """Of this machine, as whoever is at `host` sees it."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
