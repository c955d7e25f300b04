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
from torch.distributed import PrefixStore, TCPStore

from penstock.config import Place
from penstock.config.split import part
from penstock.kernels.native.session import Session
from penstock.models import Collectives
from penstock.runtime.process_groups import BACKENDS, GroupLane, GroupLink
from penstock.runtime.shared_memory import SharedLane, SharedLink, share

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


class Link(Protocol):
    """How the tensor ranks of a stage exchange what they have. All call the same, with as many rows, in the same order.
    RuntimeError or TimeoutError where one does not come."""

    def sum(self, x: Tensor) -> None:
        """Every rank's x [rows, width] added in rank order, in the place of each."""
        ...

    def gather(self, x: Tensor, whole: Tensor | None, columns: Sequence[range]) -> None:
        """Each rank's x [rows, len(columns[rank])] into those columns of the first rank's `whole`; None on others."""
        ...


class Lane(Protocol):
    """From a stage to the next. Errors as of a Link."""

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
        timeout: float = 120.0,
        start_timeout: float = START_SECONDS,
    ) -> None:
        """Meets the other ranks at `rendezvous`, "HOST:PORT" of a store that rank 0 keeps, within `start_timeout`
        seconds. After that nothing may take longer than `timeout` seconds. A stage sends at most `message_bytes` of
        hidden states at once. Ranks that are on one machine use memory that they share.

        Raises MeshError where they do not all come, ValueError for what is no address or an unknown backend.
        """
        if backend not in BACKENDS:
            raise ValueError(f"no backend {backend!r}: use {' or '.join(BACKENDS)}")
        self.place = place
        self.traffic = Traffic()
        self._link: Link | None = None  # to the other ranks of this stage,
        self._before: Lane | None = None  # from the stage before,
        self._after: Lane | None = None  # and to the next
        host, port = _address(rendezvous)
        split, began = place.split, time.perf_counter()
        try:
            self._store = _store(host, port, place, start_timeout)
            here = _own_address(host, port)

            def join(name: str, rank: int, ranks: int) -> Any:
                return BACKENDS[backend](PrefixStore(name, self._store), rank, ranks, here, start_timeout, timeout)

            def lane(stage: int, rank: int) -> Lane:
                name, plans = f"lane {place.tensor_rank} from stage {stage}", split.pipeline
                memory = share(PrefixStore(name, self._store), rank, 2, plans * message_bytes)
                if rank == place.tensor_rank == 0:
                    log.info("stage %d sends through %s", stage, SHARED if memory else backend)
                return SharedLane(memory, plans, timeout) if memory else GroupLane(join(name, rank, 2), plans, timeout)

            if split.tensor > 1:
                name, ranks = f"stage {place.stage}", (place.tensor_rank, split.tensor)
                memory = share(PrefixStore(name, self._store), *ranks, SharedLink.size(split.tensor))
                if place.tensor_rank == 0:
                    log.info("%s sums through %s", name, SHARED if memory else backend)
                self._link = (
                    SharedLink(memory, *ranks, timeout) if memory else GroupLink(join(name, *ranks), *ranks, timeout)
                )
            if not place.first:
                self._before = lane(place.stage - 1, 1)
            if not place.last:
                self._after = lane(place.stage, 0)
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

    def send(self, x: Tensor) -> None:
        """Hand hidden states [tokens, hidden] to the next stage: see Lane."""
        if self._after is None:
            raise ValueError("there is no stage after this one")
        with self._doing("send", x, self._neighbour(1)):
            self._after.send(x)
        self.traffic.send += x.nbytes

    def receive(self, x: Tensor) -> None:
        """Take hidden states [tokens, hidden] from the stage before: see Lane."""
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
