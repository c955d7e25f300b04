"""The server's side of the process that runs models: starts it, exchanges packets with it, and replaces it."""

import array
import asyncio
import contextlib
import logging
import mmap
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import msgspec

from penstock.engine.child import how_it_ended
from penstock.engine.signals import group_signals_blocked
from penstock.environment import child_environment
from penstock.messages import EngineError
from penstock.messages.tensors import LoadFailed
from penstock.observe.thread_load import ThreadLoad
from penstock.repository.backend import wire
from penstock.repository.backend.arena import TensorArena
from penstock.tasks import spawn

CHILD = (sys.executable, "-P", "-m", "penstock.repository.backend.child")
ARENA_BYTES = 256 << 20  # of tensors that are in the process at a time
LOAD_SECONDS = 900.0  # for one model
LOOK_SECONDS = 0.25  # between looks for a process that hangs
MAX_ENDS = 8  # of the process within a minute; then it is not started again
STDERR = 2
# With a heap for each thread, the memory of an unloaded model would stay in that of the thread that had loaded it.
ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}

# Takes the end of a batch, and the memory that its outputs are in; the memory is valid only during the call.
Done = Callable[[wire.BatchDone, memoryview], None]
_log = logging.getLogger("penstock.repository")
T = TypeVar("T")


class _Running(NamedTuple):
    order: wire.RunBatch
    region: int
    due: float  # on time.monotonic(): when the process counts as hung
    done: Done


class ModelProcess:
    """A child process with models. When it ends, its batches end with an error, a new process starts, and loads the
    models again. Used from one event loop."""

    def __init__(self, kind: str) -> None:
        """`kind` is the framework: onnx or torch."""
        self.arena = TensorArena(ARENA_BYTES)
        self.on_free: Callable[[], None] = lambda: None  # called when batches may run that could not
        self.thread = ThreadLoad()
        self.stalled: set[Callable[[], None]] = set()  # start the batches of models whose requests wait
        self._command = (*CHILD, kind)
        self._numbers = 0
        self._models: dict[int, wire.LoadModel] = {}  # that are loaded
        self._ready: set[int] = set()  # of these, those that the current process has
        self._loading: dict[int, asyncio.Future[wire.ModelLoaded]] = {}
        self._dropping: dict[int, asyncio.Future[None]] = {}
        self._running: dict[int, _Running] = {}
        self._unsent: deque[bytes] = deque()
        self._packet = memoryview(bytearray(wire.MAX_PACKET))
        self._ends: deque[float] = deque(maxlen=MAX_ENDS)
        self._child: subprocess.Popen[bytes] | None = None
        self._held = contextlib.ExitStack()
        self._one_load = asyncio.Lock()  # others of the child's threads go on running batches
        self._tasks: set[asyncio.Task[None]] = set()
        self._killed = ""  # why this process was killed by us
        self._closed = False

    def has(self, model: int) -> bool:
        """Returns whether a model can run now; False while the process is replaced."""
        return model in self._ready

    async def load(self, order: wire.LoadModel) -> tuple[int, wire.ModelLoaded]:
        """Loads a model, and gives it a number. Raises LoadFailed."""
        self._numbers += 1
        order = msgspec.structs.replace(order, model=self._numbers)
        loaded = await self._load(order)
        self._models[order.model] = order
        self._ready.add(order.model)
        return order.model, loaded

    async def drop(self, model: int) -> None:
        """Frees a model's memory. Returns when the process has done so."""
        self._models.pop(model, None)
        if model in self._ready:
            self._ready.discard(model)
            dropped = self._dropping[model] = asyncio.get_running_loop().create_future()
            self._send(wire.encode(wire.DropModel(model)))
            await dropped
        async with self._one_load:
            if not self._models:
                await self._stop()

    def submit(self, order: wire.RunBatch, region: int, seconds: float, done: Done) -> None:
        """Runs a batch, whose tensors are in a region of the arena. `done` is called once, after which the region is
        free. The process is killed if it takes longer than `seconds`."""
        self._numbers += 1
        order.batch = self._numbers
        self._running[order.batch] = _Running(order, region, time.monotonic() + seconds, done)
        self._send(wire.encode(order))

    async def close(self) -> None:
        """Ends the process and its batches. May be called twice."""
        self._closed = True
        await self._stop()
        self.thread.close()
        for task in self._tasks:
            task.cancel()

    async def _load(self, order: wire.LoadModel) -> wire.ModelLoaded:
        async with self._one_load:
            if self._closed:
                raise LoadFailed("the server stops")
            if self._child is None:
                self._start()
            waiting = self._loading[order.model] = asyncio.get_running_loop().create_future()
            self._send(wire.encode(order))
            try:
                async with asyncio.timeout(LOAD_SECONDS):
                    loaded: wire.ModelLoaded = await waiting
                    return loaded
            except TimeoutError:
                self._kill(f"loading {order.path} took longer than {LOAD_SECONDS:g} s")
                raise LoadFailed(f"loading took longer than {LOAD_SECONDS:g} s, the limit") from None
            finally:
                self._loading.pop(order.model, None)

    def _start(self) -> None:
        """Starts the process. Raises LoadFailed."""
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as held:
            link, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            held.callback(link.close)
            link.setblocking(False)
            for end in (link, other):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * wire.MAX_PACKET)
            arguments = (other.fileno(), self.arena.fd, self.arena.size)
            try:
                with other, group_signals_blocked():
                    child = subprocess.Popen(
                        [*self._command, *map(str, arguments)],
                        stdin=subprocess.DEVNULL,
                        stdout=STDERR,
                        pass_fds=arguments[:2],
                        env=child_environment(os.environ) | ONE_HEAP,
                    )
            except OSError as error:
                raise LoadFailed(f"the process for models could not be started: {error}") from error
            pidfd = os.pidfd_open(child.pid)
            held.callback(os.close, pidfd)
            loop.add_reader(pidfd, self._exited)
            held.callback(loop.remove_reader, pidfd)
            loop.add_reader(link, self._read)
            held.callback(loop.remove_reader, link)
            held.callback(loop.remove_writer, link)
            self._child, self._link, self._held = child, link, held.pop_all()
        self._killed = ""
        loop.call_later(LOOK_SECONDS, self._look, child)

    def _send(self, packet: bytes) -> None:
        """Sends a packet, or keeps it while the socket is full."""
        if self._child is None:
            return
        self._unsent.append(packet)
        if len(self._unsent) == 1 and not self._write():
            asyncio.get_running_loop().add_writer(self._link, self._write_rest)

    def _write_rest(self) -> None:
        if self._write():
            asyncio.get_running_loop().remove_writer(self._link)

    def _write(self) -> bool:
        """Sends packets until the socket is full. Returns whether none is left."""
        while self._unsent:
            try:
                self._link.send(self._unsent[0])
            except BlockingIOError:
                return False
            except OSError:  # the process has ended, which `_exited` reports
                self._unsent.clear()
                break
            self._unsent.popleft()
        return True

    def _read(self) -> bool:
        """Takes a report that has arrived. Returns False if there is none."""
        space = socket.CMSG_SPACE(array.array("i").itemsize)
        try:
            size, extra, _, _ = self._link.recvmsg_into([self._packet], space, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except OSError:
            size, extra = 0, []
        if not size:
            asyncio.get_running_loop().remove_reader(self._link)
            return False
        descriptors = array.array("i")
        for _, _, data in extra:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        self._take(self._packet[:size], descriptors[0] if descriptors else None)
        return True

    def _take(self, packet: memoryview, spilled: int | None) -> None:
        report = wire.decode_report(packet)
        match report:
            case wire.BatchDone():
                running = self._running.pop(report.batch, None)
                if running is not None:
                    self._finish(running, report, spilled)
            case wire.ModelLoaded():
                _settle(self._loading.get(report.model), report)
            case wire.ModelFailed():
                if (waiting := self._loading.get(report.model)) is not None and not waiting.done():
                    waiting.set_exception(LoadFailed(report.message))
            case wire.ModelDropped():
                _settle(self._dropping.pop(report.model, None), None)

    def _finish(self, running: _Running, report: wire.BatchDone, spilled: int | None = None) -> None:
        try:
            if spilled is None:
                running.done(report, self.arena.view)
            else:
                size = os.fstat(spilled).st_size
                with mmap.mmap(spilled, size, access=mmap.ACCESS_READ) as file, memoryview(file) as view:
                    running.done(report, view)
        finally:
            if spilled is not None:
                os.close(spilled)
            self.arena.give(running.region)
        self.on_free()

    def _look(self, child: subprocess.Popen[bytes]) -> None:
        """Kills the process if a batch takes too long."""
        if child is not self._child:
            return
        now = time.monotonic()
        if any(running.due < now for running in self._running.values()):
            self._kill("a run took longer than the model's hang-timeout")
        else:
            asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look, child)

    def _kill(self, why: str) -> None:
        if self._child is not None:
            self._killed = why
            self._child.kill()

    def _exited(self) -> None:
        """Runs when the process has ended: ends what waits for it, and starts another one."""
        child, self._child = self._child, None
        assert child is not None
        status = child.wait()
        while self._read():  # results that it has sent
            pass
        self._held.close()
        self._unsent.clear()
        self._ready.clear()
        why = f"the process that runs the models {how_it_ended(status, killed_here=bool(self._killed))}"
        if self._killed:
            why = f"{why}: {self._killed}"
        for waiting in self._loading.values():
            if not waiting.done():
                waiting.set_exception(LoadFailed(f"{why} while the model was loaded"))
        for dropped in self._dropping.values():
            _settle(dropped, None)
        self._dropping.clear()
        ended, self._running = list(self._running.values()), {}
        for running in ended:
            self._finish(running, wire.BatchDone(running.order.batch, [], 0, 0, 0, error=why))
        if self._closed or not self._models:
            return
        _log.error("%s; %d batches ended with an error", why, len(ended))
        self._ends.append(time.monotonic())
        if len(self._ends) == MAX_ENDS and self._ends[-1] - self._ends[0] < 60:
            _log.error("it ended %d times within a minute, and is not started again", MAX_ENDS)
            self._models.clear()
            self.on_free()
            return
        spawn(self._tasks, self._load_again())

    async def _load_again(self) -> None:
        """Loads the models into a new process. One that cannot be loaded stays away."""
        for model, order in list(self._models.items()):
            try:
                await self._load(order)
            except LoadFailed as error:
                _log.error("%s could not be loaded again: %s", order.path, error)
                self._models.pop(model, None)
            else:
                if model in self._models:
                    self._ready.add(model)
            self.on_free()

    def gone(self, model: int) -> bool:
        """Returns whether a model can never run again."""
        return model not in self._models

    async def _stop(self) -> None:
        """Ends the process. Its batches end with an error."""
        child = self._child
        if child is None:
            return
        self._models.clear()
        self._killed = "the server closed it"
        child.kill()
        while self._child is child:
            await asyncio.sleep(0.005)


def _settle(waiting: "asyncio.Future[T] | None", value: T) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(value)


def unavailable(why: str) -> EngineError:
    """The error of requests that a process which ended was running."""
    return EngineError(f"{why}; send this again")
