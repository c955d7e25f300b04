"""A version of a model that runs in a process of its framework, ready for requests."""

import asyncio
import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.messages.tensors import InferRequest, InferResult, LoadFailed, Tensor, TensorSpec
from penstock.repository.backend.onnx_file import HostileFile, inside
from penstock.repository.backend.process import ModelProcess
from penstock.repository.backend.wire import LoadModel
from penstock.repository.batching import BatchedModel
from penstock.repository.checks import RequestCheck
from penstock.repository.entry import Target
from penstock.repository.settings import ModelSettings, TensorSettings
from penstock.repository.statistics import ModelStatistics
from penstock.repository.triton import PLATFORMS, config_of

DELAY_VARIABLE = "TRITONSERVER_DELAY_SCHEDULER"  # Triton's tests set it: requests that wait before the first batch
CACHE_BYTES = 64 << 20  # of the answers that a model keeps
MAX_LABELS = 1 << 20  # bytes of a file of labels


class InFlight:
    """The requests in flight of a version."""

    def __init__(self) -> None:
        self.requests = 0
        self._unused = asyncio.Event()
        self._unused.set()

    def __enter__(self) -> None:
        self.requests += 1
        self._unused.clear()

    def __exit__(self, *_: object) -> None:
        self.requests -= 1
        if not self.requests:
            self._unused.set()

    async def unused(self) -> None:
        """Returns when no request is in flight."""
        await self._unused.wait()


class OneShotModel:
    """See `penstock.messages.tensors.TensorModel`."""

    def __init__(
        self, target: Target, process: ModelProcess, number: int, inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec], max_rows: int, note: str, size: int,
    ) -> None:  # fmt: skip
        """`number` is the model's in the process; `note` says why requests run alone, "" if they do not;
        `size` are the bytes of memory that it takes."""
        settings = target.settings
        self.name, self.version = target.name, str(target.version)
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.labels = _read_labels(target)
        self.note, self.size = note, size
        self.statistics_of = ModelStatistics()
        self.usage = InFlight()
        self._settings, self._max_rows = settings, max_rows
        self._process, self._number = process, number
        self._check = RequestCheck(target.name, inputs, outputs, max_rows)
        rules = settings.batching.rules(max(max_rows, 1), settings.instances, _delay())
        if note or not max_rows:
            rules = msgspec.structs.replace(rules, mode="none")
        self.batches = BatchedModel(
            target.name, process, number, rules, outputs, self.statistics_of, settings.hang_timeout,
            has_rows=bool(max_rows),
        )  # fmt: skip
        self._reshaped = {each.name: each for each in (*settings.inputs, *settings.outputs) if each.reshape is not None}
        self._cache = _AnswerCache(CACHE_BYTES) if settings.cache else None

    async def infer(self, request: InferRequest) -> InferResult:
        """See TensorModel."""
        with self.usage:
            began = time.monotonic()
            try:
                rows = self._check.check(request)
            except ValueError:
                self.statistics_of.failed(time.monotonic() - began)
                raise
            if self._cache is not None and not request.priority:
                return await self._cached(self._cache, request, rows)
            return await self._run(request, rows)

    def metadata(self) -> dict[str, Any]:
        """See TensorModel."""
        return metadata_of(self.name, self.version, self._settings, self.inputs, self.outputs)

    def config(self) -> dict[str, Any]:
        """See TensorModel."""
        return config_of(self.name, self._settings, self._max_rows, self.inputs, self.outputs)

    def statistics(self) -> dict[str, Any]:
        """See TensorModel."""
        fields = self.statistics_of.fields(self.name, self.version)
        return fields | {"memory_usage": [{"type": "CPU", "id": 0, "byte_size": self.size}]}

    async def close(self) -> None:
        """Frees the model's memory."""
        await self._process.drop(self._number)

    async def _run(self, request: InferRequest, rows: int) -> InferResult:
        if not self._reshaped:
            return await self.batches.infer(request, rows)
        lead = 1 if self._max_rows else 0
        inputs = [self._with_shape(tensor, lead, inner=True) for tensor in request.inputs]
        found = await self.batches.infer(msgspec.structs.replace(request, inputs=inputs), rows)
        return InferResult(outputs=[self._with_shape(tensor, lead, inner=False) for tensor in found.outputs])

    def _with_shape(self, tensor: Tensor, lead: int, *, inner: bool) -> Tensor:
        """The tensor with the shape that the model has (`inner`), or that clients see."""
        settings = self._reshaped.get(tensor.name)
        if settings is None:
            return tensor
        shape = tensor.shape[:lead] + _reshaped(tensor.shape[lead:], settings, inner=inner)
        return Tensor(tensor.name, tensor.datatype, shape, tensor.data)

    async def _cached(self, cache: "_AnswerCache", request: InferRequest, rows: int) -> InferResult:
        began = time.monotonic_ns()
        key = _content(request)
        found = cache.get(key)
        if found is not None:
            took = time.monotonic_ns() - began
            self.statistics_of.durations["cache_hit"].add(took)
            self.statistics_of.inferences += rows
            self.statistics_of.request(took / 1e9, 0.0)
            return found
        result = await self._run(request, rows)
        inserted = time.monotonic_ns()
        cache.put(key, result)
        self.statistics_of.durations["cache_miss"].add(time.monotonic_ns() - inserted)
        return result


class OnnxLoader:
    """Loads ONNX models into one process, which starts with the first of them."""

    def __init__(self) -> None:
        self.process: ModelProcess | None = None
        self._models: set[OneShotModel] = set()

    async def load(self, target: Target) -> OneShotModel:
        """Returns a version that is ready. Raises LoadFailed."""
        settings = target.settings
        path = target.folder / (settings.file or "model.onnx")
        try:
            inside(path, target.folder)
        except HostileFile as error:
            raise LoadFailed(str(error)) from None
        if self.process is None:
            try:
                import onnxruntime  # noqa: F401
            except ImportError:
                raise LoadFailed("it needs onnxruntime: pip install 'penstock[onnx]'") from None
            self.process = ModelProcess()
            self.process.on_free = self._pump
        batched = settings.max_batch_size
        declared = tuple(_spec(each, batched or 0) for each in settings.inputs)
        order = LoadModel(
            0, str(path), str(target.folder), -1 if batched is None else batched, declared, settings.threads
        )
        number, loaded = await self.process.load(order)
        inputs = _merged(loaded.inputs, settings.inputs, loaded.max_rows, complete=True)
        outputs = _merged(loaded.outputs, settings.outputs, loaded.max_rows, complete=False)
        model = OneShotModel(
            target,
            self.process,
            number,
            inputs,
            outputs,
            loaded.max_rows,
            "" if loaded.joins else loaded.note,
            loaded.size,
        )
        self._models.add(model)
        return model

    def withdraw(self, model: OneShotModel) -> None:
        """Nothing: requests find versions by the repository."""

    async def unload(self, model: OneShotModel) -> None:
        """Frees a version's memory."""
        self._models.discard(model)
        await model.close()

    async def close(self) -> None:
        """Ends the process."""
        if self.process is not None:
            await self.process.close()

    def _pump(self) -> None:
        for model in self._models:
            model.batches.pump()


class _AnswerCache:
    """The latest answers, by the content of their requests. Bounded by bytes."""

    def __init__(self, most: int) -> None:
        self._most, self._used = most, 0
        self._answers: OrderedDict[bytes, InferResult] = OrderedDict()

    def get(self, key: bytes) -> InferResult | None:
        found = self._answers.get(key)
        if found is not None:
            self._answers.move_to_end(key)
        return found

    def put(self, key: bytes, result: InferResult) -> None:
        size = _size(result)
        if size > self._most or key in self._answers:
            return
        self._answers[key] = result
        self._used += size
        while self._used > self._most:
            self._used -= _size(self._answers.popitem(last=False)[1])


def metadata_of(
    name: str, version: str, settings: ModelSettings, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> dict[str, Any]:
    """Returns the fields of KServe's ModelMetadataResponse."""

    def fields(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
        return [{"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)} for spec in specs]

    platform = PLATFORMS[settings.kind or "onnx"]
    return {
        "name": name,
        "versions": [version],
        "platform": platform,
        "inputs": fields(inputs),
        "outputs": fields(outputs),
    }


def _merged(
    own: Sequence[TensorSpec], declared: Sequence[TensorSettings], max_rows: int, *, complete: bool
) -> tuple[TensorSpec, ...]:
    """The tensors of a model as its settings declare them, which the file must have, and with `complete` no others.
    Raises LoadFailed."""
    if not declared:
        return tuple(own)
    there = {spec.name: spec for spec in own}
    found = []
    for each in declared:
        spec = there.get(each.name)
        if spec is None:
            raise LoadFailed(f"the settings have the tensor {each.name!r}, but the model has {', '.join(there)}")
        if spec.datatype != each.datatype:
            raise LoadFailed(
                f"tensor {each.name!r} is {each.datatype} in the settings, but {spec.datatype} in the model"
            )
        dims = each.dims if each.reshape is None else each.reshape
        inner = spec.shape[1:] if max_rows else spec.shape
        fits = len(dims) == len(inner) and all(
            -1 in pair or pair[0] == pair[1] for pair in zip(dims, inner, strict=True)
        )
        if not fits:
            raise LoadFailed(
                f"tensor {each.name!r} has the dims {list(dims)} in the settings, but {list(inner)} in the model"
            )
        found.append(_spec(each, max_rows))
    if complete and (missing := there.keys() - {each.name for each in declared}):
        raise LoadFailed(f"the settings lack the input {min(missing)!r} of the model; add it")
    return tuple(found)


def _spec(settings: TensorSettings, max_rows: int) -> TensorSpec:
    shape = (-1, *settings.dims) if max_rows else settings.dims
    return TensorSpec(settings.name, settings.datatype, shape, settings.optional)


def _reshaped(shape: tuple[int, ...], settings: TensorSettings, *, inner: bool) -> tuple[int, ...]:
    """The other form of a shape: sizes that may vary are taken in order."""
    assert settings.reshape is not None
    ours, theirs = (settings.dims, settings.reshape) if inner else (settings.reshape, settings.dims)
    free = iter([size for size, wanted in zip(shape, ours, strict=True) if wanted == -1])
    return tuple(next(free, 1) if size == -1 else size for size in theirs)


def _read_labels(target: Target) -> Mapping[str, Sequence[str]]:
    """The names of classes, by output. Raises LoadFailed."""
    found = {}
    for output in target.settings.outputs:
        if output.labels:
            path = target.folder.parent / Path(output.labels).name
            try:
                inside(path, target.folder.parent)
                with path.open(encoding="utf-8") as file:
                    found[output.name] = file.read(MAX_LABELS).splitlines()
            except (HostileFile, OSError, UnicodeDecodeError) as error:
                raise LoadFailed(f"the labels of output {output.name!r} cannot be read: {error}") from None
    return found


def _content(request: InferRequest) -> bytes:
    """A digest of what an answer depends on. Lengths are part of it, so that no two contents look alike."""
    digest = hashlib.blake2b(digest_size=32)
    for tensor in sorted(request.inputs, key=lambda each: each.name):
        head = (tensor.name, tensor.datatype, tensor.shape, len(tensor.data))
        digest.update(repr(head).encode())
        digest.update(tensor.data)
    digest.update(repr(request.outputs).encode())
    return digest.digest()


def _size(result: InferResult) -> int:
    return sum(len(tensor.data) + 256 for tensor in result.outputs)


def _delay() -> int:
    text = os.environ.get(DELAY_VARIABLE, "")
    return min(int(text), 1024) if text.isdigit() else 0
