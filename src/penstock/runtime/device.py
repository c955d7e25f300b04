"""The devices of the runner: they run jobs in order, and copy to and from the host.

A GPU computes while the host goes on. The CPU computes a job when its result is requested, and reads the host's memory:
nothing is copied.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from msgspec.structs import astuple
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16  # bytes, of an array within an upload


class StepOutputs(msgspec.Struct):
    """What a step's jobs compute: tensors, and on the host arrays or buffers. None: this step does not compute it."""

    tokens: Any = None  # int64 [rows of logits], as in Chosen, which says what the next two are
    status: Any = None  # int32 [rows of logits]
    packed: Any = None  # int32 [rows of logits, words]
    accepted: Any = None  # int32 [rows of logits]: how many tokens a sequence gained, at its first row
    finite: Any = None  # bool [tokens]: whether hidden states are finite
    pooled: Any = None  # fp32 [units that sample, width]
    prompts: Sequence[Any] | None = None  # int32 [tokens, words]: packed logprobs of each slice of prompts

    def mapped(self, function: Callable[[Any], Any]) -> "StepOutputs":
        """Returns new outputs: `function` is applied to all that are there."""
        *rows, prompts = astuple(self)
        outputs = StepOutputs(*[None if each is None else function(each) for each in rows])
        outputs.prompts = None if prompts is None else [function(each) for each in prompts]
        return outputs

    def joined(self, others: "StepOutputs") -> "StepOutputs":
        """Returns new outputs: these, and the others that are not here."""
        return StepOutputs(
            *[other if own is None else own for own, other in zip(astuple(self), astuple(others), strict=True)]
        )


Job = Callable[[], StepOutputs]


class Change(NamedTuple):
    """A write to the device: `arrays` are uploaded, and `write` is called with the tensors that they became."""

    arrays: Sequence[NDArray[Any]]
    write: Callable[[Sequence[Tensor]], None]


class Pending(Protocol):
    def ready(self) -> bool:
        """Returns True if `wait` would return at once."""

    def wait(self) -> StepOutputs:
        """Blocks until the job has ended. Returns its outputs, on the host."""


class DevicePage:
    """A page in a device's memory, which a thread copies to the host or back: beside the jobs launched later, and after
    those launched before."""

    def __init__(self, page: Tensor, copy: Callable[[Tensor, Tensor], None]) -> None:
        """`copy` copies to its first argument, and returns when that is done."""
        self._bytes, self._copy = page.view(-1).view(torch.uint8), copy

    def __len__(self) -> int:
        return len(self._bytes)

    def save(self, target: memoryview) -> None:
        self._copy(torch.frombuffer(target, dtype=torch.uint8), self._bytes)

    def load(self, source: memoryview) -> None:
        self._copy(self._bytes, torch.frombuffer(source, dtype=torch.uint8))


class Parts(NamedTuple):
    """A Pending step that was launched as two jobs."""

    begun: Pending
    rest: Pending

    def ready(self) -> bool:
        return self.begun.ready() and self.rest.ready()

    def wait(self) -> StepOutputs:
        return self.begun.wait().joined(self.rest.wait())


class Device(Protocol):
    """The device that holds a batch. It is used by one thread."""

    where: torch.device
    shared: bool  # whether it reads the host's arrays, and so takes one plan at a time
    sent: int  # bytes uploaded so far

    def upload(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Returns the arrays on the device; jobs launched after this may read them. The caller may overwrite them at
        once, unless the device shares the host's memory."""

    def launch(self, job: Job) -> Pending:
        """Runs a job after those launched before it. Its outputs are copied to the host while later jobs run: they must
        be tensors of its own, that nothing overwrites. In shared memory they last until the next job."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Returns a function that repeats what `run` does, on the same memory. `run` is called here, perhaps twice."""

    def page(self, page: Tensor) -> "DevicePage | memoryview":
        """Returns what other threads read and fill a page by: its memory, if that is the host's."""

    def host_memory(self, size: int) -> memoryview:
        """Returns memory of the host that `DevicePage` copies to and from. Raises RuntimeError if there is none."""

    def mark(self) -> Any:
        """Returns a mark of the device's time. Called within a job."""

    def seconds(self, first: Any, last: Any) -> float:
        """Returns the time between two marks. Their jobs must have ended."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Stops Python's garbage collector: a graph or a kernel's module must not be freed while a stream is captured."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class CudaDevice:
    """A GPU. Jobs run on the current stream. Results are copied on a second one, so the next step does not wait.

    Memory for copies is pinned. Torch hands it out again when the copy is done: in effect there are as many buffers as
    outstanding plans.
    """

    shared = False

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self.sent = 0
        self._back, self._pages = torch.cuda.Stream(where), torch.cuda.Stream(where)
        self._pool = torch.cuda.graph_pool_handle()  # graphs do not run at once, so they may share scratch memory

    def upload(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        at, size = places(arrays)
        staged = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        pack(arrays, at, staged.numpy())
        self.sent += size
        return unpack(staged.to(self.where, non_blocking=True), arrays, at)

    def launch(self, job: Job) -> "_CopiedBack":
        outputs = job()
        self._back.wait_stream(torch.cuda.current_stream(self.where))
        with torch.cuda.stream(self._back):
            copies = outputs.mapped(self._copied_back)
            done = torch.cuda.Event()
            done.record(self._back)
        return _CopiedBack(copies, done)

    def _copied_back(self, tensor: Tensor) -> Tensor:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._back)  # its memory must not be reused before the copy is done
        return copy

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()  # compiles kernels, and libraries allocate what they keep
        graph = torch.cuda.CUDAGraph()
        # Thread-local: NCCL's own thread polls events meanwhile.
        with uncollected(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        replay: Callable[[], None] = graph.replay
        return replay

    def page(self, page: Tensor) -> DevicePage:
        return DevicePage(page, partial(self._copy_page, torch.cuda.current_stream(self.where).record_event()))

    def _copy_page(self, after: torch.cuda.Event, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._pages):  # of this thread
            self._pages.wait_event(after)
            target.copy_(source, non_blocking=True)
            done = self._pages.record_event()
        done.synchronize()

    def host_memory(self, size: int) -> memoryview:
        return memoryview(torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy().data)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.where))
        return event

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        return float(first.elapsed_time(last)) / 1e3


class _CopiedBack:
    def __init__(self, copies: StepOutputs, done: torch.cuda.Event) -> None:
        self._copies = copies
        self._done = done

    def ready(self) -> bool:
        return bool(self._done.query())

    def wait(self) -> StepOutputs:
        self._done.synchronize()
        return self._copies.mapped(Tensor.numpy)


class HostDevice:
    """The CPU. A job runs on the host's thread when its result is requested."""

    shared = True
    sent = 0

    def __init__(self) -> None:
        self.where = torch.device("cpu")

    def upload(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    def launch(self, job: Job) -> "_Deferred":
        return _Deferred(job)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        return run

    def page(self, page: Tensor) -> DevicePage | memoryview:
        return memoryview(page.view(-1).view(torch.uint8).numpy().data)

    def host_memory(self, size: int) -> memoryview:
        return memoryview(np.empty(size, np.uint8).data)

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, first: float, last: float) -> float:
        return last - first


class _Deferred:
    """A job that runs in `wait`."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def ready(self) -> bool:
        return True

    def wait(self) -> StepOutputs:
        return self._job()


def places(arrays: Sequence[NDArray[Any]]) -> tuple[list[int], int]:
    """Returns where each array begins in an upload, and how many bytes they take together."""
    begins, size = [], 0
    for array in arrays:
        begins.append(size)
        size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return begins, size


def pack(arrays: Sequence[NDArray[Any]], at: Sequence[int], into: NDArray[np.uint8]) -> None:
    """Copies arrays to their places in an upload."""
    for array, place in zip(arrays, at, strict=True):
        target: NDArray[Any] = into[place : place + array.nbytes].view(array.dtype)
        target.reshape(array.shape)[...] = array


def unpack(packed: Tensor, arrays: Sequence[NDArray[Any]], at: Sequence[int]) -> list[Tensor]:
    """Returns views of the packed bytes, shaped like the arrays."""
    return [
        packed[place : place + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, place in zip(arrays, at, strict=True)
    ]
