"""Tensors, and the requests of one-shot models: models that turn tensors into tensors in one run."""

import math
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import msgspec

from penstock.messages.protocols import RequestRejected

# The datatypes of KServe's protocol, and the bytes of an element. BYTES has elements of any length.
DATATYPES: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "INT8", "UINT8"), 1),
    **dict.fromkeys(("INT16", "UINT16", "FP16", "BF16"), 2),
    **dict.fromkeys(("INT32", "UINT32", "FP32"), 4),
    **dict.fromkeys(("INT64", "UINT64", "FP64"), 8),
    "BYTES": 0,
}
MAX_BYTES = 2**63 - 1  # of a tensor, and most elements
MAX_STRINGS = 65_536  # elements of a BYTES tensor: each is looked at, which takes 0.1 µs
LENGTH_BYTES = 4  # before each element of a BYTES tensor

Bytes = bytes | bytearray | memoryview


class Tensor(msgspec.Struct):
    """A tensor. `data` is in row-major order and little-endian; elements of BYTES follow their length in 4 bytes."""

    name: str
    datatype: str  # a key of DATATYPES
    shape: tuple[int, ...]
    data: Bytes


class TensorSpec(msgspec.Struct, frozen=True):
    """An input or output of a model. -1 in `shape` means any size. `shape` includes the batch dimension, if any."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False


class InferRequest(msgspec.Struct, kw_only=True):
    """A request for one run of a model."""

    inputs: list[Tensor]
    outputs: tuple[str, ...] = ()  # names of the outputs to return; (): all
    priority: int = 0  # 1 is the highest level; 0: the model's default level
    timeout: float | None = None  # seconds in the queue; None: the level's
    id: str = ""


class InferResult(msgspec.Struct, kw_only=True):
    """The outputs of a run."""

    outputs: list[Tensor]
    final: bool = True  # False: a piece of a stream; texts of the same output are to be joined


class MemberModel(Protocol):
    """What runs requests with tensors: a one-shot model, or what a step of a pipeline uses."""

    @property
    def inputs(self) -> Sequence[TensorSpec]: ...
    @property
    def outputs(self) -> Sequence[TensorSpec]: ...
    @property
    def streams(self) -> bool:
        """Whether `stream` may give pieces before the last result."""

    async def infer(self, request: InferRequest) -> InferResult:
        """Runs the model. Raises RequestRejected, QueueFull, DeadlineExceeded and EngineError."""

    def stream(self, request: InferRequest) -> AsyncGenerator[InferResult, None]:
        """Runs the model, and yields outputs as they come. The last result is final, and has the outputs that were not
        sent in pieces. Raises as `infer`."""


class TensorModel(MemberModel, Protocol):
    """A version of a one-shot model that is ready."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def labels(self) -> Mapping[str, Sequence[str]]:
        """The names of classes, by output."""

    def metadata(self) -> dict[str, Any]:
        """The fields of KServe's ModelMetadataResponse."""

    def config(self) -> dict[str, Any]:
        """The fields of Triton's ModelConfig."""

    async def statistics(self) -> dict[str, Any]:
        """The fields of Triton's ModelStatistics."""


class Rollouts(Protocol):
    """New versions of models that take over step by step. All errors are LoadFailed."""

    async def start(self, name: str, candidate: int, rules: Mapping[str, Any]) -> None:
        """Begins a rollout. `rules` are the fields of `penstock.repository.rollouts.decision.RolloutRules`."""

    async def steer(self, name: str, what: str) -> None:
        """Changes a rollout that runs. `what`: pause, resume or abort."""

    async def label(self, name: str, request_id: str, label: Any) -> bool:
        """Gives what has turned out to be right for a request. Returns False if it has no effect. Raises
        RequestRejected for a label that does not fit."""

    async def show(self) -> list[dict[str, Any]]:
        """Returns the last rollout of each model, for people and JSON."""


class TensorModels(Protocol):
    """The one-shot models of a server, and what loads and unloads models of all kinds."""

    @property
    def rollouts(self) -> Rollouts: ...

    def find(self, name: str, version: str = "", key: str = "") -> TensorModel | None:
        """Returns a version that is ready: by number, by label, or the newest. If a rollout decides on the version,
        requests with one `key` get the same one. None if `name` is no one-shot model of the repository. Raises
        NotReady."""

    def ready(self) -> Sequence[TensorModel]:
        """Returns all versions that are ready."""

    async def index(self, *, ready: bool) -> list[dict[str, str]]:
        """Returns the state of every version of every model; with `ready`, only of those that are ready."""

    async def load(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Loads a model's versions from the folder as it is now. Returns when they are ready. `config` replaces the
        model's file of settings, and `files` its versions. Raises LoadFailed."""

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        """Unloads all versions of a model; with `dependents`, also the members of a pipeline. Raises LoadFailed."""


class NotReady(RequestRejected):
    """The model is in the repository, but no version of it, or not the one named, is ready."""

    @classmethod
    def model(cls, name: str, why: str) -> "NotReady":
        """No version is ready."""
        return cls(f"Request for unknown model: {name!r} is not ready: {why}")

    @classmethod
    def version(cls, name: str, version: str, ready: Iterable[int]) -> "NotReady":
        """The named version is not among the `ready` ones."""
        shown = ", ".join(map(str, sorted(ready)))
        return cls(
            f"Request for unknown model: {name!r} version {version[:40]!r} is not ready; the versions are {shown}"
        )


class LoadFailed(RequestRejected):
    """A model could not be loaded or unloaded. The message says why."""


def elements(shape: Sequence[int]) -> int:
    """The number of elements of a tensor. The product of no sizes is 1."""
    return math.prod(shape)


def strings(data: Bytes, name: str) -> Iterator[memoryview]:
    """Yields the elements of a BYTES tensor, without their lengths. Raises RequestRejected if a length does not fit."""
    view, at, end = memoryview(data), 0, len(data)
    while at < end:
        start = at + LENGTH_BYTES
        at = start + (int.from_bytes(view[at:start], "little") if start <= end else end)
        if at > end:
            raise RequestRejected(f"input {name[:100]!r} ends in the middle of an element; check the lengths")
        yield view[start:at]


def check_shape(tensor: Tensor) -> None:
    """Raises RequestRejected for an unknown datatype, or a shape that no tensor can have."""
    name, shape = tensor.name[:100], tensor.shape
    size = DATATYPES.get(tensor.datatype)
    if size is None:
        known = ", ".join(DATATYPES)
        raise RequestRejected(f"input {name!r} has the datatype {tensor.datatype[:40]!r}; the datatypes are {known}")
    if any(length < 0 for length in shape):
        raise RequestRejected(f"input {name!r} has the shape {_shown(shape)}; send sizes of at least 0")
    count = elements(shape)
    if count > MAX_BYTES:
        raise RequestRejected(
            f"input {name!r}: the shape {_shown(shape)} causes total element count to exceed maximum size of "
            f"{MAX_BYTES}; send a smaller tensor"
        )
    if count * max(size, 1) > MAX_BYTES:
        raise RequestRejected(f"byte size overflow for input {name!r} of the shape {_shown(shape)}; send a smaller one")


def check_data(tensor: Tensor, model: str) -> None:
    """Raises RequestRejected if the bytes of a tensor do not fit its datatype and shape, which have been checked.

    The error names `model`.
    """
    name, size, count = tensor.name[:100], DATATYPES[tensor.datatype], elements(tensor.shape)
    where = f"input {name!r} for model {model!r}"
    if size:
        if len(tensor.data) != count * size:
            raise RequestRejected(
                f"input byte size mismatch for {where}. Expected {count * size}, got {len(tensor.data)}: the shape is "
                f"{_shown(tensor.shape)} of {tensor.datatype}"
            )
        return
    if count > MAX_STRINGS:
        raise RequestRejected(f"input {name!r} has {count} elements of BYTES; the limit is {MAX_STRINGS}: send fewer")
    found = sum(1 for _ in islice(strings(tensor.data, tensor.name), count + 1))
    if found < count:
        raise RequestRejected(f"expected {count} string elements for inference {where}, got {found}")
    if found > count:
        raise RequestRejected(f"unexpected number of string elements {found} for inference {where}, expecting {count}")


def _shown(shape: Sequence[int]) -> str:
    sizes = ",".join(str(size) if abs(size) < 2**64 else "..." for size in shape[:16])
    return f"[{sizes}{',...' if len(shape) > 16 else ''}]"
