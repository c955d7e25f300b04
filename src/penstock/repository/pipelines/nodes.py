"""The nodes of a pipeline's graph. Each is checked once, and then runs with the tensors of a request.

A tensor passes from node to node by reference. A node runs as soon as the tensors that it needs are there.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from penstock.messages import RequestRejected
from penstock.messages.tensors import InferRequest, InferResult, LoadFailed, MemberModel, Tensor, TensorSpec
from penstock.repository.chains import ChainRequest, NextStep
from penstock.repository.pipelines.rows import divided, joined, whole_text
from penstock.repository.settings import PipelineStep

Specs = dict[str, TensorSpec]
Tensors = dict[str, Tensor]
# Returns a model that is ready: by name, by version, and by the kind of step that uses it.
Find = Callable[[str, str, str], MemberModel | None]


class PipelineCall(NamedTuple):
    """A request to a pipeline, as its nodes see it."""

    request: InferRequest
    absent: frozenset[str]  # optional inputs that it does not have
    wanted: tuple[str, ...] = ()  # outputs to send in pieces, if a model gives them so
    emit: Callable[[Tensor], None] | None = None  # takes such pieces; None: the client reads the whole answer


class PlannedNode(Protocol):
    """A part of a graph that has been checked."""

    needs: frozenset[str]  # tensors without which it cannot run
    makes: frozenset[str]

    async def run(self, tensors: Tensors, call: PipelineCall) -> Tensors:
        """Returns the tensors that it makes. Raises what models raise."""


class PipelineNode(PlannedNode, Protocol):
    """A part of a graph."""

    def check(self, given: Specs) -> Specs:
        """Returns the tensors that it makes from those given. Raises LoadFailed."""


class ModelNode:
    """A PipelineNode with a model, or a tokenizer. Its request joins the batches of the model."""

    def __init__(self, step: PipelineStep, find: Find) -> None:
        self._step, self._find, self._kind = step, find, step.kind
        self.inputs, self.outputs = step.inputs, step.outputs
        self.needs, self.makes = frozenset(step.inputs.values()), frozenset(step.outputs.values())

    def check(self, given: Specs) -> Specs:
        step = self._step
        try:
            model = self._model()
        except ValueError as error:
            raise LoadFailed(f"step {step.name!r}: {error}") from None
        inputs, outputs = ({spec.name: spec for spec in specs} for specs in (model.inputs, model.outputs))
        if missing := {spec.name for spec in model.inputs if not spec.optional} - step.inputs.keys():
            raise LoadFailed(f"step {step.name!r}: its input {min(missing)!r} is not mapped")
        for own, name in step.inputs.items():
            if own not in inputs:
                raise LoadFailed(f"step {step.name!r} has no input {own!r}; it has {', '.join(inputs)}")
            check_alike(f"input {own!r} of step {step.name!r}", inputs[own], given[name])
            if given[name].optional and not inputs[own].optional:
                raise LoadFailed(f"input {own!r} of step {step.name!r} is required, but {name!r} is optional")
        for own in step.outputs:
            if own not in outputs:
                raise LoadFailed(f"step {step.name!r} has no output {own!r}; it has {', '.join(outputs)}")
        if len(self.makes) < len(step.outputs):
            raise LoadFailed(f"step {step.name!r} makes a tensor twice; give outputs different names")
        return {name: outputs[own] for own, name in step.outputs.items()}

    def found(self) -> MemberModel | None:
        """Returns the model; None if it is not ready."""
        try:
            return self._model()
        except RequestRejected:
            return None

    async def run_with(
        self,
        model: MemberModel,
        then: tuple[NextStep, ...],
        others: Sequence["ModelNode"],
        tensors: Tensors,
        call: PipelineCall,
    ) -> tuple[Tensors, int]:
        """Runs the model that was found, and as many of the `others` as can run at once after it, which are `then`.
        Returns the tensors that the last one makes, and how many others ran."""
        request = ChainRequest(**self._fields(tensors, call), then=then)
        result = await model.infer(request)
        last = others[request.ran - 1] if request.ran else self
        return last._renamed(result), request.ran

    async def run(self, tensors: Tensors, call: PipelineCall) -> Tensors:
        part = InferRequest(**self._fields(tensors, call))
        model = self._model()
        if call.emit is not None and model.streams and not self.makes.isdisjoint(call.wanted):
            return await self._stream(model, part, call)
        return self._renamed(await model.infer(part))

    def _fields(self, tensors: Tensors, call: PipelineCall) -> dict[str, Any]:
        request = call.request
        return {
            "inputs": [renamed(tensors[name], own) for own, name in self.inputs.items() if name in tensors],
            "outputs": tuple(self.outputs),
            "priority": request.priority,
            "timeout": request.timeout,
            "id": request.id,
        }

    async def _stream(self, model: MemberModel, part: InferRequest, call: PipelineCall) -> Tensors:
        assert call.emit is not None
        pieces: dict[str, list[Tensor]] = {}
        async for result in model.stream(part):
            for name, tensor in self._renamed(result).items():
                pieces.setdefault(name, []).append(tensor)
                if name in call.wanted and not result.final:
                    call.emit(tensor)
        return {name: whole_text(found) for name, found in pieces.items()}

    def _renamed(self, result: InferResult) -> Tensors:
        names = self.outputs
        there = (tensor for tensor in result.outputs if tensor.name in names)
        return {names[tensor.name]: renamed(tensor, names[tensor.name]) for tensor in there}

    def _model(self) -> MemberModel:
        """Raises LoadFailed, and NotReady."""
        step = self._step
        model = self._find(step.name, step.version, self._kind)
        if model is None:
            what = "one-shot or language model" if self._kind == "model" else "model with a tokenizer"
            raise LoadFailed(f"step {step.name!r}: there is no such {what}; load it first")
        return model


class ColumnsNode:
    """A PipelineNode that divides the last dimension of a tensor, or puts tensors beside each other along it."""

    def __init__(self, step: PipelineStep) -> None:
        self._step, self._name = step, step.split or step.merge
        parts = frozenset(step.into if step.split else step.of)
        self.needs, self.makes = (frozenset([self._name]), parts) if step.split else (parts, frozenset([self._name]))

    def check(self, given: Specs) -> Specs:
        step, specs = self._step, [required(given, name) for name in (self._step.of or self.needs)]
        if (
            not (step.into or step.of)
            or min(step.into.values(), default=1) < 1
            or not all(spec.shape for spec in specs)
        ):
            raise LoadFailed(f"{step.kind} {self._name!r} needs tensors with dimensions, and sizes of at least 1")
        first, total = specs[0], sum(step.into.values())
        if step.split:
            if first.shape[-1] not in (-1, total):
                raise LoadFailed(
                    f"split {self._name!r} has the shape {list(first.shape)}; its parts need {total} columns"
                )
            return {name: _sized(first, name, size) for name, size in step.into.items()}
        for spec in specs:
            check_alike(f"merge {self._name!r}: tensor {spec.name!r}", _sized(spec, spec.name, -1), first)
        sizes = [spec.shape[-1] for spec in specs]
        return {self._name: _sized(first, self._name, -1 if -1 in sizes else sum(sizes))}

    async def run(self, tensors: Tensors, call: PipelineCall) -> Tensors:
        if self._step.split:
            return {part.name: part for part in divided(tensors[self._name], self._step.into)}
        return {self._name: joined(self._name, [tensors[name] for name in self._step.of])}


def check_alike(what: str, one: TensorSpec, other: TensorSpec) -> None:
    """Raises LoadFailed unless a tensor can be both."""
    if one.datatype != other.datatype:
        raise LoadFailed(f"{what} is {one.datatype}, but gets {other.datatype}")
    pairs = list(zip(one.shape, other.shape, strict=False))
    if len(one.shape) != len(other.shape) or not all(a == b or -1 in (a, b) for a, b in pairs):
        raise LoadFailed(f"{what} has the shape {list(one.shape)}, but gets {list(other.shape)}")


def required(given: Specs, name: str) -> TensorSpec:
    """Returns a tensor that every request has. Raises LoadFailed."""
    spec = given[name]
    if spec.optional:
        raise LoadFailed(f"input {name!r} is optional; only steps with models can take it")
    return spec


def renamed(tensor: Tensor, name: str) -> Tensor:
    """Returns the same tensor with another name."""
    return Tensor(name, tensor.datatype, tensor.shape, tensor.data)


def _sized(spec: TensorSpec, name: str, size: int) -> TensorSpec:
    return TensorSpec(name, spec.datatype, (*spec.shape[:-1], size))
