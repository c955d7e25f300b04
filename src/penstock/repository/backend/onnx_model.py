"""An ONNX model in onnxruntime. Only the child process imports this module."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxruntime as ort

from penstock.messages.tensors import TensorSpec
from penstock.repository.backend.onnx_file import check_onnx
from penstock.repository.backend.sample import rows_of_batch, why_rows_stay_apart
from penstock.repository.backend.wire import LoadModel

_DATATYPES = {
    **{name: name.upper() for name in ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32")},
    "int64": "INT64",
    "float16": "FP16",
    "float": "FP32",
    "double": "FP64",
    "string": "BYTES",
}
_PROVIDERS = ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider")


def begin() -> None:
    """Sets up what all sessions share."""
    ort.set_default_logger_severity(3)


class OnnxModel:
    """See `penstock.repository.backend.child.ChildModel`."""

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
        self.inputs = tuple(map(_spec, self._session.get_inputs()))
        self.outputs = tuple(map(_spec, self._session.get_outputs()))
        self.max_rows = rows_of_batch(order.max_rows, self.inputs, self.outputs)
        self.note = why_rows_stay_apart(self.max_rows, self.run, self.inputs, order.inputs or self.inputs, self.outputs)

    def run(self, inputs: Mapping[str, Any], outputs: Sequence[str] = ()) -> list[Any]:
        """Returns the outputs for these inputs, arrays both. Raises what onnxruntime raises."""
        found: list[Any] = self._session.run(list(outputs) or None, inputs)
        return found


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
