"""A rank in a process of its own: python -m penstock.engine.ranks.worker ENDPOINT RANK

Started by local.py or ray_cluster.py, whose socket is at ENDPOINT. For an engine on another machine, the keys come as
the first line of standard input. Standard input then stays open and empty, and ends with the process that started us.
Two threads have a socket each: the main one takes orders and executes plans, the other sends beats.
"""

import faulthandler
import gc
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType

import msgspec
import zmq

from penstock.config import RankPlace, detect_hardware
from penstock.engine.child import STDIN, die_at_end_of_input, die_with_parent, log_to_stderr, remove_socket
from penstock.engine.error_text import error_text, is_for_user
from penstock.engine.grammars import EngineGrammars
from penstock.engine.ranks.keys import RankKeys
from penstock.engine.ranks.runner import RankRunner
from penstock.engine.ranks.wire import (
    Beat,
    Done,
    Execute,
    Hello,
    Loaded,
    Prepare,
    RankFailed,
    Report,
    Start,
    decode_order,
    encode,
    identity,
)
from penstock.engine.signals import block_group_signals
from penstock.runtime.loading.quick_torch import import_torch

BEAT_SECONDS = 0.25
LINGER_MS = 1000  # for the last word to get through
OURS = "penstock."
MESH = "penstock.runtime.mesh.mesh"
DEVICE = "penstock.runtime.device"
LOOK_SECONDS = 50e-6  # between looks for an order and at a device that computes

log = logging.getLogger(__name__)

Load = Callable[[Start], RankRunner]


class Pulse(threading.Thread):
    """Sends beats about the thread that made it, until the process ends. Owns its socket."""

    def __init__(self, socket: "zmq.Socket[bytes]", rank: int, mesh: str) -> None:
        super().__init__(name="pulse", daemon=True)
        self.doing = "starting"
        self.plans = 0
        self.waits = False  # for a device, and so perhaps for other ranks
        self._rank = rank
        self._mesh = mesh
        self._subject = threading.get_ident()
        self._socket = socket

    def run(self) -> None:
        pause = threading.Event()
        while True:
            at, waits = place_in_code(sys._current_frames().get(self._subject), self._mesh)
            beat = Beat(self._rank, self.plans, self.doing, at, waits or self.waits)
            try:
                self._socket.send(encode(beat), zmq.NOBLOCK)
            except zmq.Again:
                pass  # an engine that does not listen needs no beats either
            pause.wait(BEAT_SECONDS)


def work(load: Load, mesh: str = MESH) -> int:
    """Run a rank until the engine kills this process, or something fails. Returns the exit status.

    A rank whose stack has a function of the module `mesh` waits for other ranks.
    """
    endpoint, rank = sys.argv[1], int(sys.argv[2])
    configure_log = log_to_stderr(f"rank {rank}")
    faulthandler.enable()
    block_group_signals()  # a rank on this machine has inherited that, one that Ray started has not
    keys = read_keys() if endpoint.startswith("tcp:") else None
    begun = threading.Event()
    die_at_end_of_input(lambda: None if begun.is_set() else remove_socket(endpoint))
    context = zmq.Context()
    orders = connect(context, endpoint, keys, name=identity(rank))
    orders.linger = LINGER_MS
    pulse = Pulse(connect(zmq.Context(), endpoint, keys), rank, mesh)  # it must still beat when the other context ends
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
        die_with_parent()  # not before, or the socket's file would stay
        configure_log(start.config.log_format, start.config.log_level)
        obey(start, orders, pulse, load, tell)
    except Exception as error:
        waits = waited(error, mesh)
        reason = error_text(error)
        # Another rank is at fault then: its traceback says nothing.
        tell(RankFailed(pulse.doing, reason.splitlines()[0] if waits else reason, is_for_user(error), waits))
        orders.close()
        context.term()  # when it has been sent
    return 1


def obey(start: Start, orders: "zmq.Socket[bytes]", pulse: Pulse, load: Load, tell: Callable[[Report], None]) -> None:
    """Load, then execute plans without end."""
    processors = share_of_processors(sorted(os.sched_getaffinity(0)), start.share, start.config.threads)
    os.sched_setaffinity(0, processors)  # of this thread, and those it starts: the ones that compute
    pulse.doing = "loading"
    runner = load(start)
    tell(Loaded(runner.capacity))
    reports = RankPlace(start.config.split, start.rank).reports
    outstanding: deque[int] = deque()
    while True:
        if not outstanding or (len(outstanding) < runner.max_outstanding and order_comes(runner, orders, pulse)):
            if not outstanding:
                pulse.doing = "waiting for a plan"
            order = decode_order(orders.recv())
            if isinstance(order, Prepare):
                runner.prepare(order.grammar)
                continue
            if not isinstance(order, Execute):
                raise RuntimeError(f"an order was {type(order).__name__}, not Execute")
            pulse.doing = f"plan {order.plan.plan_id}"
            for result in () if reports else order.learned:
                runner.learn(result)
            runner.submit(order.plan)
            outstanding.append(order.plan.plan_id)
        else:
            pulse.doing = f"plan {outstanding[0]}"
            done = runner.take()
            if reports:
                if done is None:
                    raise RuntimeError(f"plan {outstanding[0]} gave no result on the rank that reports")
                tell(Done(done))
            outstanding.popleft()
            pulse.plans += 1


def order_comes(runner: RankRunner, orders: "zmq.Socket[bytes]", pulse: Pulse) -> bool:
    """Wait for an order or the oldest plan's result. Returns True when there is an order. It polls both in turns, as
    nothing can block on a socket and a device at once."""
    pulse.waits = True
    while not (comes := bool(orders.poll(0))) and not runner.ready:
        time.sleep(LOOK_SECONDS)
    pulse.waits = False
    return comes


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
    """Decode the first line of standard input. Raises msgspec.DecodeError when it is no RankKeys."""
    with open(STDIN, "rb", closefd=False) as stdin:
        return msgspec.json.decode(stdin.readline(), type=RankKeys)


def place_in_code(frame: FrameType | None, mesh: str) -> tuple[str, bool]:
    """Return the innermost of our functions on a stack, and whether it waits for other ranks. A wait for a device
    counts, since collectives run there."""
    at, waits = "", False
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(OURS) or module == mesh:
            waits = waits or (not at and module == DEVICE)
            at = at or f"{module.removeprefix(OURS)}:{frame.f_lineno} in {frame.f_code.co_name}"
            waits = waits or module == mesh
        frame = frame.f_back
    return at, waits


def waited(error: Exception, mesh: str) -> bool:
    """Return whether an error was raised while waiting for other ranks."""
    return any(frame.f_globals.get("__name__") == mesh for frame, _ in traceback.walk_tb(error.__traceback__))


def share_of_processors(processors: Sequence[int], share: tuple[int, int], threads: int) -> Sequence[int]:
    """Return a rank's equal part of its machine's processors, or all of them when a part has fewer than its `threads`
    (0: as many as the part has)."""
    index, ranks = share
    size = len(processors) // ranks
    return processors[index * size : (index + 1) * size] if size >= max(threads, 1) else processors


def hold_port() -> socket.socket:
    """Reserve a TCP port: the system gives it to no other process while this socket is open. A socket with SO_REUSEADDR
    may still listen on it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


def load_rank(start: Start) -> RankRunner:
    gc.disable()  # as in penstock.engine.process: imports and loading make many objects and no garbage
    import_torch()
    from penstock.runtime.loading.cpu import load_cpu_runner  # not above: it imports torch
    from penstock.runtime.loading.gpu import load_gpu_runner

    config, place = start.config, RankPlace(start.config.split, start.rank)
    if config.device == "cpu":
        runner = load_cpu_runner(config, place, start.rendezvous, start.num_blocks)
    else:
        # Ray shows each rank the GPU that it has for it, and no other.
        local = (0, 1) if config.distributed_executor == "ray" else start.share
        runner = load_gpu_runner(config, place, start.rendezvous, local)
    runner.use_grammars(EngineGrammars(config, runner.capacity.vocab_size))
    gc.freeze()
    gc.enable()
    return runner


if __name__ == "__main__":
    sys.exit(work(load_rank))
