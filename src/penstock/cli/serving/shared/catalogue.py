"""The models of the supervisor's repository, as it describes them to an API process."""

from collections.abc import Iterable
from typing import Any

import msgspec

from penstock.messages.tensors import InferRequest, InferResult, Tensor, TensorModel, TensorSpec
from penstock.prepare.model import AnswerSettings

TensorFields = tuple[str, str, tuple[int, ...], Any]  # a Tensor


class NewVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The settings with which a process loads a version."""

    answers: AnswerSettings
    texts: str
    created: int


class LanguageEntry(msgspec.Struct, frozen=True):
    """A language model that is loaded."""

    channel: int  # of its version
    keep_alive: float | None  # seconds; None: its engine does not end by itself
    rolls_out: bool  # requests are copied for a rollout


class OneShotEntry(msgspec.Struct, frozen=True):
    """A version of a one-shot model that is ready. See TensorModel."""

    name: str
    version: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    labels: dict[str, list[str]]
    streams: bool
    metadata: dict[str, Any]
    config: dict[str, Any]

    @classmethod
    def of(cls, model: TensorModel) -> "OneShotEntry":
        labels = {name: list(names) for name, names in model.labels.items()}
        facts = tuple(model.inputs), tuple(model.outputs), labels, model.streams, model.metadata(), model.config()
        return cls(model.name, model.version, *facts)


class Catalogue(msgspec.Struct, frozen=True):
    """The models of a repository."""

    number: int = 0  # a later one has a higher number
    begun: bool = False  # the models are loaded that the server starts with
    models: dict[str, LanguageEntry] = {}
    live: frozenset[int] = frozenset()  # the channels of all versions that have an engine
    absent: frozenset[str] = frozenset()  # models that their first request loads
    one_shot: tuple[OneShotEntry, ...] = ()
    unready: dict[str, str] = {}  # why other models of the repository are not ready
    labels: dict[str, dict[str, int]] = {}  # names of versions, by model


class VersionEntry(msgspec.Struct, frozen=True):
    """How a process loads a version of a language model."""

    settings: bytes  # a NewVersion as JSON
    series: str  # the name of its metrics


def tensor_fields(tensors: Iterable[Tensor]) -> list[TensorFields]:
    """Returns tensors as they are sent."""
    return [(tensor.name, tensor.datatype, tensor.shape, tensor.data) for tensor in tensors]


def request_fields(request: InferRequest) -> tuple[Any, ...]:
    """Returns a request as it is sent."""
    return tensor_fields(request.inputs), request.outputs, request.priority, request.timeout, request.id


def read_request(fields: Any) -> InferRequest:
    """Returns what `request_fields` was given."""
    inputs, outputs, priority, timeout, request_id = fields
    found = [Tensor(name, datatype, tuple(shape), data) for name, datatype, shape, data in inputs]
    return InferRequest(inputs=found, outputs=tuple(outputs), priority=priority, timeout=timeout, id=request_id)


def read_result(fields: Any) -> tuple[str, InferResult]:
    """Returns the version that has answered, and its result."""
    version, outputs, final = fields
    found = [Tensor(name, datatype, tuple(shape), data) for name, datatype, shape, data in outputs]
    return version, InferResult(outputs=found, final=final)
