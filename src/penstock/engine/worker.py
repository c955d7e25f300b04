"""A rank in a process of its own: python -m penstock.engine.worker ENDPOINT RANK

Started by local_ranks.py or ray_ranks.py, whose socket is at ENDPOINT; for one that other machines can reach, the keys
come over standard input. That then stays open and empty: its end means that whoever started us is gone. Two sockets, as
two threads use them: the main one takes orders and executes plans, the other beats.
"""

import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Protocol

import msgspec
import zmq

from penstock.config import EngineConfig, Place, detect_hardware
from penstock.engine.child import STDIN, die_at_end_of_input, die_with_parent, remove_socket
from penstock.engine.curve import RankKeys
from penstock.engine.rank_wire import (
    Beat,
    Done,
    Execute,
    Failed,
    Hello,
    Loaded,
    Report,
    Start,
    decode_order,
    encode,
    identity,
)
from penstock.engine.reason import for_user, reason_for
from penstock.messages import Capacity, StepPlan, StepResult

BEAT_SECONDS = 0.25
LINGER_MS = 1000  # for the last word to get through
OURS = "penstock."
MESH = "penstock.runtime.mesh"

log = logging.getLogger(__name__)


class Runner(Protocol):
    """The part of the model that a rank holds."""

    @property
    def capacity(self) -> Capacity: ...

    def execute(self, plan: StepPlan) -> StepResult | None:
        """The result on the rank that samples; None on others, which `learn` it before a plan that needs it."""
        ...

    def learn(self, result: StepResult) -> None: ...


Load = Callable[[EngineConfig, Place, str, Sequence[int]], Runner]


class Pulse(threading.Thread):
    """Says what the thread that made it is doing, for as long as the process lives. The socket is its own."""

    def __init__(self, socket: "zmq.Socket[bytes]", rank: int, mesh: str) -> None:
        super().__init__(name="pulse", daemon=True)
        self.doing = "starting"
        self.plans = 0
        self._rank = rank
        self._mesh = mesh
        self._subject = threading.get_ident()
        self._socket = socket

    def run(self) -> None:
        pause = threading.Event()
        while True:
            at, waits = place_in_code(sys._current_frames().get(self._subject), self._mesh)
            try:
                self._socket.send(encode(Beat(self._rank, self.plans, self.doing, at, waits)), zmq.NOBLOCK)
            except zmq.Again:
                pass  # an engine that does not listen needs no beats either
            pause.wait(BEAT_SECONDS)


def work(load: Load, mesh: str = MESH) -> int:
    """Be a rank until the engine ends this process, or something fails; the exit status.

    Who is in a function of the module `mesh` waits for other ranks.
    """
    endpoint, rank = sys.argv[1], int(sys.argv[2])
    logging.basicConfig(
        format=f"rank {rank} %(levelname)s %(name)s: %(message)s", level=logging.INFO, stream=sys.stderr
    )
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches us too; the client decides what it means
    keys = read_keys() if endpoint.startswith("tcp:") else None
    begun = threading.Event()
    die_at_end_of_input(lambda: None if begun.is_set() else remove_socket(endpoint))
    context = zmq.Context()
    orders = connect(context, endpoint, keys, name=identity(rank))
    orders.linger = LINGER_MS
    pulse = Pulse(connect(zmq.Context(), endpoint, keys), rank, mesh)  # which beats still when the other context ends
    port = hold_port()

    def tell(report: Report) -> None:
        orders.send(encode(report))

    pulse.start()
    tell(Hello(os.getpid(), detect_hardware().memory_available, port.getsockname()[1]))
    try:
        start = decode_order(orders.recv())
        if not isinstance(start, Start):
            raise RuntimeError(f"the first order was {type(start).__name__}, not Start")
        begun.set()
        die_with_parent()  # before, the socket's file would have stayed behind
        logging.getLogger().setLevel(start.config.log_level.upper())
        obey(start, orders, pulse, load, tell)
    except Exception as error:
        waits = waited(error, mesh)
        reason = reason_for(error)
        # Where it came from is plain then, and the fault another's.
        tell(Failed(pulse.doing, reason.splitlines()[0] if waits else reason, for_user(error), waits))
        orders.close()
        context.term()  # when it has been sent
    return 1


def obey(start: Start, orders: "zmq.Socket[bytes]", pulse: Pulse, load: Load, tell: Callable[[Report], None]) -> None:
    """Load, then execute plans as they come, without end."""
    processors = share_of_processors(sorted(os.sched_getaffinity(0)), start.share, start.config.threads)
    os.sched_setaffinity(0, processors)  # of this thread, and those it starts: the ones that compute
    place = Place(start.config.split, start.rank)
    pulse.doing = "loading"
    runner = load(start.config, place, start.rendezvous, start.num_blocks)
    tell(Loaded(runner.capacity))
    while True:
        pulse.doing = "waiting for a plan"
        order = decode_order(orders.recv())
        if not isinstance(order, Execute):
            raise RuntimeError(f"an order was {type(order).__name__}, not Execute")
        pulse.doing = f"plan {order.plan.plan_id}"
        if not place.reports:
            for result in order.learned:
                runner.learn(result)
        done = runner.execute(order.plan)
        if place.reports:
            if done is None:
                raise RuntimeError(f"plan {order.plan.plan_id} gave no result on the rank that reports")
            tell(Done(done))
        pulse.plans += 1


def connect(
    context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, keys: RankKeys | None, name: bytes = b""
) -> "zmq.Socket[bytes]":
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    if name:
        socket.setsockopt(zmq.ROUTING_ID, name)
    if keys is not None:
        keys.apply(socket)
    socket.connect(endpoint)
    return socket


def read_keys() -> RankKeys:
    """The first line of standard input. msgspec.DecodeError where it ends before."""
    with open(STDIN, "rb", closefd=False) as stdin:
        return msgspec.json.decode(stdin.readline(), type=RankKeys)


def place_in_code(frame: FrameType | None, mesh: str) -> tuple[str, bool]:
    """(the innermost of our functions on a stack, whether it waits for other ranks)."""
    at, waits = "", False
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(OURS) or module == mesh:
            at = at or f"{module.removeprefix(OURS)}:{frame.f_lineno} in {frame.f_code.co_name}"
            waits = waits or module == mesh
        frame = frame.f_back
    return at, waits


def waited(error: Exception, mesh: str) -> bool:
    """Whether an error came out of waiting for other ranks."""
    return any(frame.f_globals.get("__name__") == mesh for frame, _ in traceback.walk_tb(error.__traceback__))


def share_of_processors(processors: Sequence[int], share: tuple[int, int], threads: int) -> Sequence[int]:
    """Those of a machine that one of its ranks runs on: equal parts, so that ranks do not stand in each other's way.
    All of them, where a part has no room for a rank's `threads` (0: as many as there are)."""
    index, ranks = share
    size = len(processors) // ranks
    return processors[index * size : (index + 1) * size] if size >= max(threads, 1) else processors


def hold_port() -> socket.socket:
    """A TCP port that nobody else is given while this is open, so that it is free still when the weights are read. Who
    asks for that very one, with SO_REUSEADDR, may listen on it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


def load_rank(config: EngineConfig, place: Place, rendezvous: str, num_blocks: Sequence[int]) -> Runner:
    from penstock.runtime import load_host_runner  # here and not above: it imports torch

    return load_host_runner(config, place, rendezvous, num_blocks)


if __name__ == "__main__":
    sys.exit(work(load_rank))
