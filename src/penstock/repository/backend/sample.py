"""Tries a model with made-up inputs: whether it runs, and whether rows of several requests may share a batch."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.messages.arrays import BF16_BITS, DTYPES
from penstock.messages.tensors import TensorSpec

_SIZE = 4  # of dimensions of any size
_ROWS = 3
DEFAULT_ROWS = 32  # of a batch
Run = Callable[[Mapping[str, Any]], list[Any]]


def rows_of_batch(wanted: int, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    """Returns the most rows of a batch; 0: tensors have no batch dimension. `wanted` is that of the settings, -1 if the
    model decides. Raises ValueError if the model cannot do what they want."""
    batched = all(spec.shape and spec.shape[0] == -1 for spec in (*inputs, *outputs))
    if wanted > 0 and not batched:
        raise ValueError(
            f"max-batch-size is {wanted}, but the first dimension of an input or output of the model has a fixed size: "
            "set it to 0, or export the model with a batch dimension of any size"
        )
    return (DEFAULT_ROWS if batched else 0) if wanted < 0 else wanted


def why_rows_stay_apart(
    max_rows: int, run: Run, own: Sequence[TensorSpec], declared: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> str:
    """Tries whether a row's result depends on the other rows of its batch. Returns why rows must not be joined, "" if
    they may. In both runs the batch has the same size, so that equal rows must give equal bits.

    `own` are the inputs that the model has, `declared` those of the settings, whose sizes may be fixed.
    """
    if max_rows < 2:
        return "there is no batch dimension"
    random = np.random.default_rng(0)
    by_name = {spec.name: spec for spec in own}
    shapes = {spec.name: _shape(by_name[spec.name], spec) for spec in declared if spec.name in by_name}
    try:
        first = {name: _array(by_name[name].datatype, shape, random) for name, shape in shapes.items()}
        other = {name: _array(by_name[name].datatype, shape, random) for name, shape in shapes.items()}
        for name, array in other.items():
            array[0] = first[name][0]
        before, after = run(first), run(other)
        alone = run({name: array[:1] for name, array in first.items()})
    except Exception as error:
        return f"a run with a sample failed: {str(error)[:200]}"
    for spec, one, two, single in zip(outputs, before, after, alone, strict=True):
        if one.shape[0] != _ROWS or single.shape[0] != 1:
            return f"output {spec.name!r} has {one.shape[0]} rows for {_ROWS} rows of input"
        if not np.array_equal(one[0], two[0], equal_nan=one.dtype.kind == "f"):
            return f"output {spec.name!r} of a row depends on the other rows"
    return ""


def _shape(own: TensorSpec, declared: TensorSpec) -> tuple[int, ...]:
    sizes = declared.shape if len(declared.shape) == len(own.shape) else own.shape
    known = (theirs if theirs > 0 else ours for theirs, ours in zip(sizes[1:], own.shape[1:], strict=True))
    return _ROWS, *(size if size > 0 else _SIZE for size in known)


def _array(datatype: str, shape: tuple[int, ...], random: Any) -> Any:
    if datatype == "BYTES":
        texts = [str(number) for number in random.integers(0, 2, math.prod(shape))]
        return np.array(texts, dtype=object).reshape(shape)
    dtype = DTYPES.get(datatype, BF16_BITS)
    if dtype.kind == "f":
        return random.standard_normal(shape).astype(dtype)
    return random.integers(0, 2, shape).astype(dtype)  # small, as they may be indices
