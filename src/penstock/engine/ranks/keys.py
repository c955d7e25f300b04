"""CurveZMQ keys (RFC 26): an engine and its ranks on other machines accept connections from each other only."""

import msgspec
import zmq
from zmq.utils import z85

ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # libzmq sends the keys of every new connection there (RFC 27)


class RankKeys(msgspec.Struct, frozen=True):
    """The keys of one rank: its own pair, and its engine's public key. 40 printable characters each."""

    engine: str
    public: str
    secret: str

    def __repr__(self) -> str:
        return f"RankKeys(public={self.public!r})"  # no secret in logs and tracebacks

    def apply(self, socket: "zmq.Socket[bytes]") -> None:
        """Set the keys of a socket. Must be called before it connects."""
        socket.curve_serverkey = self.engine.encode()
        socket.curve_publickey = self.public.encode()
        socket.curve_secretkey = self.secret.encode()


class EngineKeys:
    """A new key pair of an engine, and one for each of its ranks."""

    def __init__(self, world: int) -> None:
        public, self.secret = zmq.curve_keypair()
        pairs = [zmq.curve_keypair() for _ in range(world)]
        self.ranks = [RankKeys(public.decode(), mine.decode(), secret.decode()) for mine, secret in pairs]
        self.allowed = {z85.decode(mine) for mine, _ in pairs}


class KeyChecker:
    """Refuses connections whose key is not one of the ranks'. Call `reply` whenever `requests` is readable."""

    def __init__(
        self, keys: EngineKeys, socket: "zmq.Socket[bytes]", context: "zmq.Context[zmq.Socket[bytes]]"
    ) -> None:
        """`socket` belongs to `context` and is not bound yet."""
        self._keys = keys
        self.requests = context.socket(zmq.REP)
        self.requests.linger = 0
        self.requests.bind(ZAP_ENDPOINT)
        socket.curve_server = True
        socket.curve_secretkey = keys.secret

    def reply(self) -> None:
        """Accept or refuse one connection."""
        version, number, _, _, _, mechanism, *credentials = self.requests.recv_multipart()
        known = mechanism == b"CURVE" and len(credentials) == 1 and credentials[0] in self._keys.allowed
        status = (b"200", b"OK", b"rank") if known else (b"400", b"unknown key", b"")
        self.requests.send_multipart((version, number, *status, b""))
