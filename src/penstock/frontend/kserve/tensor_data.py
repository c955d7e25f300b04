"""Tensors as JSON values: from the lists of a request to bytes, and back."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from penstock.frontend.errors import APIError, as_api_error, invalid
from penstock.messages import QueueFull
from penstock.messages.arrays import DTYPES, pack_strings
from penstock.messages.tensors import Bytes, NotReady, Tensor, elements, strings

_KINDS = {"BOOL": "bi", "FP16": "fiub", "FP32": "fiub", "FP64": "fiub"}  # kinds of values; of integers "iub"
MAX_CLASSES = 4096  # of an answer
MAX_CLASSIFIED = 1_000_000  # elements of an output whose classes are requested


def pack(name: str, datatype: str, shape: Sequence[int], data: Any) -> bytes:
    """Returns the bytes of a tensor whose elements are in lists. Raises APIError 400."""
    shown = name[:100]
    if datatype == "BYTES":
        return pack_strings(_texts(data, shown))
    if datatype == "BF16":
        raise invalid(f"input {shown!r}: BF16 has no form in JSON; send it as binary data", "inputs")
    dtype = DTYPES.get(datatype)
    if dtype is None:
        raise invalid(
            f"input {shown!r} has the datatype {datatype[:40]!r}; it must be one of {', '.join(DTYPES)}", "inputs"
        )
    try:
        values = np.array(data if isinstance(data, list) else [data])
        if values.size and values.dtype.kind not in _KINDS.get(datatype, "iub"):
            raise ValueError(f"its values do not fit {datatype}")
        if dtype.kind in "iu" and values.size:
            limits = np.iinfo(dtype)
            if int(values.min()) < limits.min or int(values.max()) > limits.max:
                raise ValueError(f"its values must be from {limits.min} to {limits.max}")
        return values.astype(dtype).tobytes()
    except (ValueError, OverflowError, TypeError) as error:
        raise invalid(f"input {shown!r} cannot be read as {datatype}: {error}", "inputs") from None


def unpack(tensor: Tensor) -> list[Any]:
    """Returns the elements of an answer's tensor, in row-major order. Raises APIError 400."""
    if tensor.datatype == "BYTES":
        try:
            return [str(part, "utf-8") for part in strings(tensor.data, tensor.name)]
        except UnicodeDecodeError:
            raise invalid(f"output {tensor.name!r} is not UTF-8; request it as binary data", "outputs") from None
    if tensor.datatype == "BF16":
        raise invalid(
            f"output {tensor.name!r} is BF16, which has no form in JSON; request it as binary data", "outputs"
        )
    found: list[Any] = np.frombuffer(tensor.data, DTYPES[tensor.datatype]).tolist()
    return found


def classify(tensor: Tensor, count: int, labels: Sequence[str], *, rows: bool) -> Tensor:
    """Returns the `count` largest values of each row as Triton's classification extension writes them: VALUE:INDEX or
    VALUE:INDEX:LABEL. `rows`: the first dimension is the batch. Raises APIError 400."""
    if tensor.datatype in ("BYTES", "BF16"):
        raise invalid(f"class result not available for output due to unsupported type {tensor.datatype!r}", "outputs")
    if elements(tensor.shape) > MAX_CLASSIFIED:
        raise invalid(
            f"classification output tensor too large: {tensor.name!r} has {elements(tensor.shape)} elements; the "
            f"limit is {MAX_CLASSIFIED}",
            "outputs",
        )
    if not 1 <= count <= MAX_CLASSES:
        raise invalid(f"classification is {count}; it must be from 1 to {MAX_CLASSES}", "outputs")
    values = np.frombuffer(tensor.data, DTYPES[tensor.datatype])
    values = values.reshape(tensor.shape[0] if rows and tensor.shape else 1, -1)
    best = np.argsort(-values.astype(np.float64), axis=1, kind="stable")[:, :count]
    texts = [
        _class(row[index], int(index), labels).encode()
        for row, order in zip(values, best, strict=True)
        for index in order
    ]
    shape = (best.shape[0], best.shape[1]) if rows else (best.shape[1],)
    return Tensor(tensor.name, "BYTES", shape, pack_strings(texts))


def _class(value: Any, index: int, labels: Sequence[str]) -> str:
    shown = f"{value:f}" if value.dtype.kind == "f" else str(value)
    return f"{shown}:{index}:{labels[index]}" if index < len(labels) else f"{shown}:{index}"


def _texts(data: Any, name: str) -> list[bytes]:
    return list(_flat(data, name))


def _flat(data: Any, name: str) -> Iterator[bytes]:
    if isinstance(data, str):
        yield data.encode()
    elif isinstance(data, list):
        for each in data:
            yield from _flat(each, name)
    else:
        raise invalid(f"input {name!r} of BYTES must have texts in data", "inputs")


def raw_shape(size: int, datatype: str, shape: Sequence[int], name: str, *, rows: bool) -> tuple[int, ...]:
    """Returns the shape of an input whose bytes came alone, without JSON. Raises APIError 400."""
    inner = list(shape[1:] if rows else shape)
    if datatype == "BYTES":
        if elements(inner) != 1:
            raise invalid(f"For BYTE datatype raw input {name!r}, the model must have input shape [1]", "inputs")
        return (1, *inner) if rows else tuple(inner)
    free = [place for place, length in enumerate(inner) if length == -1]
    if len(free) > 1:
        raise invalid(
            f"The shape of the raw input {name!r} can not be deduced because there are more than one variable-sized "
            "dimension",
            "inputs",
        )
    if free:
        fixed = elements([length for length in inner if length != -1]) * DTYPES[datatype].itemsize
        inner[free[0]] = size // fixed if fixed else 0
    return (1, *inner) if rows else tuple(inner)


def as_bytes(data: Bytes) -> bytes:
    """The bytes themselves, copied only if they are a view."""
    return data if isinstance(data, bytes) else bytes(data)


def repository_error(error: Exception, retry_after: int) -> APIError:
    """The error of a one-shot model in KServe's wire: a full queue is 503 there, as in Triton."""
    if isinstance(error, QueueFull):
        return APIError(503, str(error), code="queue_full", retry_after=error.retry_after)
    if isinstance(error, NotReady):
        return APIError(404, str(error), code="model_not_ready")
    return as_api_error(error, retry_after)
