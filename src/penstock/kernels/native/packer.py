"""Packs a weight while it is read: by rows, in any order, from several threads. Torch is imported only by `finish`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.config.weights import Scheme, cpu_schemes, unquantized
from penstock.kernels.native.layout import Layout
from penstock.kernels.native.loader import pack_rows
from penstock.kernels.native.memory import WeightMemory
from penstock.kernels.native.structs import SCHEMES, PackJob

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.native.packing import PackedWeight

STORED = ("float32", "bfloat16", "float16")  # in the order of Stored in cpp/pack.h
DTYPES = ("float32", "bfloat16")  # that native kernels compute in


class NativePacker:
    """Provides Packer (see kernels/packers.py), with the bits of packing.pack."""

    def __init__(
        self,
        shape: tuple[int, int],
        scheme: Scheme,
        group: int,
        *,
        gated: bool,
        memory: WeightMemory,
        experts: int = 1,
    ) -> None:
        """`shape` is that of `experts` weights stacked below each other."""
        self._layout = Layout(shape[0] // experts, shape[1], scheme, group, gated, experts)
        self._parts = self._layout.empty(memory.empty)

    def put(self, start: int, rows: "Tensor") -> None:
        layout = self._layout
        total = layout.n * layout.count
        if rows.shape[1:] != (layout.k,) or not 0 <= start <= start + len(rows) <= total or not rows.is_contiguous():
            raise ValueError(f"rows {start} + {list(rows.shape)} do not belong to a weight [{total}, {layout.k}]")
        for first, job in self.jobs(start, len(rows), str(rows.dtype).removeprefix("torch.")):
            job.rows = rows.data_ptr() + first * layout.k * rows.itemsize
            if bad := pack_rows(job):
                raise ValueError(cannot_quantise(bad))

    def jobs(self, start: int, count: int, stored: str) -> Iterator[tuple[int, PackJob]]:
        """Jobs that pack `count` rows of a dtype from row `start` on, one for each expert, as (first of these rows,
        job). The caller sets the address of the rows."""
        layout, done = self._layout, 0
        while done < count:
            expert, first = divmod(start + done, layout.n)
            of_it = min(count - done, layout.n - first)
            # The addresses of this expert's parts: all experts' have the same size.
            parts = (
                None if whole is None else whole.ctypes.data + expert * (whole.nbytes // layout.count)
                for whole in self._parts.values()
            )
            scheme, dtype = SCHEMES.index(layout.scheme), STORED.index(stored)
            shape = (layout.n, layout.k)
            yield done, PackJob(None, *parts, first, of_it, *shape, scheme, layout.group, dtype, layout.gated)
            done += of_it

    def finish(self) -> "PackedWeight":
        from penstock.kernels.native.packing import packed_weight

        return packed_weight(self._layout, self._parts)


class NativePacking:
    """Provides Packing (see kernels/packers.py) for the native linear."""

    def __init__(self, dtype: str, quantization: str, group: int, isa: str) -> None:
        self._matrices, vocabulary = cpu_schemes(dtype, quantization, isa)
        self._by_kind = {"vocabulary": vocabulary, "router": unquantized(dtype)}
        self._group = group
        self._memory = WeightMemory()

    def __call__(self, shape: tuple[int, ...], kind: str, experts: int = 1) -> NativePacker:
        scheme, gated = self._by_kind.get(kind, self._matrices), kind == "gated"
        rows, columns = shape
        return NativePacker((rows, columns), scheme, self._group, gated=gated, memory=self._memory, experts=experts)


def cannot_quantise(rows: int) -> str:
    return f"{rows} rows hold infinity or NaN, or are too large to quantise: use --quantization none"
