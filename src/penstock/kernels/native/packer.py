"""Packs a weight while it is read: by rows, in any order, from several threads. Torch is imported only by `finish`."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.config.weights import GGUF_FORMATS, Stored, WeightFormat, cpu_format
from penstock.kernels.coded_rows import CODED, CodedRows, same_order
from penstock.kernels.native.layout import Layout, native_format
from penstock.kernels.native.loader import pack_rows
from penstock.kernels.native.memory import WeightMemory
from penstock.kernels.native.structs import Matrix, PackJob

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.native.packing import PackedWeight, SectionedWeight

FILE_TYPES = ("F32", "BF16", "F16", *GGUF_FORMATS, CODED)  # of elements in files, in the order of Stored in cpp/pack.h
DTYPES = ("float32", "bfloat16")  # that native kernels compute in
_NAMES = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}


class NativePacker:
    """Provides Packer (see kernels/packers.py)."""

    def __init__(
        self, shape: tuple[int, int], fmt: WeightFormat, *, gated: bool, memory: WeightMemory, experts: int = 1
    ) -> None:
        """`shape` is that of `experts` weights stacked below each other."""
        self._layout = Layout(shape[0] // experts, shape[1], fmt, gated, experts)
        self._parts = self._layout.empty(memory.empty)
        self._order: NDArray[np.int32] | None = None

    def put(self, start: int, rows: "Tensor") -> None:
        self._check(start, rows, self._layout.k)
        self._pack(start, rows, _NAMES[str(rows.dtype)])

    def put_stored(self, start: int, rows: "Tensor", dtype: str) -> None:
        """Like `put`, for rows as a GGUF file holds them: uint8 [rows, bytes of a row]."""
        self._check(start, rows, rows.shape[1])
        self._pack(start, rows, dtype)

    def put_codes(self, start: int, rows: CodedRows) -> None:
        """Like `put`, for codes of a format. They are quantised anew if the weight has no place for their order."""
        import torch

        fmt = self._layout.format
        if fmt.scheme != "grouped" or fmt.ordered != rows.format.ordered:
            self.put(start, torch.from_numpy(rows.values()))
            return
        if rows.order is not None:
            self._order = same_order(self._order, rows.order)
        self.put_stored(start, torch.from_numpy(rows.packed_as(fmt)), CODED)

    def jobs(self, start: int, count: int, dtype: str, row_stride: int) -> Iterator[tuple[int, PackJob]]:
        """Jobs that pack `count` rows of an element type from row `start` on, one for each expert, as (first of these
        rows, job). The rows are `row_stride` bytes apart. The caller sets their address."""
        layout, done = self._layout, 0
        while done < count:
            expert, first = divmod(start + done, layout.n)
            of_it = min(count - done, layout.n - first)
            # The addresses of this expert's parts: all experts' have the same size.
            parts = (
                None if whole is None else whole.ctypes.data + expert * (whole.nbytes // layout.count)
                for whole in self._parts.values()
            )
            matrix = Matrix(*parts, layout.n, layout.k, native_format(layout.format))
            yield done, PackJob(None, row_stride, matrix, first, of_it, FILE_TYPES.index(dtype), layout.gated)
            done += of_it

    def _check(self, start: int, rows: "Tensor", width: int) -> None:
        layout = self._layout
        total = layout.n * layout.count
        if rows.shape[1:] != (width,) or not 0 <= start <= start + len(rows) <= total or not rows.is_contiguous():
            raise ValueError(f"rows {start} + {list(rows.shape)} do not belong to a weight [{total}, {layout.k}]")

    def _pack(self, start: int, rows: "Tensor", dtype: str) -> None:
        stride = rows.shape[1] * rows.itemsize
        for first, job in self.jobs(start, len(rows), dtype, stride):
            job.rows = rows.data_ptr() + first * stride
            if bad := pack_rows(job):
                raise ValueError(not_in_fp16(bad) if dtype == CODED else cannot_quantise(bad))

    def finish(self) -> "PackedWeight":
        from penstock.kernels.native.packing import packed_weight

        order = self._order
        if order is not None and (order == np.arange(len(order))).all():
            order = None
        return packed_weight(self._layout, self._parts, order)


class SectionPacker:
    """Provides CodePacker for sections that have packers of their own. Rows that are put together belong to one
    section."""

    def __init__(self, sections: Sequence[tuple[int, Any]], join: Callable[[tuple[Any, ...]], Any]) -> None:
        """`sections` are (rows, packer), from the first row on. `join` makes the weight of the finished sections."""
        self._sections = sections
        self._join = join

    def put(self, start: int, rows: "Tensor") -> None:
        packer, first = self._at(start)
        packer.put(first, rows)

    def put_stored(self, start: int, rows: "Tensor", dtype: str) -> None:
        packer, first = self._at(start)
        packer.put_stored(first, rows, dtype)

    def put_codes(self, start: int, rows: CodedRows) -> None:
        packer, first = self._at(start)
        packer.put_codes(first, rows)

    def jobs(self, start: int, count: int, dtype: str, row_stride: int) -> Iterator[tuple[int, PackJob]]:
        """As NativePacker.jobs, if the sections have such packers."""
        packer, first = self._at(start)
        jobs: Iterator[tuple[int, PackJob]] = packer.jobs(first, count, dtype, row_stride)
        return jobs

    def finish(self) -> Any:
        return self._join(tuple(packer.finish() for _, packer in self._sections))

    def _at(self, start: int) -> tuple[Any, int]:
        """The packer of a row, and the row's number there."""
        first = start
        for rows, packer in self._sections:
            if 0 <= first < rows:
                return packer, first
            first -= rows
        raise ValueError(f"row {start} does not belong to a weight of {start - first} rows")


class NativePacking:
    """Provides Packing (see kernels/packers.py) for the native linear."""

    def __init__(self, dtype: str, quantization: str, group: int, isa: str) -> None:
        self._settings = (dtype, quantization, group, isa)
        self._memory = WeightMemory()

    def __call__(
        self,
        shape: tuple[int, ...],
        kind: str,
        experts: int = 1,
        sections: Sequence[tuple[int, Stored]] = (),
        *,
        sensitive: bool = False,
    ) -> NativePacker | SectionPacker:
        total, columns = shape
        packers = []
        for rows, stored in sections or ((total, ()),):
            fmt, gated = cpu_format(kind, stored, *self._settings, sensitive=sensitive), kind == "gated"
            packer = NativePacker((rows, columns), fmt, gated=gated, memory=self._memory, experts=experts)
            packers.append((rows, packer))
        return packers[0][1] if len(packers) == 1 else SectionPacker(packers, _sectioned)


def _sectioned(sections: tuple["PackedWeight", ...]) -> "SectionedWeight":
    from penstock.kernels.native.packing import SectionedWeight

    return SectionedWeight(sections)


def cannot_quantise(rows: int) -> str:
    return f"{rows} rows hold infinity or NaN, or are too large to quantise: use --quantization none"


def not_in_fp16(rows: int) -> str:
    return f'{rows} rows have scales that fp16 does not hold: write "dtype": "float32" into config.json'
