"""A torch.export program, executed call by call with PyTorch's operators. Only the child process imports this module.

Only operators of an allowlist run: the core of ATen, and those below that export keeps whole.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.messages.tensors import TensorSpec
from penstock.repository.backend.files import HostileFile
from penstock.repository.backend.sample import rows_of_batch, why_rows_stay_apart
from penstock.repository.backend.torch_file import MALFORMED, TorchArchive, one
from penstock.repository.backend.wire import LoadModel

MAX_DIMENSIONS = 64  # of a tensor

# PyTorch's types and the protocol's, by the number in the schema.
_TYPES = {
    1: (torch.uint8, "UINT8"),
    2: (torch.int8, "INT8"),
    3: (torch.int16, "INT16"),
    4: (torch.int32, "INT32"),
    5: (torch.int64, "INT64"),
    6: (torch.float16, "FP16"),
    7: (torch.float32, "FP32"),
    8: (torch.float64, "FP64"),
    12: (torch.bool, "BOOL"),
    13: (torch.bfloat16, "BF16"),
}
_FORMATS = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d, 4: torch.preserve_format}
_STRIDED = 7  # the layout of tensors that are not sparse
_BY_POSITION = 1  # the kind of an argument
# Operators of ATen beside the core that export keeps whole. Those with _ at the end change their first argument.
_NAMES = (
    "_assert_scalar _assert_tensor_metadata _unsafe_view adaptive_avg_pool2d adaptive_max_pool2d addcdiv addcmul all "
    "any arange avg_pool1d baddbmm batch_norm chunk concat contiguous conv1d conv2d conv3d conv_transpose1d "
    "conv_transpose2d cross detach detach_ dot dropout einsum elu_ expand_as eye feature_dropout flatten full_like "
    "gather glu group_norm gru hardsigmoid hardswish hardswish_ hardtanh_ index_add instance_norm isfinite layer_norm "
    "leaky_relu_ lerp lift_fresh_copy linalg_norm linalg_vector_norm linear linspace log_sigmoid log_softmax "
    "logsumexp lstm masked_fill masked_fill_ masked_select matmul max max_pool1d max_pool2d meshgrid min mish movedim "
    "mv narrow new_empty new_full new_ones new_zeros norm one_hot ones ones_like outer pad pixel_shuffle "
    "pixel_unshuffle prelu relu6 relu6_ relu_ repeat_interleave reshape reshape_as rms_norm roll rsub "
    "scaled_dot_product_attention select selu selu_ sigmoid_ silu silu_ softmax softplus split square stack sym_size "
    "sym_stride t take_along_dim tanh_ tensor_split tile to transpose tril triu true_divide type_as unbind unflatten "
    "unsafe_split upsample_bilinear2d upsample_nearest2d var view_as where zeros zeros_like"
)
_COMPOSITE = frozenset(_NAMES.split())
# Python's functions on sizes. Powers and shifts are left out: their results may be huge.
_OPERATORS = ("add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pos", "eq", "ne", "lt", "le", "gt", "ge")
_ON_SIZES: Mapping[str, Callable[..., Any]] = {
    **{f"_operator.{name}": getattr(operator, name) for name in (*_OPERATORS, "and_", "or_")},
    "math.trunc": math.trunc,
    "torch.sym_int": int,
    "torch.sym_float": float,
    "torch.sym_max": max,
    "torch.sym_min": min,
    "torch.sym_not": operator.not_,
    "torch.sym_sqrt": math.sqrt,
}


class _Reference(NamedTuple):
    """A value of an earlier call."""

    name: str


class _OperatorCall(NamedTuple):
    function: Callable[..., Any]
    positional: list[Any]  # values, references, and lists of both
    named: dict[str, Any]
    results: list[Any]  # a reference for each result, a list of them for a list of tensors; None: it is not used
    last_uses: list[str]  # values that no later call needs


class TorchModel:
    """See `penstock.repository.backend.child.ChildModel`."""

    def __init__(self, order: LoadModel) -> None:
        """Loads a model and runs it once. Raises HostileFile, ValueError, and what PyTorch raises."""
        archive = TorchArchive(Path(order.path), Path(order.root))
        self._threads = order.threads
        self._inner = archive.inputs, archive.outputs  # the names of inputs and outputs in the graph
        try:
            stored = {name: _tensor(name, meta, data) for name, (meta, data) in archive.tensors.items()}
            self._given = {**archive.constants, **stored}
            stays = {*self._given, *archive.inputs}
            self._calls = _calls(archive.graph["nodes"], stays, keep=stays | {*archive.outputs})
            facts = archive.graph["tensor_values"]
            declared = [spec.name for spec in order.inputs]
            named = set(declared) == set(archive.inputs)
            self.inputs = _specs("inputs", archive.inputs if named else declared, archive.inputs, facts)
            self.outputs = _specs("outputs", order.outputs, archive.outputs, facts)
        except MALFORMED as error:
            raise HostileFile(f"the graph is not one of torch.export: {error!r:.200}") from None
        self.max_rows = rows_of_batch(order.max_rows, self.inputs, self.outputs)
        self.note = why_rows_stay_apart(self.max_rows, self.run, self.inputs, order.inputs or self.inputs, self.outputs)

    def run(self, inputs: Mapping[str, Any], outputs: Sequence[str] = ()) -> list[Any]:
        """Returns the outputs for these inputs, arrays both. Raises what PyTorch raises."""
        if torch.get_num_threads() != self._threads:  # which each thread has for itself
            torch.set_num_threads(self._threads)
        there = dict(self._given)
        for spec, name in zip(self.inputs, self._inner[0], strict=True):
            given = torch.from_numpy(np.require(inputs[spec.name], requirements="W"))
            there[name] = given.view(torch.bfloat16) if spec.datatype == "BF16" else given
        with torch.inference_mode():
            for call in self._calls:
                positional = [_value(each, there) for each in call.positional]
                named = {name: _value(each, there) for name, each in call.named.items()}
                _bind(call.results, call.function(*positional, **named), there)
                for name in call.last_uses:
                    del there[name]
        names = dict(zip((spec.name for spec in self.outputs), self._inner[1], strict=True))
        return [_array(there[names[wanted]]) for wanted in outputs or names]


def begin() -> None:
    """Sets up what all models share."""
    torch.set_num_threads(1)


def _calls(nodes: Sequence[Any], stays: set[str], keep: set[str]) -> list[_OperatorCall]:
    """The nodes as calls. `stays` are tensors that no call may change, `keep` those that are needed at the end. Raises
    HostileFile for what is never executed."""
    calls, needed = [], keep
    for node in reversed(nodes):  # from the end, to find the last use of each value
        function = _function(node["target"])
        pairs = [(each["name"], each.get("kind"), _argument(*one(each["arg"]))) for each in node["inputs"]]
        positional = [value for _, kind, value in pairs if kind == _BY_POSITION]
        named = {name: value for name, kind, value in pairs if kind != _BY_POSITION}
        changes = node["target"].split(".")[-2].endswith("_") and _references(positional[:1] or [*named.values()][:1])
        if changes and changes[0] in stays:
            raise HostileFile(f"{node['target']} changes a stored tensor or an input; export the model after eval()")
        results = [_argument(*one(each)) for each in node["outputs"]]
        made, used = _references(results), _references([*positional, *named.values()])
        calls.append(_OperatorCall(function, positional, named, results, list({*made, *used} - needed)))
        needed = needed.union(used)
    return calls[::-1]


def _function(target: str) -> Callable[..., Any]:
    """The function that a node calls. Raises HostileFile."""
    if target in _ON_SIZES:
        return _ON_SIZES[target]
    parts = target.split(".")
    if parts[:3] == ["torch", "ops", "aten"] and len(parts) == 5 and not parts[3].startswith("__"):
        packet = getattr(torch.ops.aten, parts[3], None)
        found = getattr(packet, parts[4]) if packet is not None and parts[4] in packet.overloads() else None
        if found is not None and (parts[3] in _COMPOSITE or torch.Tag.core in found.tags):
            return found  # type: ignore[no-any-return]
    raise HostileFile(
        f"the operator {target[:100]!r} is not among those of ATen that are run; export the model with "
        "run_decompositions(), without custom operators and control flow"
    )


def _argument(kind: str, value: Any) -> Any:
    """A value, a reference, or a list of both. Raises HostileFile."""
    match kind:
        case "as_none":
            return None
        case "as_int" | "as_bool" | "as_string" | "as_ints" | "as_bools" | "as_strings" | "as_int_lists":
            return value
        case "as_float":
            return float(value)  # infinities and NaN are texts
        case "as_floats":
            return [float(each) for each in value]
        case "as_tensor":
            return _Reference(value["name"])
        case "as_tensors":
            return [_Reference(each["name"]) for each in value]
        case "as_optional_tensor" | "as_sym_int" | "as_sym_float" | "as_sym_bool":
            return _one_of(*one(value))
        case "as_optional_tensors" | "as_sym_ints" | "as_sym_floats" | "as_sym_bools":
            return [_one_of(*one(each)) for each in value]
        case "as_scalar_type":
            return _type(value)[0]
        case "as_memory_format":
            return _FORMATS[value]
        case "as_layout" if value == _STRIDED:
            return torch.strided
        case "as_device":
            return torch.device("cpu")  # wherever it was exported
    raise HostileFile(f"the graph has an argument {kind} {str(value)[:60]}, which is never executed")


def _one_of(kind: str, value: Any) -> Any:
    """A tensor that may be absent, or a size that may be a number."""
    if kind == "as_tensor":
        return _Reference(value["name"])
    return None if kind == "as_none" else _Reference(value) if kind == "as_name" else value


def _references(values: Sequence[Any]) -> list[str]:
    """The names of the values that arguments refer to."""
    parts = [part for value in values for part in (value if type(value) is list else [value])]
    return [part.name for part in parts if isinstance(part, _Reference)]


def _value(value: Any, there: Mapping[str, Any]) -> Any:
    if isinstance(value, _Reference):
        return there[value.name]
    return [_value(each, there) for each in value] if type(value) is list else value


def _bind(results: list[Any], found: Any, there: dict[str, Any]) -> None:
    """Stores the results of a call under their names."""
    for result, value in zip(results, found if len(results) > 1 else [found], strict=False):
        if isinstance(result, list):
            there.update(zip(_references(result), value, strict=True))
        elif isinstance(result, _Reference):
            there[result.name] = value


def _tensor(name: str, meta: Mapping[str, Any], data: bytearray) -> torch.Tensor:
    """A tensor of the archive, without a copy. Raises HostileFile if it is not within its bytes."""
    dtype = _type(meta["dtype"])[0]
    sizes, strides = ([_known(each) for each in meta[what]] for what in ("sizes", "strides"))
    first, count = _known(meta["storage_offset"]), len(data) // dtype.itemsize
    if meta["layout"] != _STRIDED or len(sizes) != len(strides) or len(sizes) > MAX_DIMENSIONS:
        raise HostileFile(f"tensor {name[:100]!r} has a layout that is not read")
    if 0 in sizes:
        return torch.empty(sizes, dtype=dtype)
    last = first + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if last >= count:
        raise HostileFile(f"tensor {name[:100]!r} has {last + 1} elements, but its file has {count}")
    return torch.frombuffer(data, dtype=dtype, count=count).as_strided(sizes, strides, first)


def _known(size: Any) -> int:
    """A size that is a number of at least 0. Raises HostileFile."""
    kind, value = one(size)
    if kind != "as_int" or not isinstance(value, int) or value < 0:
        raise HostileFile(f"a stored tensor has the size {str(value)[:60]}")
    return value


def _type(number: Any) -> tuple[torch.dtype, str]:
    if number not in _TYPES:
        raise HostileFile(
            f"the graph has tensors of type {str(number)[:20]} of PyTorch's schema, which is not supported"
        )
    return _TYPES[number]


def _specs(what: str, shown: Sequence[str], names: Sequence[str], facts: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    """The facts of inputs or outputs, under the names in the settings; else inputs have their own names, and outputs
    are numbered, as their names are those of operators. Sizes that may vary are -1. Raises HostileFile."""
    shown = shown or (names if what == "inputs" else [f"OUTPUT__{i}" for i in range(len(names))])
    if len(shown) != len(names):
        raise HostileFile(f"the settings have {len(shown)} {what}, but the model has {len(names)}")
    found = []
    for own, name in zip(shown, names, strict=True):
        sizes = [one(each) for each in facts[name]["sizes"]]
        shape = tuple(value if kind == "as_int" and isinstance(value, int) else -1 for kind, value in sizes)
        found.append(TensorSpec(own, _type(facts[name]["dtype"])[1], shape))
    return tuple(found)


def _array(tensor: torch.Tensor) -> Any:
    """An array with a tensor's content; the bits of bfloat16."""
    tensor = tensor.detach().contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
