"""The first frames of a connection between a front and an engine: versions, and that both have the same key.

    engine -> front   EngineHello: its versions, and a random challenge
    front -> engine   Greeting: its versions, a challenge, and an HMAC of both challenges
    engine -> front   Welcome with another HMAC of them, or Refusal

The key itself is never sent, and a recorded connection proves nothing later. What follows is neither encrypted nor
signed: that is what TLS is for.
"""

import asyncio
import hmac
import secrets
import time
from hashlib import sha256
from typing import TypeVar

import msgspec

from penstock.engine.link.wire import LINK_VERSION
from penstock.engine.remote.tcp import TcpConnection
from penstock.messages import EngineError
from penstock.version import __version__

SECONDS = 5.0  # for the whole handshake
_CHALLENGE_BYTES = 32


class WrongKey(EngineError):
    """The two ends have different keys, or different versions. To try again is of no use until one is changed."""


class EngineHello(msgspec.Struct, frozen=True, tag=True):
    link: int  # version of the messages
    version: str  # of penstock, for people
    challenge: bytes


class Greeting(msgspec.Struct, frozen=True, tag=True):
    link: int
    version: str
    front: str  # a name for the log
    challenge: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag=True):
    proof: bytes


class Refusal(msgspec.Struct, frozen=True, tag=True):
    reason: str


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(EngineHello | Greeting | Welcome | Refusal)
M = TypeVar("M")


class EngineEnd:
    """The engine's frames. `hello` comes first."""

    def __init__(self, key: str) -> None:
        self._key, self._challenge = key, secrets.token_bytes(_CHALLENGE_BYTES)
        self.hello = _encode(EngineHello(LINK_VERSION, __version__, self._challenge))

    def judge(self, frame: bytes) -> tuple[bytes, str, str]:
        """Return the answer to a greeting, the front's name, and why it may not connect, "" if it may. Raises
        EngineError for anything but a greeting."""
        greeting = _read(frame, Greeting)
        challenges, reason = self._challenge + greeting.challenge, ""
        if greeting.link != LINK_VERSION:
            reason = _versions("front", greeting.link, greeting.version)
        elif len(greeting.challenge) != _CHALLENGE_BYTES or not _proves(
            self._key, b"front", challenges, greeting.proof
        ):
            reason = "the front's key is not this engine's: give both the same PENSTOCK_FLEET_KEY"
        answer = Refusal(reason) if reason else Welcome(_proof(self._key, b"engine", challenges))
        return _encode(answer), greeting.front, reason


class FrontEnd:
    """The front's frames."""

    def __init__(self, key: str, front: str) -> None:
        """`front` is its name, for the engine's log."""
        self._key, self._front, self._challenges = key, front, b""

    def greet(self, frame: bytes) -> bytes:
        """Return the answer to an engine's hello. Raises WrongKey and EngineError."""
        hello = _read(frame, EngineHello)
        if hello.link != LINK_VERSION:
            raise WrongKey(_versions("engine", hello.link, hello.version))
        challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        self._challenges = hello.challenge + challenge
        proof = _proof(self._key, b"front", self._challenges)
        return _encode(Greeting(LINK_VERSION, __version__, self._front, challenge, proof))

    def check(self, frame: bytes) -> None:
        """Check the engine's answer to a greeting. Raises WrongKey and EngineError."""
        if not _proves(self._key, b"engine", self._challenges, _read(frame, Welcome).proof):
            raise WrongKey("the engine has not proved that it has the key: give both the same PENSTOCK_FLEET_KEY")


async def admit(connection: TcpConnection, key: str) -> str:
    """Let a front in, at the engine's end. Returns its name. Raises EngineError with the reason if it may not."""
    async with asyncio.timeout(SECONDS):
        end = EngineEnd(key)
        connection.send(end.hello)
        answer, front, refused = end.judge(await connection.frame())
        connection.send(answer)
        if refused:
            raise EngineError(refused)
        return front


async def introduce(connection: TcpConnection, key: str, front: str) -> None:
    """Be let in by an engine, at the front's end. Raises WrongKey, and EngineError if the engine does not answer."""
    async with asyncio.timeout(SECONDS):
        end = FrontEnd(key, front)
        connection.send(end.greet(await connection.frame()))
        began = time.monotonic()
        end.check(await connection.frame())
        connection.measure(time.monotonic() - began)


def _read(frame: bytes, kind: type[M]) -> M:
    try:
        message = _decoder.decode(frame)
    except msgspec.DecodeError:
        raise EngineError("the other end does not speak this protocol: is it a penstock engine?") from None
    if isinstance(message, Refusal):
        raise WrongKey(message.reason)
    if not isinstance(message, kind):
        raise EngineError("the other end does not keep to the protocol")
    return message


def _versions(other: str, link: int, version: str) -> str:
    return (
        f"the {other} is penstock {version} and speaks version {link} of the link, this is penstock {__version__} with "
        f"version {LINK_VERSION}: update the older one"
    )


def _proof(key: str, role: bytes, challenges: bytes) -> bytes:
    return hmac.digest(key.encode(), role + challenges, sha256)


def _proves(key: str, role: bytes, challenges: bytes, proof: bytes) -> bool:
    return hmac.compare_digest(_proof(key, role, challenges), proof)
