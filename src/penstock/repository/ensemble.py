"""A graph of one-shot models that answers like one model, as Triton's ensembles do.

Steps run as soon as their inputs are there. A tensor passes from step to step by reference, and each step joins the
batches of its model.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.messages.tensors import InferRequest, InferResult, LoadFailed, Tensor, TensorModel, TensorSpec
from penstock.repository.checks import RequestCheck
from penstock.repository.entry import Target
from penstock.repository.oneshot import InFlight, metadata_of
from penstock.repository.settings import EnsembleStep, TensorSettings
from penstock.repository.statistics import ModelStatistics
from penstock.repository.triton import config_of

Find = Callable[[str, str], TensorModel | None]


class Ensemble:
    """See `penstock.messages.tensors.TensorModel`."""

    def __init__(self, target: Target, find: Find) -> None:
        """Checks the graph: names, datatypes, shapes, circles. Raises LoadFailed."""
        settings = target.settings
        self.name, self.version = target.name, str(target.version)
        self.labels: Mapping[str, Sequence[str]] = {}
        self.note = ""
        self.statistics_of = ModelStatistics()
        self.usage = InFlight()
        self._max_rows = settings.max_batch_size or 0
        self._settings, self._find = settings, find
        self.inputs = tuple(_spec(each, self._max_rows) for each in settings.inputs)
        self.outputs = tuple(_spec(each, self._max_rows) for each in settings.outputs)
        self._check = RequestCheck(target.name, self.inputs, self.outputs, self._max_rows)
        self._check_graph()

    @property
    def members(self) -> set[str]:
        """The names of the models that it needs."""
        return {step.model for step in self._settings.steps}

    async def infer(self, request: InferRequest) -> InferResult:
        """See TensorModel."""
        with self.usage:
            began = time.monotonic()
            try:
                rows = self._check.check(request)
                tensors = {tensor.name: tensor for tensor in request.inputs}
                wanted = request.outputs or tuple(spec.name for spec in self.outputs)
                await self._run(tensors, request)
                outputs = [_renamed(tensors[name], name) for name in wanted]
            except BaseException:
                self.statistics_of.failed(time.monotonic() - began)
                raise
            took = time.monotonic() - began
            self.statistics_of.batch(rows, 1, (0, int(took * 1e9), 0))
            self.statistics_of.request(took, 0.0)
            return InferResult(outputs=outputs)

    def metadata(self) -> dict[str, Any]:
        """See TensorModel."""
        return metadata_of(self.name, self.version, self._settings, self.inputs, self.outputs)

    def config(self) -> dict[str, Any]:
        """See TensorModel."""
        return config_of(self.name, self._settings, self._max_rows, self.inputs, self.outputs)

    def statistics(self) -> dict[str, Any]:
        """See TensorModel."""
        return self.statistics_of.fields(self.name, self.version)

    async def _run(self, tensors: dict[str, Tensor], request: InferRequest) -> None:
        """Adds the outputs of all steps to `tensors`. If a step fails, the others are cancelled."""
        waiting = list(self._settings.steps)
        absent = {spec.name for spec in self.inputs} - tensors.keys()  # optional inputs that the request does not have
        running: set[asyncio.Task[InferResult]] = set()
        steps: dict[asyncio.Task[InferResult], EnsembleStep] = {}
        try:
            while waiting or running:
                for step in [each for each in waiting if tensors.keys() >= set(each.inputs.values()) - absent]:
                    waiting.remove(step)
                    task = asyncio.create_task(self._step(step, tensors, request))
                    running.add(task)
                    steps[task] = step
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    names = steps[task].outputs
                    for tensor in task.result().outputs:
                        tensors[names[tensor.name]] = tensor
        finally:
            for task in running:
                task.cancel()

    async def _step(self, step: EnsembleStep, tensors: Mapping[str, Tensor], request: InferRequest) -> InferResult:
        model = self._find(step.model, step.version)
        if model is None:
            raise LoadFailed(f"ensemble {self.name!r}: its member {step.model!r} is not loaded")
        inputs = [_renamed(tensors[name], own) for own, name in step.inputs.items() if name in tensors]
        part = InferRequest(
            inputs=inputs,
            outputs=tuple(step.outputs),
            priority=request.priority,
            timeout=request.timeout,
            id=request.id,
        )
        return await model.infer(part)

    def _check_graph(self) -> None:
        given = {spec.name: spec for spec in self.inputs}
        if not self._settings.steps:
            raise LoadFailed("an ensemble needs steps")
        waiting = list(self._settings.steps)
        while waiting:
            ready = [step for step in waiting if given.keys() >= set(step.inputs.values())]
            if not ready:
                lacks = sorted({name for step in waiting for name in step.inputs.values()} - given.keys())
                raise LoadFailed(f"tensor {lacks[0]!r} is made by no step, or by steps in a circle; see input maps")
            for step in ready:
                waiting.remove(step)
                self._check_step(step, given)
        for spec in self.outputs:
            if spec.name not in given:
                raise LoadFailed(f"output {spec.name!r} is made by no step")
            _check_alike(f"output {spec.name!r}", spec, given[spec.name])

    def _check_step(self, step: EnsembleStep, given: dict[str, TensorSpec]) -> None:
        try:
            model = self._find(step.model, step.version)
        except ValueError as error:
            raise LoadFailed(f"step {step.model!r}: {error}") from None
        if model is None:
            raise LoadFailed(f"step {step.model!r}: there is no such one-shot model; load it first")
        inputs, outputs = ({spec.name: spec for spec in specs} for specs in (model.inputs, model.outputs))
        if missing := {spec.name for spec in model.inputs if not spec.optional} - step.inputs.keys():
            raise LoadFailed(f"step {step.model!r}: its input {min(missing)!r} is not mapped")
        for own, name in step.inputs.items():
            if own not in inputs:
                raise LoadFailed(f"step {step.model!r} has no input {own!r}; it has {', '.join(inputs)}")
            _check_alike(f"input {own!r} of step {step.model!r}", inputs[own], given[name])
        for own, name in step.outputs.items():
            if own not in outputs:
                raise LoadFailed(f"step {step.model!r} has no output {own!r}; it has {', '.join(outputs)}")
            if name in given:
                raise LoadFailed(f"tensor {name!r} is made twice; give outputs different names")
            given[name] = outputs[own]


def _check_alike(what: str, one: TensorSpec, other: TensorSpec) -> None:
    """Raises LoadFailed unless a tensor can be both."""
    if one.datatype != other.datatype:
        raise LoadFailed(f"{what} is {one.datatype}, but gets {other.datatype}")
    pairs = list(zip(one.shape, other.shape, strict=False))
    if len(one.shape) != len(other.shape) or not all(a == b or -1 in (a, b) for a, b in pairs):
        raise LoadFailed(f"{what} has the shape {list(one.shape)}, but gets {list(other.shape)}")


def _renamed(tensor: Tensor, name: str) -> Tensor:
    return Tensor(name, tensor.datatype, tensor.shape, tensor.data)


def _spec(settings: TensorSettings, max_rows: int) -> TensorSpec:
    shape = (-1, *settings.dims) if max_rows else settings.dims
    return TensorSpec(settings.name, settings.datatype, shape, settings.optional)
