"""Keys by which an engine and its ranks on other machines know each other, and nobody else (CurveZMQ, RFC 26)."""

import msgspec
import zmq
from zmq.utils import z85

ZAP = "inproc://zeromq.zap.01"  # where libzmq asks whether a client may connect (RFC 27)


class RankKeys(msgspec.Struct, frozen=True):
    """What one rank needs: its own pair, and the key of the one engine it talks to. 40 printable characters each."""

    engine: str
    public: str
    secret: str

    def __repr__(self) -> str:
        return f"RankKeys(public={self.public!r})"  # logs and tracebacks show no secret

    def apply(self, socket: "zmq.Socket[bytes]") -> None:
        """To a socket that is yet to connect."""
        socket.curve_serverkey = self.engine.encode()
        socket.curve_publickey = self.public.encode()
        socket.curve_secretkey = self.secret.encode()


class Guard:
    """The keys of an engine, made for it alone, and of its ranks: whoever has none of these is turned away."""

    def __init__(self, world: int) -> None:
        public, self.secret = zmq.curve_keypair()
        pairs = [zmq.curve_keypair() for _ in range(world)]
        self.ranks = [RankKeys(public.decode(), mine.decode(), secret.decode()) for mine, secret in pairs]
        self.welcome = {z85.decode(mine) for mine, _ in pairs}


class Door:
    """Where libzmq asks the guard of a socket who may come in. `answer` must be called when `questions` has some."""

    def __init__(self, guard: Guard, socket: "zmq.Socket[bytes]", context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        """`socket` is of `context`, and yet to be bound."""
        self._guard = guard
        self.questions = context.socket(zmq.REP)
        self.questions.linger = 0
        self.questions.bind(ZAP)
        socket.curve_server = True
        socket.curve_secretkey = guard.secret

    def answer(self) -> None:
        """Let in who is waiting, or not."""
        version, number, _, _, _, mechanism, *credentials = self.questions.recv_multipart()
        known = mechanism == b"CURVE" and len(credentials) == 1 and credentials[0] in self._guard.welcome
        status = (b"200", b"OK", b"rank") if known else (b"400", b"unknown key", b"")
        self.questions.send_multipart((version, number, *status, b""))
