"""Checks the tensors of a request against a model's inputs, before they are queued."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.messages import RequestRejected
from penstock.messages.tensors import InferRequest, Tensor, TensorSpec, check_data, check_shape, strings

MAX_TENSORS = 1024  # inputs of a request
MAX_KINDS = 256  # of valid requests that are kept


class RequestCheck:
    """The inputs and outputs of a model, and what requests must have."""

    def __init__(self, name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], max_rows: int) -> None:
        """`max_rows` is the size of a batch; 0: inputs have no batch dimension."""
        self._name = name
        self._inputs: Mapping[str, TensorSpec] = {spec.name: spec for spec in inputs}
        self._required = {spec.name for spec in inputs if not spec.optional}
        self._outputs = {spec.name for spec in outputs}
        self._max_rows = max_rows
        self._valid: dict[Any, int] = {}  # the rows of requests whose texts need no check, by what was checked
        self._has_texts = any(spec.datatype == "BYTES" for spec in inputs)

    def check(self, request: InferRequest) -> int:
        """Returns the rows of a request. Raises RequestRejected, which names the tensor, the value and the limit."""
        if self._has_texts:
            return self._check(request)
        kind = (request.outputs, *[(each.name, each.datatype, each.shape, len(each.data)) for each in request.inputs])
        rows = self._valid.get(kind)
        if rows is None:
            rows = self._check(request)
            if len(self._valid) >= MAX_KINDS:
                self._valid.clear()
            self._valid[kind] = rows
        return rows

    def _check(self, request: InferRequest) -> int:
        given = {tensor.name for tensor in request.inputs}
        if len(given) != len(request.inputs):
            raise RequestRejected(f"an input of {self._name!r} is there twice; send each once")
        if missing := self._required - given:
            least, most = len(self._required), len(self._inputs)
            shown = f"{most} inputs" if least == most else f"number of inputs between {least} and {most}"
            raise RequestRejected(
                f"expected {shown} but got {len(given)} inputs for model {self._name!r}. Got "
                f"input(s) [{_names(given)}], but missing required input(s) [{_names(missing)}]. Please provide all "
                "required input(s)."
            )
        if len(set(request.outputs)) != len(request.outputs):
            name = next(name for name in request.outputs if request.outputs.count(name) > 1)
            raise RequestRejected(f"output {name[:100]!r} already exists in request; name each output once")
        for name in request.outputs:
            if name not in self._outputs:
                raise RequestRejected(
                    f"unexpected inference output {name[:100]!r} for model {self._name!r}; the outputs are "
                    f"{', '.join(sorted(self._outputs))}"
                )
        rows = 1
        for number, tensor in enumerate(request.inputs):
            found = self._check_input(tensor)
            if number and found != rows:
                raise RequestRejected(
                    f"input {tensor.name!r} batch size does not match other inputs for model {self._name!r}: it has "
                    f"{found} rows, the others {rows}"
                )
            rows = found
        return rows

    def _check_input(self, tensor: Tensor) -> int:
        spec = self._inputs.get(tensor.name)
        if spec is None:
            known = ", ".join(self._inputs) or "none"
            raise RequestRejected(
                f"unexpected inference input {tensor.name[:100]!r} for model {self._name!r}; the inputs are {known}"
            )
        if tensor.datatype != spec.datatype:
            raise RequestRejected(
                f"inference input {tensor.name!r} data-type is {tensor.datatype[:40]!r}, but model {self._name!r} "
                f"expects {spec.datatype!r}"
            )
        check_shape(tensor)
        shape = tensor.shape
        fits = len(shape) == len(spec.shape) and all(
            size == wanted or (wanted == -1 and size >= 0) for size, wanted in zip(shape, spec.shape, strict=True)
        )
        if not fits:
            raise RequestRejected(
                f"unexpected shape for input {tensor.name!r} for model {self._name!r}. Expected {_shape(spec.shape)}, "
                f"got {_shape(shape)}. "
                + (
                    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be "
                    "prepended to each input shape. If you want to specify the full shape including the batch dim in "
                    "your input dims config, try setting max_batch_size to zero."
                    if self._max_rows
                    else "Send the shape that the model's metadata shows."
                )
            )
        if self._max_rows and not 1 <= shape[0] <= self._max_rows:
            raise RequestRejected(
                f"inference request batch-size must be <= {self._max_rows} for {self._name!r}, and at least 1; input "
                f"{tensor.name!r} has {min(shape[0], 2**63)} rows"
            )
        check_data(tensor, self._name)
        if tensor.datatype == "BYTES":
            _check_text(tensor)
        return shape[0] if self._max_rows else 1


def _check_text(tensor: Tensor) -> None:
    """Raises RequestRejected for a string that is not UTF-8: one request's error must not end a batch."""
    try:
        for part in strings(tensor.data, tensor.name):
            str(part, "utf-8")
    except UnicodeDecodeError:
        raise RequestRejected(f"input {tensor.name!r} has an element that is not UTF-8; send text in UTF-8") from None


def _names(names: set[str]) -> str:
    return ",".join(f"'{name[:100]}'" for name in sorted(names)[:MAX_TENSORS])


def _shape(shape: Sequence[int]) -> str:
    return f"[{','.join(str(size) if abs(size) < 2**64 else '...' for size in shape[:16])}]"
