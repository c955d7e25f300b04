"""Pages of KV blocks between engines, over TCP or TLS, each connection for the blocks of one request.

The two ends first prove to each other that they have the same key, as a front and an engine do (remote/handshake.py).
Then the reader sends a `WantedBlocks`, and gets pages in its order, each after a header with its key, length and
checksum, as in a file of the disk tier. The engine closes when no more will come. It sends an empty header while it has
nothing to send, so either end notices within SILENCE_SECONDS that the other has stopped.

Threads do all this: sockets block, and pages are sent from and received into the memory of leased blocks.
"""

import contextlib
import logging
import queue
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from functools import partial

import msgspec

from penstock.config.addresses import split_address
from penstock.config.engine import PageAccess
from penstock.engine.remote.handshake import EngineEnd, FrontEnd
from penstock.engine.remote.tcp import BEAT_SECONDS, FIRST_FRAME_BYTES, SILENCE_SECONDS
from penstock.engine.tier.files import HEADER, is_page, page_header
from penstock.engine.tier.lender import Lender, Loan
from penstock.engine.tier.reader import LONGEST_WAIT
from penstock.engine.tier.worker import Jobs, JobThread, Results, give_way
from penstock.messages import EngineError, PagesAt

MOST_READERS = 64  # connections at a time
MOST_WANTED_BYTES = 16 << 20  # of a `WantedBlocks`: half a million blocks
BLOCKS_AT_ONCE = 64  # handed to a thread that reads
BEAT = bytes(HEADER.size)
_LENGTH = struct.Struct("<I")
_FAMILIES = (socket.AF_INET, socket.AF_INET6)

log = logging.getLogger(__name__)


class WantedBlocks(msgspec.Struct, frozen=True, array_like=True):
    """The blocks that a reader asks for, by key, of an engine with this `Identity.fingerprint`. `request_id` names the
    request that computes them at the other engine; "": none does."""

    fingerprint: str
    request_id: str
    keys: list[bytes]


_decoder = msgspec.msgpack.Decoder(WantedBlocks)


class PageServer:
    """Sends the blocks of this engine to others that have the key."""

    def __init__(
        self, access: PageAccess, fingerprint: str, lender: Lender, results: Results, wake: Callable[[], None]
    ) -> None:
        """Listen. The engine's thread calls what comes out of `results`; `wake` makes it do so soon. Raises OSError,
        and ValueError for a certificate that cannot be used."""
        self._key, self._fingerprint = access.key, fingerprint
        self._lender, self._results, self._wake = lender, results, wake
        self._tls = _server_tls(access)
        self._socket = socket.create_server((access.host, access.port), family=_FAMILIES[":" in access.host])
        self.port: int = self._socket.getsockname()[1]
        self._readers: set[socket.socket] = set()
        threading.Thread(target=self._accept, name="kv-peers", daemon=True).start()

    def close(self) -> None:
        """Accept nothing more, and close all connections."""
        for each in (self._socket, *self._readers):
            _shut(each)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                reader, _ = self._socket.accept()
            except OSError:
                return  # closed
            if len(self._readers) >= MOST_READERS:
                reader.close()
                continue
            self._readers.add(reader)
            threading.Thread(target=self._serve, args=(reader,), name="kv-peer", daemon=True).start()

    def _serve(self, reader: socket.socket) -> None:
        """Run one connection to its end."""
        give_way()
        connection = reader
        try:
            connection.settimeout(SILENCE_SECONDS)
            if self._tls is not None:
                connection = self._tls.wrap_socket(reader, server_side=True)
                self._readers.discard(reader)
                self._readers.add(connection)
            wanted = self._admit(connection)
            loan = Loan(wanted.keys, wanted.request_id)
            self._results.put(partial(self._lender.open, loan))
            self._wake()
            try:
                self._send(connection, loan)
            finally:
                self._results.put(partial(self._lender.close, loan))
        except (OSError, EngineError, msgspec.DecodeError) as error:
            log.info("an engine that reads KV blocks was lost: %s", error)
        finally:
            connection.close()
            self._readers.discard(connection)

    def _admit(self, connection: socket.socket) -> WantedBlocks:
        """Return what the reader wants. Raises OSError, EngineError and msgspec.DecodeError."""
        end = EngineEnd(self._key)
        _send_frame(connection, end.hello)
        answer, _, refused = end.judge(_read_frame(connection, FIRST_FRAME_BYTES))
        _send_frame(connection, answer)
        if refused:
            raise EngineError(refused)
        wanted: WantedBlocks = _decoder.decode(_read_frame(connection, MOST_WANTED_BYTES))
        if wanted.fingerprint != self._fingerprint:
            raise EngineError("it has other weights or numerics")
        return wanted

    def _send(self, connection: socket.socket, loan: Loan) -> None:
        """Send the pages that are lent, until no more will come or the reader has left. Raises OSError."""
        while True:
            try:
                lent = loan.pages.get(timeout=BEAT_SECONDS)
            except queue.Empty:
                connection.sendall(BEAT)
                continue
            if lent is None:
                return
            connection.sendall(page_header(lent.key, lent.page))
            connection.sendall(lent.page)
            self._results.put(partial(self._lender.sent_page, loan, lent.block))


class PeerPages:
    """The PageSource of one request: another engine that has its blocks, or computes them."""

    def __init__(
        self, where: PagesAt, access: PageAccess, fingerprint: str, results: Results, count: Callable[[bool], None]
    ) -> None:
        """`access` has the key, and what makes a certificate trusted. `count` is called for each block: True for one
        that has come, and False once if the others did not."""
        self._where, self._access, self._fingerprint = where, access, fingerprint
        self._count = count
        self._connection: socket.socket | None = None  # of the thread
        self._lock = threading.Lock()  # between `end` and the thread that connects
        self._ended = self._failed = False
        self._results = results
        self.jobs: Jobs  # from `begin` on
        self.at_once, self.stalled_seconds = BLOCKS_AT_ONCE, LONGEST_WAIT

    # -- on the engine's thread -----------------------------------------------------------------------------------

    def leading(self, keys: list[bytes]) -> int:
        """See PageSource. The other end says when a block will not come."""
        return len(keys)

    def patience(self, tokens: int, prefill_rate: float) -> float:
        """See PageSource. The front has compared the times when it named the other engine."""
        return LONGEST_WAIT

    def begin(self, keys: list[bytes]) -> None:
        self.jobs = self._thread = JobThread("kv-peer", self._results)
        self.jobs.submit(partial(self._connect, keys), lambda _: None)

    def done(self, key: bytes, seconds: float) -> None:
        if seconds or not self._failed:
            self._count(seconds > 0.0)
        self._failed = self._failed or not seconds

    def end(self) -> None:
        """See PageSource. A read that blocks fails at once."""
        with self._lock:
            self._ended = True
            if self._connection is not None:
                _shut(self._connection)
        self.jobs.submit(self._close, lambda _: None)
        self._thread.close(0.0)

    # -- on the thread --------------------------------------------------------------------------------------------

    def read(self, key: bytes, page: memoryview) -> float:
        began = time.perf_counter()
        if self._connection is None:
            return 0.0
        try:
            header = BEAT
            while header == BEAT:
                header = _read(self._connection, HEADER.size)
            _read_into(self._connection, page)
        except OSError as error:
            log.info("engine %s sends no more KV blocks: %s", self._where.address, error)
        else:
            if is_page(header, key, page):
                return time.perf_counter() - began
            log.warning("engine %s has sent a KV block that is damaged or of another text", self._where.address)
        self._close()
        return 0.0

    def _connect(self, keys: list[bytes]) -> None:
        """Connect, and send what is wanted. After a failure `read` returns 0."""
        address = self._where.address
        try:
            host, port = split_address(address)
            connection = socket.create_connection((host, port), SILENCE_SECONDS)
            with self._lock:
                self._connection = connection
                if self._ended:
                    raise OSError("the request waits no longer")
            if self._access.authority:
                tls = ssl.create_default_context(cafile=self._access.authority)
                self._connection = connection = tls.wrap_socket(connection, server_hostname=host)
            end = FrontEnd(self._access.key, "engine")
            _send_frame(connection, end.greet(_read_frame(connection, FIRST_FRAME_BYTES)))
            end.check(_read_frame(connection, FIRST_FRAME_BYTES))
            _send_frame(
                connection, msgspec.msgpack.encode(WantedBlocks(self._fingerprint, self._where.request_id, keys))
            )
            connection.settimeout(BEAT_SECONDS)
        except (OSError, EngineError, ValueError) as error:
            self._close()
            if not self._ended:
                log.warning("no KV blocks from engine %s, so its prompts are computed here: %s", address, error)

    def _close(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _server_tls(access: PageAccess) -> ssl.SSLContext | None:
    if not access.certificate:
        return None
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        tls.load_cert_chain(access.certificate, access.private_key or None)
    except OSError as error:  # SSLError is one
        raise ValueError(f"--tls-certificate {access.certificate} cannot be used: {error}") from None
    return tls


def _shut(connection: socket.socket) -> None:
    """Let a thread that blocks on a connection return. Not the method of SSLSocket, which takes its state away."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _send_frame(connection: socket.socket, frame: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(frame)) + frame)


def _read_frame(connection: socket.socket, most: int) -> bytes:
    length = _LENGTH.unpack(_read(connection, _LENGTH.size))[0]
    if length > most:
        raise EngineError(f"a frame of {length} bytes is announced, and the limit is {most}")
    return _read(connection, length)


def _read(connection: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    _read_into(connection, memoryview(data))
    return bytes(data)


def _read_into(connection: socket.socket, target: memoryview) -> None:
    """Fill `target`. Raises OSError if the other end closes or stops first. Timeouts are counted, not seconds, so that
    the time in which this process itself was stopped is left out, as on other links."""
    silent = 0.0
    while target:
        try:
            count = connection.recv_into(target)
        except TimeoutError:
            silent += connection.gettimeout() or SILENCE_SECONDS
            if silent >= SILENCE_SECONDS:
                raise
            continue
        silent = 0.0
        if not count:
            raise OSError("the other end has closed the connection")
        target = target[count:]
