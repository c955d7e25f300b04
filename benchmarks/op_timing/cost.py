"""The bytes and multiplications that an op of a recorded program needs, computed from the op's own fields."""

from ctypes import c_int32, c_int64
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.bench.roofline import MachineRates
from penstock.config.facts import SCALE_BYTES
from penstock.config.weights import WeightFormat
from penstock.kernels.native.structs import (
    CODES,
    EPILOGUES,
    F32,
    I8,
    SCALES,
    SCHEMES,
    AdvanceOp,
    AttentionOp,
    CacheOp,
    EmbeddingOp,
    ExpertsOp,
    FillOp,
    FiniteOp,
    GateOp,
    LatentOp,
    LinearOp,
    Matrix,
    NormOp,
    RecurrenceOp,
    RotationOp,
    RouteOp,
    SampleOp,
)
from penstock.messages import Window


@dataclass(frozen=True)
class OpCost:
    """The least work of an op: each input is read once, and each output is written once."""

    bytes: float = 0.0
    flops: float = 0.0  # multiply-adds counted twice

    def __add__(self, other: "OpCost") -> "OpCost":
        return OpCost(self.bytes + other.bytes, self.flops + other.flops)

    def least_seconds(self, machine: MachineRates) -> float:
        return max(self.bytes / machine.bandwidth, self.flops / machine.flops)


def op_cost(op: Any) -> OpCost:
    """The cost of a native op with the values that its cells have now. Call it before the next step fills them."""
    size = 4 if getattr(op, "dtype", F32) == F32 else 2
    match op:
        case LinearOp():
            rows, weight = _cell(op.rows), op.weight
            width = weight.n // 2 if 0 < op.epilogue < len(EPILOGUES) else weight.n
            out = width * (4 if op.out_dtype == F32 else 2)
            residual = width * size if op.residual else 0
            return OpCost(
                weight_bytes(weight) + rows * (op.heads * weight.k * size + out + residual),
                2.0 * rows * weight.n * weight.k,
            )
        case EmbeddingOp():
            rows, table = _cell(op.rows), op.table
            return OpCost(rows * (weight_bytes(table) / table.n + table.k * size), 0.0)
        case NormOp():
            rows = _cell(op.rows)
            return OpCost(rows * op.width * size * (4 if op.residual else 2), 0.0)
        case RotationOp():
            return OpCost(_cell(op.rows) * (8 + (16 if op.every else 8) * op.half), 0.0)
        case CacheOp():
            rows, heads = _cell(op.rows), op.heads + 2 * op.kv_heads
            moved = (heads + op.heads) * op.head_dim * size + 2 * op.kv_heads * _page_bytes(op)
            return OpCost(rows * (moved + 4 * op.rotation_stride), 0.0)
        case AttentionOp():
            return _attention(op, size)
        case RouteOp():
            return OpCost(_cell(op.rows) * (4 * op.count + 12 * op.slots), 0.0)
        case ExpertsOp():
            return _experts(op, size)
        case SampleOp():
            return OpCost(_cell(op.count) * op.vocab * 4.0, 0.0)
        case FillOp():
            return OpCost(_cell(op.sequences) * 8.0 * (6 + 5 * op.group_count), 0.0)
        case AdvanceOp():
            return OpCost(_cell(op.sequences) * 8.0 * 9, 0.0)
        case FiniteOp():
            return OpCost(_cell(op.rows) * (op.width * size + 1.0), 0.0)
        case RecurrenceOp():
            return _recurrence(op, size)
        case LatentOp():
            moved = op.heads * (op.rank + op.rope) + op.rank + op.rope
            return OpCost(_cell(op.rows) * (2 * moved * size + 4 * op.rope), 0.0)
        case GateOp():
            return OpCost(_cell(op.rows) * op.width * size * 3.0, 0.0)
    raise TypeError(f"{type(op).__name__} has no cost here: add a case to op_cost")


def weight_bytes(weight: Matrix) -> float:
    """Bytes of the values, their scales and their minima, without padding."""
    f = weight.format
    fmt = WeightFormat(SCHEMES[f.scheme], CODES[f.codes], SCALES[f.scales], bool(f.mins), f.group, f.zero)
    factors = 0
    if fmt.scheme == "grouped":
        factors = -(-weight.k // fmt.group) * fmt.scale_bytes + fmt.supers(weight.k) * 2
    return weight.n * (weight.k * fmt.bits / 8 + factors * (2 if fmt.mins else 1) + fmt.column_bytes)


def _experts(op: ExpertsOp, size: int) -> OpCost:
    """Reads the matrices of the experts that the last run chose, each once."""
    read, multiplied = _array(op.tally, c_int64, 2).tolist()
    rows = _cell(op.rows)
    activations = (2 + bool(op.shared) + bool(op.residual)) * op.down.n * size + 12 * op.slots
    values = op.gate_up.n * op.gate_up.k + op.down.n * op.down.k
    return OpCost(
        read * (weight_bytes(op.gate_up) + weight_bytes(op.down)) + rows * activations, 2.0 * multiplied * values
    )


def _attention(op: AttentionOp, size: int) -> OpCost:
    """Reads each key and value that a query of the sequence sees once; multiplies every query with all that it sees."""
    items = _array(op.items, c_int32, _cell(op.item_count) * 5).reshape(-1, 5)
    sequences = np.unique(items[:, 0])
    if not len(sequences):
        return OpCost()
    count = int(sequences[-1]) + 1
    starts = _array(op.query_start, c_int64, count + 1)
    contexts = _array(op.context_lens, c_int64, count)
    read = pairs = queries = 0
    for sequence in sequences.tolist():
        length = int(starts[sequence + 1] - starts[sequence])
        context = int(contexts[sequence])
        at = np.arange(context - length, context)
        first = Window(op.window, bool(op.chunked)).first_seen(at)
        seen = at + 1 - first
        read += context - int(first[0])
        pairs += int(seen.sum())
        queries += length
    kept, widths = (2 if op.values else 1) * op.kv_heads * _page_bytes(op), op.head_dim + op.value_dim
    return OpCost(read * kept + queries * op.heads * widths * size, 2.0 * pairs * op.heads * widths)


def _recurrence(op: RecurrenceOp, size: int) -> OpCost:
    """Reads and writes the state of each sequence once."""
    rows, values = _cell(op.rows), op.heads * op.value_dim
    channels = 2 * op.key_heads * op.key_dim + values
    states = 2.0 * _cell(op.sequences) * (values * op.key_dim + (op.taps - 1) * channels) * 4
    moved = rows * (channels + 2 * values) * size + op.taps * channels * 4
    return OpCost(states + moved, rows * (6.0 * values * op.key_dim + 2.0 * op.taps * channels))


def _page_bytes(op: CacheOp | AttentionOp) -> int:
    """Bytes of one token's key (or value) for one head. An int8 one includes its fp32 scale."""
    if op.page_dtype == I8:
        return int(op.head_dim) + SCALE_BYTES
    return int(op.head_dim) * (4 if op.page_dtype == F32 else 2)


def _cell(address: int) -> int:
    return c_int64.from_address(address).value


def _array(address: int, kind: type[c_int32] | type[c_int64], count: int) -> NDArray[Any]:
    """A view of `count` numbers at an address."""
    return np.ctypeslib.as_array((kind * count).from_address(address))
