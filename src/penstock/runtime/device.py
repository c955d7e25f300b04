"""A device as a runner sees it: work that is launched in order and not waited for, and copies to and fro.

A GPU is one. The other is this machine's own processor, which does what it is given only when a result is asked for,
and then all of it: so nothing but a step's inputs can reach it from the host, nothing comes back before, and no result
lies where a later step writes. It is there to prove the runner where there is no GPU.
"""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16  # bytes, of an array within an upload

Job = Callable[[], Mapping[str, Tensor]]
Arrays = Mapping[str, NDArray[Any]]


class Pending(Protocol):
    """A job that was launched."""

    def ready(self) -> bool:
        """Whether `wait` would not wait."""
        ...

    def wait(self) -> Arrays:
        """What it gave, on the host."""
        ...


class Device(Protocol):
    """Where a batch lives. One thread calls."""

    where: torch.device
    sent: int  # bytes uploaded so far

    def upload(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Copies of arrays, which may be overwritten at once; jobs launched after this may read them."""
        ...

    def launch(self, job: Job) -> Pending:
        """Do a job after those launched before it. What it gives is copied to the host while others run: it must be
        its own, that nothing overwrites."""
        ...

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """A function that does again what `run` does, on the same memory. `run` is done here, too, perhaps twice."""
        ...

    def mark(self) -> Any:
        """Within a job: a moment of the device's time."""
        ...

    def seconds(self, first: Any, last: Any) -> float:
        """Between two moments of jobs that have been waited for."""
        ...


def open_device(where: torch.device) -> Device:
    """ValueError for a kind of device that there is no way to use."""
    match where.type:
        case "cuda":
            return CudaDevice(where)
        case "cpu":
            return HostDevice()
    raise ValueError(f"a batch cannot live on {where}: use cuda")


@contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's garbage collector: what it may find, a graph or a kernel's module, cannot be let go of while a
    stream is captured."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class CudaDevice:
    """A GPU: work goes to the current stream, copies back to another, so that the next step need not wait for them.

    Memory for copies is pinned, and torch's to hand out again once the copy it was for is done: in effect there are as
    many buffers as plans outstanding.
    """

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self.sent = 0
        self._back = torch.cuda.Stream(where)
        self._pool = torch.cuda.graph_pool_handle()  # graphs do not run at once: they may share what they scratch in

    def upload(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        places, size = _places(arrays)
        staged = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        _pack(arrays, places, staged.numpy())
        self.sent += size
        return _unpack(staged.to(self.where, non_blocking=True), arrays, places)

    def launch(self, job: Job) -> "_CopiedBack":
        given = job()
        copies: dict[str, Tensor] = {}
        self._back.wait_stream(torch.cuda.current_stream(self.where))
        with torch.cuda.stream(self._back):
            for name, tensor in given.items():
                copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                copies[name].copy_(tensor, non_blocking=True)
                tensor.record_stream(self._back)  # its memory is not to be used again before
            done = torch.cuda.Event()
            done.record(self._back)
        return _CopiedBack(copies, done)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()  # compiles kernels, and libraries allocate what they keep
        graph = torch.cuda.CUDAGraph()
        # What other threads do meanwhile is none of it: NCCL's looks after what was launched before.
        with uncollected(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        replay: Callable[[], None] = graph.replay
        return replay

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.where))
        return event

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        return float(first.elapsed_time(last)) / 1e3


class _CopiedBack:
    def __init__(self, copies: Mapping[str, Tensor], done: torch.cuda.Event) -> None:
        self._copies = copies
        self._done = done

    def ready(self) -> bool:
        return bool(self._done.query())

    def wait(self) -> Arrays:
        self._done.synchronize()
        return {name: copy.numpy() for name, copy in self._copies.items()}


class HostDevice:
    """This machine's processor in a GPU's place."""

    def __init__(self) -> None:
        self.where = torch.device("cpu")
        self.sent = 0
        self._waiting: deque[_Deferred] = deque()

    def upload(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        places, size = _places(arrays)
        staged = torch.empty(size, dtype=torch.uint8)
        _pack(arrays, places, staged.numpy())
        self.sent += size
        return _unpack(staged, arrays, places)

    def launch(self, job: Job) -> "_Deferred":
        deferred = _Deferred(job, self._waiting)
        self._waiting.append(deferred)
        return deferred

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, first: float, last: float) -> float:
        return last - first


class _Deferred:
    """Done when one is waited for, with all that have been launched; copied only then."""

    def __init__(self, job: Job, waiting: "deque[_Deferred]") -> None:
        self._job = job
        self._waiting = waiting
        self._given: Mapping[str, Tensor] = {}

    def ready(self) -> bool:
        return True

    def wait(self) -> Arrays:
        while self._waiting:
            self._waiting.popleft()._run()
        return {name: tensor.numpy().copy() for name, tensor in self._given.items()}

    def _run(self) -> None:
        self._given = self._job()


def _places(arrays: Sequence[NDArray[Any]]) -> tuple[list[int], int]:
    """(where each array begins, how many bytes they take together)."""
    places, size = [], 0
    for array in arrays:
        places.append(size)
        size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return places, size


def _pack(arrays: Sequence[NDArray[Any]], places: Sequence[int], into: NDArray[np.uint8]) -> None:
    for array, place in zip(arrays, places, strict=True):
        target: NDArray[Any] = into[place : place + array.nbytes].view(array.dtype)
        target.reshape(array.shape)[...] = array


def _unpack(packed: Tensor, arrays: Sequence[NDArray[Any]], places: Sequence[int]) -> list[Tensor]:
    """Views of the packed bytes: like the arrays."""
    return [
        packed[place : place + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, place in zip(arrays, places, strict=True)
    ]
