"""The engine's end of the sockets of its ranks."""

import logging
import math

import msgspec
import zmq

from penstock.engine.ranks.keys import EngineKeys, KeyChecker
from penstock.engine.ranks.wire import Beat, Report, decode_report, identity
from penstock.messages import EngineError

log = logging.getLogger(__name__)


class RankSocket:
    """One socket for all ranks: an order is routed to its rank by identity, and reports of all ranks are received.

    It is bound to `address`, such as "ipc:///path/of/file" or "tcp://10.0.0.1:*". With `keys`, only ranks that have one
    of them can connect.
    """

    def __init__(self, world: int, address: str, keys: EngineKeys | None = None) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.sndhwm = 0  # bounded by the plans that may be outstanding
        self._ranks = {identity(rank): rank for rank in range(world)}
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._checker = KeyChecker(keys, self._socket, self._context) if keys else None
        if self._checker:
            self._poller.register(self._checker.requests, zmq.POLLIN)
        self._socket.bind(address)

    @property
    def endpoint(self) -> str:
        """The address that ranks connect to."""
        return self._socket.get_string(zmq.LAST_ENDPOINT)

    def watch(self, descriptor: int) -> None:
        """Makes `receive` return when this becomes readable. Once only, since an ended process stays readable."""
        self._poller.register(descriptor, zmq.POLLIN)

    def send(self, rank: int, frame: bytes) -> None:
        """Sends a frame to a rank. Never blocks. A frame to a rank that has ended is lost."""
        self._socket.send_multipart((identity(rank), frame), zmq.NOBLOCK)

    def receive(self, seconds: float) -> list[tuple[int, Report]]:
        """Returns (rank, report) of every report received. Blocks up to `seconds` for one or a watched descriptor."""
        reports: list[tuple[int, Report]] = []
        ready = dict(self._poller.poll(math.ceil(seconds * 1000)))
        for source in ready:
            if isinstance(source, int):
                self._poller.unregister(source)
        if self._checker and self._checker.requests in ready:
            self._checker.reply()
        while True:
            try:
                sender, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return reports
            try:
                report = decode_report(frame)
            except msgspec.DecodeError as error:
                raise EngineError(
                    f"a rank sent a frame that is no report; is it of another version? {error}"
                ) from error
            rank = report.rank if isinstance(report, Beat) else self._ranks.get(sender)
            if rank is None:
                log.error("ignored a %s of an unknown sender", type(report).__name__)
            else:
                reports.append((rank, report))

    def close(self) -> None:
        if self._checker:
            self._checker.requests.close()
        self._socket.close()
        self._context.term()
