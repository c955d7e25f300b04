"""An ONNX model in onnxruntime. Only the child process imports this module."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from penstock.messages.tensors import LENGTH_BYTES, TensorSpec, strings
from penstock.repository.backend.onnx_file import check_onnx
from penstock.repository.backend.wire import LoadModel

_DATATYPES = {
    **{name: name.upper() for name in ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32")},
    "int64": "INT64",
    "float16": "FP16",
    "float": "FP32",
    "double": "FP64",
    "string": "BYTES",
}
NUMPY: Mapping[str, Any] = {
    **{name.upper(): np.dtype(name) for name in ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16")},
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
_OF_NUMPY = {dtype: name for name, dtype in NUMPY.items()}
_PROVIDERS = ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider")
_SAMPLE = 4  # the size of dimensions of any size in the sample that a model is tried with
_ROWS = 3  # of the sample
DEFAULT_ROWS = 32


def begin() -> None:
    """Sets up what all sessions share."""
    ort.disable_telemetry_events()
    ort.set_default_logger_severity(3)


class OnnxModel:
    """A session, and the facts that the server needs."""

    def __init__(self, order: LoadModel) -> None:
        """Loads a model and runs it once. Raises ValueError, and what onnxruntime raises."""
        path, root = Path(order.path), Path(order.root)
        check_onnx(path, root)
        options = ort.SessionOptions()
        options.intra_op_num_threads = order.threads  # 1: the run stays on the thread that took the packet
        options.inter_op_num_threads = 1
        options.enable_cpu_mem_arena = False  # it would keep the largest batch's memory for good
        options.enable_mem_pattern = False
        # Threads that wait for each other must not spin: the server and the other models need the processors.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        there = ort.get_available_providers()
        providers = [name for name in _PROVIDERS if name in there]
        self._session = ort.InferenceSession(str(path), options, providers=providers)
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        self.inputs = tuple(map(_spec, inputs))
        self.outputs = tuple(map(_spec, outputs))
        self._by_name = {spec.name: spec for spec in self.inputs}
        self.output_names = [spec.name for spec in self.outputs]
        batched = all(spec.shape and spec.shape[0] == -1 for spec in (*self.inputs, *self.outputs))
        self.max_rows = (DEFAULT_ROWS if batched else 0) if order.max_rows < 0 else order.max_rows
        if order.max_rows > 0 and not batched:
            raise ValueError(
                f"max-batch-size is {order.max_rows}, but the first dimension of an input or output of the model has a "
                "fixed size: set it to 0, or export the model with a batch dimension of any size"
            )
        self.note = self._rows_join(order.inputs or self.inputs) if self.max_rows > 1 else "there is no batch dimension"

    def run(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> list[Any]:
        """Returns the outputs for these inputs, arrays both. Raises what onnxruntime raises."""
        found: list[Any] = self._session.run(list(outputs) or None, inputs)
        return found

    def _rows_join(self, declared: Sequence[TensorSpec]) -> str:
        """Tries whether a row's result depends on the other rows of its batch. Returns why rows must not be joined, ""
        if they may. In both runs the batch has the same size, so that equal rows must give equal bits."""
        random = np.random.default_rng(0)
        shapes = {
            spec.name: _sample_shape(self._by_name[spec.name], spec) for spec in declared if spec.name in self._by_name
        }
        try:
            first = {name: _sample(self._by_name[name].datatype, shape, random) for name, shape in shapes.items()}
            other = {name: _sample(self._by_name[name].datatype, shape, random) for name, shape in shapes.items()}
            for name, array in other.items():
                array[0] = first[name][0]
            before, after = self.run(first, ()), self.run(other, ())
            alone = self.run({name: array[:1] for name, array in first.items()}, ())
        except Exception as error:
            return f"a run with a sample failed: {str(error)[:200]}"
        for spec, one, two, single in zip(self.outputs, before, after, alone, strict=True):
            if one.shape[0] != _ROWS or single.shape[0] != 1:
                return f"output {spec.name!r} has {one.shape[0]} rows for {_ROWS} rows of input"
            if not np.array_equal(one[0], two[0], equal_nan=one.dtype.kind == "f"):
                return f"output {spec.name!r} of a row depends on the other rows"
        return ""


def read_array(data: memoryview, datatype: str, shape: Sequence[int]) -> Any:
    """Returns a tensor as an array; its data is not copied, except strings."""
    if datatype == "BYTES":
        texts = [str(part, "utf-8") for part in strings(data, "BYTES")]
        return np.array(texts, dtype=object).reshape(shape)
    return np.frombuffer(data, NUMPY[datatype]).reshape(shape)


def write_array(array: Any) -> tuple[str, Any]:
    """Returns an array's datatype, and its data as a tensor has it."""
    if array.dtype == object:
        parts = [text if isinstance(text, bytes) else str(text).encode() for text in array.ravel()]
        return "BYTES", b"".join(b"%b%b" % (len(part).to_bytes(LENGTH_BYTES, "little"), part) for part in parts)
    name = _OF_NUMPY.get(array.dtype)
    if name is None:
        raise ValueError(f"an output has the type {array.dtype}, which KServe's protocol does not have")
    return name, np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _spec(argument: Any) -> TensorSpec:
    """The facts of an input or output. Raises ValueError for a type that the protocol does not have."""
    kind = argument.type.removeprefix("tensor(").removesuffix(")")
    if kind not in _DATATYPES:
        raise ValueError(
            f"{argument.name!r} has the type {argument.type}; the types are {', '.join(_DATATYPES)}: convert it in "
            "the model"
        )
    shape = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in argument.shape)
    return TensorSpec(argument.name, _DATATYPES[kind], shape)


def _sample_shape(own: TensorSpec, declared: TensorSpec) -> tuple[int, ...]:
    sizes = declared.shape if len(declared.shape) == len(own.shape) else own.shape
    known = (theirs if theirs > 0 else ours for theirs, ours in zip(sizes[1:], own.shape[1:], strict=True))
    return _ROWS, *(size if size > 0 else _SAMPLE for size in known)


def _sample(datatype: str, shape: tuple[int, ...], random: Any) -> Any:
    count = math.prod(shape)
    if datatype == "BYTES":
        return np.array([str(number) for number in random.integers(0, 2, count)], dtype=object).reshape(shape)
    dtype = NUMPY[datatype]
    if dtype.kind == "f":
        return random.standard_normal(shape).astype(dtype)
    return random.integers(0, 2, shape).astype(dtype)  # small, as they may be indices
