"""Runs native ops with every tensor between two forbidden pages.

GuardedSession can replace any session. It computes the bytes of each of an op's tensors from the op's shape, and moves
the tensor so that its end (or its beginning) touches a forbidden page: an access one byte outside ends the process with
a segmentation fault. Tensors that an op must not change are compared afterwards.
"""

import ctypes
import mmap
from collections.abc import Iterator, Mapping
from ctypes import c_int, c_int32, c_int64, c_size_t, c_void_p
from typing import Any, NamedTuple

import numpy as np

from penstock.config.weights import COLUMNS, WeightFormat, num_blocks
from penstock.kernels.native.layout import Layout
from penstock.kernels.native.session import AnyOp, Session
from penstock.kernels.native.structs import (
    CODES,
    EPILOGUES,
    F32,
    SCALES,
    SCHEMES,
    AttentionOp,
    CacheOp,
    EmbeddingOp,
    ExpertsOp,
    GateOp,
    LatentOp,
    LinearOp,
    LogitEdits,
    Matrix,
    NormOp,
    PackedLogprobs,
    RecurrenceOp,
    RotationOp,
    RouteOp,
    SampleOp,
)
from penstock.kernels.native.team import ThreadTeam

PAGE = mmap.PAGESIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = c_void_p
_libc.mmap.argtypes = (c_void_p, c_size_t, c_int, c_int, c_int, ctypes.c_long)
_libc.munmap.argtypes = (c_void_p, c_size_t)
_libc.mprotect.argtypes = (c_void_p, c_size_t, c_int)


class Extent(NamedTuple):
    """A tensor of an op."""

    owner: ctypes.Structure  # the struct with the tensor's address
    field: str  # the field with the address
    size: int  # bytes
    written: bool = False


class GuardedMemory:
    """Memory for one tensor, between two forbidden pages."""

    def __init__(self, size: int, *, at_end: bool) -> None:
        self._whole = -(-max(size, 1) // PAGE) * PAGE + 2 * PAGE
        access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANON
        self._base = _libc.mmap(None, self._whole, access, kind, -1, 0)
        for page in (self._base, self._base + self._whole - PAGE):
            if _libc.mprotect(page, PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        self.address = self._base + self._whole - PAGE - size if at_end else self._base + PAGE

    def close(self) -> None:
        _libc.munmap(self._base, self._whole)


class GuardedSession(Session):
    """`short`: bytes to withhold from a tensor, by its name, to show that the guard works."""

    def __init__(self, team: ThreadTeam, *, at_end: bool, short: Mapping[str, int] | None = None) -> None:
        super().__init__(team)
        self._at_end = at_end
        self._short = short or {}

    def run(self, op: AnyOp, *keep: Any) -> None:
        guarded = type(op).from_buffer_copy(op)
        moved: list[tuple[Extent, int, GuardedMemory]] = []
        for extent in list(_extents(guarded)):
            if given := getattr(extent.owner, extent.field):
                memory = GuardedMemory(extent.size, at_end=self._at_end)
                ctypes.memmove(memory.address, given, extent.size)
                setattr(extent.owner, extent.field, memory.address + self._short.get(extent.field, 0))
                moved.append((extent, given, memory))
        pools = self._pools(guarded, keep)
        super().run(guarded)
        for extent, given, memory in moved:
            if extent.written:
                ctypes.memmove(given, memory.address, extent.size)
            elif ctypes.string_at(given, extent.size) != ctypes.string_at(memory.address, extent.size):
                raise AssertionError(f"{type(op).__name__} wrote to its {extent.field}")
            memory.close()
        for given, size, memory in pools:
            ctypes.memmove(given, memory.address, size)
            memory.close()

    def _pools(self, op: AnyOp, keep: tuple[Any, ...]) -> list[tuple[int, int, GuardedMemory]]:
        """Moves the KV pages as a whole: keys and values may be views of one pool or of two."""
        pools: dict[int, GuardedMemory] = {}
        sizes: dict[int, int] = {}
        fields = {CacheOp: ("keys", "values"), AttentionOp: ("keys", "values"), LatentOp: ("pages",)}.get(type(op), ())
        for field, tensor in zip(fields, keep[len(keep) - len(fields) :], strict=True):
            if tensor is None:  # keys are values too
                continue
            storage = tensor.untyped_storage()
            base = storage.data_ptr()
            if base not in pools:
                pools[base], sizes[base] = GuardedMemory(storage.nbytes(), at_end=self._at_end), storage.nbytes()
                ctypes.memmove(pools[base].address, base, storage.nbytes())
            setattr(op, field, pools[base].address + getattr(op, field) - base)
        return [(base, sizes[base], memory) for base, memory in pools.items()]


def _extents(op: AnyOp) -> Iterator[Extent]:
    """All tensors of an op except the pages."""
    size = 4 if getattr(op, "dtype", F32) == F32 else 2
    if isinstance(op, AttentionOp):
        yield from _of_attention(op, size)
        return
    if isinstance(op, SampleOp):
        yield from _of_sampling(op)
        return
    rows = _cell(op.rows)
    yield Extent(op, "rows", 8)
    if isinstance(op, EmbeddingOp):
        yield Extent(op, "ids", rows * 8)
        yield from _of_matrix(op.table)
        yield Extent(op, "out", rows * op.table.k * size, True)
    elif isinstance(op, NormOp):
        yield Extent(op, "weight", op.width * size)
        yield Extent(op, "bias", op.width * size)
        for field, written in (("x", False), ("residual", False), ("normed", True)):
            yield Extent(op, field, rows * op.width * size, written)
        if op.residual:
            yield Extent(op, "sum", rows * op.width * size, True)
    elif isinstance(op, LinearOp):
        gated = 0 < op.epilogue < len(EPILOGUES)
        blocks = num_blocks(op.weight.n, gated=gated)
        width = op.weight.n // 2 if gated else op.weight.n
        yield Extent(op, "x", rows * op.heads * op.weight.k * size)
        yield from _of_matrix(op.weight, gated=gated)
        yield Extent(op, "bias", blocks * COLUMNS * 4)
        elements = (rows - 1) * op.stride + width if rows else 0
        yield Extent(op, "residual", elements * size)
        yield Extent(op, "out", elements * (4 if op.out_dtype == F32 else 2), True)
    elif isinstance(op, RouteOp):
        yield Extent(op, "logits", rows * op.count * 4)
        yield Extent(op, "bias", op.count * 4)
        yield Extent(op, "scales", op.count * 4)
        yield Extent(op, "experts", rows * op.slots * 8, True)
        yield Extent(op, "weights", rows * op.slots * 4, True)
    elif isinstance(op, ExpertsOp):
        yield Extent(op, "chosen", rows * op.slots * 8)
        yield Extent(op, "weights", rows * op.slots * 4)
        yield from _of_matrix(op.gate_up, gated=True, count=op.held)
        yield from _of_matrix(op.down, count=op.held)
        yield Extent(op, "gate_up_bias", op.held * num_blocks(op.gate_up.n, gated=True) * COLUMNS * 4)
        yield Extent(op, "down_bias", op.held * num_blocks(op.down.n, gated=False) * COLUMNS * 4)
        yield Extent(op, "shared_gate", rows * 4)
        for field, written in (("x", False), ("shared", False), ("residual", False), ("out", True)):
            yield Extent(op, field, rows * op.down.n * size, written)
        yield Extent(op, "tally", 16, True)
    elif isinstance(op, GateOp):
        for field in ("x", "gate", "out"):
            yield Extent(op, field, rows * op.width * size, field == "out")
    elif isinstance(op, LatentOp):
        for field, width in (("absorbed", op.heads * op.rank), ("rotated", op.heads * op.rope), ("latent", op.rank)):
            yield Extent(op, field, rows * width * size)
        yield Extent(op, "key", rows * op.rope * size)
        yield Extent(op, "rotation", rows * op.rope * 4)
        yield Extent(op, "blocks", rows * 8)
        yield Extent(op, "offsets", rows * 8)
        yield Extent(op, "query", rows * op.heads * (op.rank + op.rope) * size, True)
    elif isinstance(op, RecurrenceOp):
        yield from _of_recurrence(op, rows, size)
    elif isinstance(op, RotationOp):
        yield Extent(op, "positions", rows * 8)
        yield Extent(op, "frequencies", 2 * op.half * 4)
        yield Extent(op, "out", rows * (4 if op.every else 2) * op.half * 4, True)
    elif isinstance(op, CacheOp):
        yield Extent(op, "qkv", rows * (op.heads + 2 * op.kv_heads) * op.head_dim * size)
        normed = op.heads + op.kv_heads * (2 if op.norm_values else 1)
        yield Extent(op, "weight", normed * op.head_dim * size)
        yield Extent(op, "rotation", rows * op.rotation_stride * 4)
        yield Extent(op, "blocks", rows * 8)
        yield Extent(op, "offsets", rows * 8)
        yield Extent(op, "query", rows * op.heads * op.head_dim * size, True)


def _of_matrix(weight: Matrix, *, gated: bool = False, count: int = 1) -> Iterator[Extent]:
    """The tensors of `count` matrices, one behind the other."""
    f = weight.format
    fmt = WeightFormat(SCHEMES[f.scheme], CODES[f.codes], SCALES[f.scales], bool(f.mins), f.group, f.zero)
    for name, part in Layout(weight.n, weight.k, fmt, gated, count).empty().items():
        yield Extent(weight, name, 0 if part is None else part.nbytes)


def _of_attention(op: AttentionOp, size: int) -> Iterator[Extent]:
    items, merges = _cell(op.item_count), _cell(op.merge_count)
    listed = np.ctypeslib.as_array((ctypes.c_int32 * (items * 5)).from_address(op.items)).reshape(-1, 5)
    sequences = int(listed[:, 0].max()) + 1 if items else 0
    queries = (c_int64 * (sequences + 1)).from_address(op.query_start)[sequences]
    partials = int((listed[:, 4] + 1)[listed[:, 3] >= 0].max(initial=0))
    yield Extent(op, "query", queries * op.heads * op.head_dim * size)
    yield Extent(op, "item_count", 8)
    yield Extent(op, "merge_count", 8)
    yield Extent(op, "items", items * 20)
    yield Extent(op, "merges", merges * 12)
    yield Extent(op, "query_start", (sequences + 1) * 8)
    yield Extent(op, "context_lens", sequences * 8)
    yield Extent(op, "block_tables", sequences * op.table_stride * 8)
    yield Extent(op, "out", queries * op.heads * op.value_dim * size, True)
    yield Extent(op, "sinks", op.heads * 4)
    yield Extent(op, "partials", partials * op.heads * (op.value_dim + 2) * 4, True)


def _of_recurrence(op: RecurrenceOp, rows: int, size: int) -> Iterator[Extent]:
    units, values = _cell(op.sequences), op.heads * op.value_dim
    channels = 2 * op.key_heads * op.key_dim + values
    before = 3 * op.units_stride  # elements of the lines before the one with rows of the batch
    used = max((c_int32 * (before + units)).from_address(op.units)[before:]) + 1 if units else 0
    yield Extent(op, "sequences", 8)
    yield Extent(op, "units", (before + units) * 4)
    yield Extent(op, "inputs", rows * (channels + values) * size)
    yield Extent(op, "rates", rows * (1 if op.skip else 2) * op.heads * 4)
    yield Extent(op, "states", used * op.state_stride * 4, True)
    yield Extent(op, "conv", op.taps * channels * 4)
    yield Extent(op, "conv_bias", channels * 4)
    for field in ("decay", "step_bias", "skip"):
        yield Extent(op, field, op.heads * 4)
    yield Extent(op, "norm", op.norm_size * 4)
    yield Extent(op, "out", rows * values * size, True)


def _of_sampling(op: SampleOp) -> Iterator[Extent]:
    """Tensors that edits point to come before the edits, which are moved with the new addresses."""
    count = _cell(op.count)
    rows = max((c_int32 * count).from_address(op.rows), default=-1) + 1
    edits = LogitEdits.from_buffer_copy(LogitEdits.from_address(op.edits))
    op.edits = ctypes.addressof(edits)
    of_row = {"bias_ids": edits.most_biases, "biases": edits.most_biases, "ban_ids": edits.most_bans}
    of_row["token_ids"] = edits.most_tokens
    for field, kind in LogitEdits._fields_:
        if kind is c_void_p:
            yield Extent(edits, field, rows * of_row.get(field, 1) * 4)
    yield Extent(op, "edits", ctypes.sizeof(edits))
    packed = PackedLogprobs.from_buffer_copy(PackedLogprobs.from_address(op.packed))
    op.packed = ctypes.addressof(packed)
    yield Extent(packed, "words", count * packed.stride * 4, True)
    yield Extent(op, "packed", ctypes.sizeof(packed))
    yield Extent(op, "count", 8)
    for field in ("rows", "ahead"):
        yield Extent(op, field, count * 4)
    yield Extent(op, "logits", count * op.vocab * 4, True)
    for field in ("kind", "top_k", "outputs", "logprobs"):
        yield Extent(op, field, rows * 4)
    for field in ("temperature", "top_p", "min_p", "top_n_sigma", "streams"):
        yield Extent(op, field, rows * 8)
    yield Extent(op, "tokens", count * 8, True)
    yield Extent(op, "status", count * 4, True)


def _cell(address: int) -> int:
    return c_int64.from_address(address).value
