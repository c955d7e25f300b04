"""Messages between an engine and the processes of its ranks: msgpack of tagged structs.

Orders go to a rank: Start, then one Execute for each plan, and a Prepare for each grammar. Reports come from it: Hello,
Loaded, then Done for each plan from the one rank that samples, and from every rank a Beat a few times a second. A
RankFailed is a rank's last report.
"""

import msgspec

from penstock.config.engine import EngineConfig
from penstock.messages import Capacity, Grammar, StepPlan, StepResult


class Start(msgspec.Struct, frozen=True, tag=True):
    """Load the part of the model that this rank holds."""

    config: EngineConfig
    rank: int
    rendezvous: str  # HOST:PORT of rank 0, for torch.distributed
    num_blocks: tuple[int, ...]  # per KV group, the same on every rank; none: all measure, and agree
    share: tuple[int, int]  # of its machine's processors and GPUs: which of how many ranks there it is


class Execute(msgspec.Struct, frozen=True, tag=True):
    """Compute a plan, which may build upon the tokens of `learned`: results that came in since the last order."""

    plan: StepPlan
    learned: tuple[StepResult, ...] = ()


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Compile a grammar that a later plan needs. Goes to the rank that samples."""

    grammar: Grammar


Order = Start | Execute | Prepare


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A rank has started and is ready for its Start."""

    pid: int
    memory_available: int  # bytes
    port: int  # a TCP port that it reserves for the rendezvous


class Loaded(msgspec.Struct, frozen=True, tag=True):
    capacity: Capacity


class Done(msgspec.Struct, frozen=True, tag=True):
    result: StepResult


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Says that a rank lives and what it is doing. Its own thread sends it, also while the rank is busy."""

    rank: int
    plans: int  # it has been through so far
    doing: str  # "loading", "plan 17", "waiting for a plan"
    at: str  # the innermost of our own functions, as "models.decoder:88 in forward"
    waits: bool  # in there, for other ranks


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """The rank ends. Nothing follows."""

    doing: str
    reason: str
    for_user: bool  # the reason was written for a user
    waits: bool  # it was waiting for other ranks


Report = Hello | Loaded | Done | Beat | RankFailed

_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(Order)
_reports = msgspec.msgpack.Decoder(Report)


def encode(message: Order | Report) -> bytes:
    return _encoder.encode(message)


def decode_order(frame: bytes) -> Order:
    """Decode an order. Raises msgspec.DecodeError for anything else."""
    order: Order = _orders.decode(frame)
    return order


def decode_report(frame: bytes) -> Report:
    """Decode a report. Raises msgspec.DecodeError for anything else."""
    report: Report = _reports.decode(frame)
    return report


def identity(rank: int) -> bytes:
    """Return the routing id of the socket on which a rank takes orders."""
    return b"rank %d" % rank
