"""The engine's end of the sockets of its ranks."""

import logging
import math

import msgspec
import zmq

from penstock.engine.curve import Door, Guard
from penstock.engine.rank_wire import Beat, Report, decode_report, identity
from penstock.messages import EngineError

log = logging.getLogger(__name__)


class RankSocket:
    """One socket for all: orders find their rank by its identity, reports come from anyone who was let in.

    Bound to `address`, as "ipc:///path/of/file" or "tcp://10.0.0.1:*"; with a guard, who has no key is not let in.
    """

    def __init__(self, world: int, address: str, guard: Guard | None = None) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.sndhwm = 0  # bounded by the plans that may be outstanding
        self._ranks = {identity(rank): rank for rank in range(world)}
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._door = Door(guard, self._socket, self._context) if guard else None
        if self._door:
            self._poller.register(self._door.questions, zmq.POLLIN)
        self._socket.bind(address)

    @property
    def endpoint(self) -> str:
        """What ranks connect to."""
        return self._socket.get_string(zmq.LAST_ENDPOINT)

    def watch(self, descriptor: int) -> None:
        """Let `receive` return when this becomes readable, once: it stays so."""
        self._poller.register(descriptor, zmq.POLLIN)

    def send(self, rank: int, frame: bytes) -> None:
        """Never waits. What is sent to a rank that has gone is lost; its end is noticed elsewhere."""
        self._socket.send_multipart((identity(rank), frame), zmq.NOBLOCK)

    def receive(self, seconds: float) -> list[tuple[int, Report]]:
        """Reports that have come, with their ranks; waits for one, or for a watched descriptor, so long at most."""
        reports: list[tuple[int, Report]] = []
        ready = dict(self._poller.poll(math.ceil(seconds * 1000)))
        for source in ready:
            if isinstance(source, int):
                self._poller.unregister(source)
        if self._door and self._door.questions in ready:
            self._door.answer()
        while True:
            try:
                sender, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return reports
            try:
                report = decode_report(frame)
            except msgspec.DecodeError as error:
                raise EngineError(f"a rank sent what cannot be read, is it of another version? {error}") from error
            rank = report.rank if isinstance(report, Beat) else self._ranks.get(sender)
            if rank is None:
                log.error("ignored a %s of nobody we know", type(report).__name__)
            else:
                reports.append((rank, report))

    def close(self) -> None:
        if self._door:
            self._door.questions.close()
        self._socket.close()
        self._context.term()
