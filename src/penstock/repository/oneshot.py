"""A version of a one-shot model that is ready for requests, and what loads those that run in a process."""

import asyncio
import importlib.util
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from penstock.messages.tensors import InferRequest, InferResult, LoadFailed, Tensor, TensorModel, TensorSpec
from penstock.repository.answer_cache import AnswerCache
from penstock.repository.backend.files import HostileFile, inside
from penstock.repository.backend.process import ModelProcess
from penstock.repository.backend.wire import LoadModel, ModelLoaded
from penstock.repository.batching import BatchedModel
from penstock.repository.checks import RequestCheck
from penstock.repository.entry import Target
from penstock.repository.pipelines.rows import whole_text
from penstock.repository.rollouts.judging import JUDGES
from penstock.repository.rollouts.rollout import Rollout
from penstock.repository.rollouts.tensors import TensorComparison
from penstock.repository.settings import FILES, Kind, TensorSettings
from penstock.repository.statistics import ModelStatistics
from penstock.repository.triton import PLATFORMS, config_of
from penstock.schedule.batcher import Batcher
from penstock.schedule.resources import ResourcePool
from penstock.tasks import InFlight

DELAY_VARIABLE = "TRITONSERVER_DELAY_SCHEDULER"  # Triton's tests set it: requests that wait before the first batch
MAX_LABELS = 1 << 20  # bytes of a file of labels
Emit = Callable[[Tensor], None]  # takes a piece of an output


class Runner(Protocol):
    """Runs the requests of a version, which have been checked."""

    note: str  # why requests run alone; "" if they do not
    size: int  # bytes of memory
    batcher: Batcher | None
    streams: bool  # outputs may come in pieces

    async def run(self, request: InferRequest, rows: int, emit: Emit | None = None) -> InferResult:
        """Returns the outputs. Pieces go to `emit` before; None: the client reads the whole. Counts the request.

        Raises as `TensorModel.infer`.
        """

    async def close(self) -> None:
        """Frees its memory."""


class OneShotModel:
    """See `penstock.messages.tensors.TensorModel`."""

    judges = JUDGES

    def __init__(
        self,
        target: Target,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        max_rows: int,
        runner: Runner,
        statistics: ModelStatistics,
    ) -> None:
        """Raises LoadFailed if a file of labels cannot be read."""
        self.name, self.version = target.name, str(target.version)
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.labels = _read_labels(target)
        self.runner, self.note, self.streams = runner, runner.note, runner.streams
        self.statistics_of = statistics
        self.usage = InFlight()
        self.own_judge = target.settings.judge
        self._settings, self._max_rows = target.settings, max_rows
        self._check = RequestCheck(target.name, inputs, outputs, max_rows)
        self._cache = AnswerCache(self.statistics_of) if target.settings.cache else None
        # The batches that may be part of a chain: with nothing between a request and its batch.
        self.batches: BatchedModel | None = None
        if isinstance(runner, ProcessRunner) and not runner.reshaped and self._cache is None:
            self.batches = runner.batches

    def compare(self, rollout: Rollout, candidate: TensorModel) -> TensorComparison:
        """See ComparedModel."""
        return TensorComparison(rollout, self, candidate)

    async def infer(self, request: InferRequest) -> InferResult:
        return await self._run(request, None)

    async def stream(self, request: InferRequest) -> AsyncGenerator[InferResult, None]:
        """See TensorModel. If its reader is slow, it gets larger pieces."""
        news: dict[str, list[Tensor]] = {}
        sent: set[str] = set()
        changed = asyncio.Event()

        def emit(tensor: Tensor) -> None:
            news.setdefault(tensor.name, []).append(tensor)
            changed.set()

        running = asyncio.create_task(self._run(request, emit))
        running.add_done_callback(lambda _: changed.set())
        try:
            while news or not running.done():
                await changed.wait()
                changed.clear()
                if news:
                    pieces = [whole_text(found) for found in news.values()]
                    sent |= news.keys()
                    news.clear()
                    yield InferResult(outputs=pieces, final=False)
            yield InferResult(outputs=[tensor for tensor in running.result().outputs if tensor.name not in sent])
        finally:
            running.cancel()

    def metadata(self) -> dict[str, Any]:
        tensors = {
            what: [{"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)} for spec in specs]
            for what, specs in (("inputs", self.inputs), ("outputs", self.outputs))
        }
        platform = PLATFORMS[self._settings.kind or "onnx"]
        return {"name": self.name, "versions": [self.version], "platform": platform, **tensors}

    def config(self) -> dict[str, Any]:
        return config_of(self.name, self._settings, self._max_rows, self.inputs, self.outputs)

    async def statistics(self) -> dict[str, Any]:
        memory = [{"type": "CPU", "id": 0, "byte_size": self.runner.size}] if self.runner.size else []
        return self.statistics_of.fields(self.name, self.version) | {"memory_usage": memory}

    def withdraw(self) -> None:
        """Nothing: requests find it by the repository."""

    async def close(self) -> None:
        """Frees the model's memory."""
        await self.runner.close()

    async def _run(self, request: InferRequest, emit: Emit | None) -> InferResult:
        with self.usage:
            began = time.monotonic()
            try:
                rows = self._check.check(request)
                if self._cache is not None and emit is None and not request.priority:
                    return await self._cache.answer(request, rows, self.runner.run)
                return await self.runner.run(request, rows, emit)
            except BaseException as error:
                self.statistics_of.failed(time.monotonic() - began, error)
                raise


class ProcessRunner:
    """See Runner. The model is in a process of its framework, and its requests share batches."""

    streams = False

    def __init__(
        self,
        target: Target,
        process: ModelProcess,
        number: int,
        loaded: ModelLoaded,
        outputs: Sequence[TensorSpec],
        statistics: ModelStatistics,
        pool: ResourcePool,
    ) -> None:
        """`number` is the model's in the process. Batches need resources of the `pool`."""
        settings, rows = target.settings, loaded.max_rows
        self.note, self.size = loaded.note, loaded.size
        self._process, self._number, self._lead = process, number, 1 if rows else 0
        limits = {"max_rows": max(rows, 1), "instances": settings.instances, "starts_after": _delay()}
        rules = msgspec.structs.replace(settings.batching, **limits)
        if loaded.note or not rows:
            rules = msgspec.structs.replace(rules, mode="none")
        self.batches = BatchedModel(
            *(target.name, process, number, rules, outputs, statistics, settings.hang_timeout),
            has_rows=bool(rows),
            pool=pool,
            needs=settings.rate_limiter,
        )
        self.batcher: Batcher | None = self.batches.batcher
        self.reshaped = {each.name: each for each in (*settings.inputs, *settings.outputs) if each.reshape is not None}

    async def run(self, request: InferRequest, rows: int, emit: Emit | None = None) -> InferResult:
        if not self.reshaped:
            return await self.batches.infer(request, rows)
        inputs = [self._with_shape(tensor, inner=True) for tensor in request.inputs]
        found = await self.batches.infer(msgspec.structs.replace(request, inputs=inputs), rows)
        return InferResult(outputs=[self._with_shape(tensor, inner=False) for tensor in found.outputs])

    async def close(self) -> None:
        self.batches.close()
        await self._process.drop(self._number)

    def _with_shape(self, tensor: Tensor, *, inner: bool) -> Tensor:
        """The tensor with the shape that the model has (`inner`), or that clients see."""
        settings = self.reshaped.get(tensor.name)
        if settings is None:
            return tensor
        shape = tensor.shape[: self._lead] + _reshaped(tensor.shape[self._lead :], settings, inner=inner)
        return Tensor(tensor.name, tensor.datatype, shape, tensor.data)


class ProcessLoader:
    """Loads the models of one framework into one process, which starts with the first of them."""

    def __init__(self, kind: Kind, pool: ResourcePool, on_free: Callable[[], None]) -> None:
        """`kind` is onnx or torch. `on_free` is called when batches may run that could not; it calls `pump`."""
        self._kind, self._pool, self._on_free = kind, pool, on_free
        self.process: ModelProcess | None = None

    async def load(self, target: Target) -> OneShotModel:
        """Returns a version that is ready. Raises LoadFailed."""
        settings = target.settings
        path = target.folder / (settings.file or FILES[self._kind])
        try:
            inside(path, target.folder)
        except HostileFile as error:
            raise LoadFailed(str(error)) from None
        try:
            self._pool.check(settings.rate_limiter)
        except ValueError as error:
            raise LoadFailed(str(error)) from None
        if self.process is None:
            if self._kind == "onnx" and importlib.util.find_spec("onnxruntime") is None:
                raise LoadFailed("it needs onnxruntime: pip install 'penstock[onnx]'")
            self.process = ModelProcess(self._kind)
            self.process.on_free = self._on_free
        batched = settings.max_batch_size
        declared = tuple(spec_of(each, batched or 0) for each in settings.inputs)
        order = LoadModel(
            0,
            str(path),
            str(target.folder),
            -1 if batched is None else batched,
            declared,
            tuple(each.name for each in settings.outputs),
            settings.threads,
        )
        number, loaded = await self.process.load(order)
        inputs = _merged(loaded.inputs, settings.inputs, loaded.max_rows, complete=True)
        outputs = _merged(loaded.outputs, settings.outputs, loaded.max_rows, complete=False)
        statistics = ModelStatistics()
        runner = ProcessRunner(target, self.process, number, loaded, outputs, statistics, self._pool)
        return OneShotModel(target, inputs, outputs, loaded.max_rows, runner, statistics)

    async def close(self) -> None:
        """Ends the process."""
        if self.process is not None:
            await self.process.close()

    def pump(self) -> None:
        """Starts the batches that are due."""
        for pump in [] if self.process is None else list(self.process.stalled):
            pump()


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
        found.append(spec_of(each, max_rows))
    if complete and (missing := there.keys() - {each.name for each in declared}):
        raise LoadFailed(f"the settings lack the input {min(missing)!r} of the model; add it")
    return tuple(found)


def spec_of(settings: TensorSettings, max_rows: int) -> TensorSpec:
    """Returns the facts of a tensor that settings declare. `max_rows`: 0 if there is no batch dimension."""
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


def _delay() -> int:
    text = os.environ.get(DELAY_VARIABLE, "")
    return min(int(text), 1024) if text.isdigit() else 0
