"""Checkpoints of AutoAWQ in the order of its GEMM kernel.

Of a matrix [n, k], `qweight` int32 [k, n / 8] has codes of 4 bits along n; `scales` [groups, n]; `qzeros` int32
[groups, n / 8], zero points along n. The eight codes of a word are rows 0, 2, 4, 6, 1, 3, 5, 7 of eight.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.config.weights import WeightFormat
from penstock.families.checkpoint.coded import Coded, group_size, half_scales, in_layers, module_names
from penstock.families.checkpoint.codes import (
    FLOAT_BYTES,
    coded,
    expect,
    floats,
    group_of,
    grouped,
    matrix,
    part_of,
    rows_between,
    unpack,
)
from penstock.families.checkpoint.scheme import Decode
from penstock.families.checkpoint.stored import ReadPart, Rows, StoredTensor
from penstock.families.hf_config import HFConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BITS = 4
IN_WORD = 8  # codes
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the row of each code of a word, from the lowest bits on


@dataclass(frozen=True)
class Awq:
    """The layout of a matrix."""

    group: int  # 0: all of a row
    half: bool  # scales are fp16

    @classmethod
    def of(cls, config: HFConfig, quantization: HFConfig) -> Coded:
        """Returns the scheme of a quantization_config. Raises UnsupportedModel."""
        named = quantization.get("version") or quantization.get("format") or "gemm"
        if str(named).lower() != "gemm":
            raise quantization.unsupported("version", named, "gemm")
        bits = quantization.integer("bits")
        if bits != BITS:
            raise quantization.unsupported("bits", bits, str(BITS))
        if not quantization.flag("zero_point", True):
            raise quantization.unsupported("zero_point", False, "true")
        layout = cls(group_size(quantization, multiple=16), half_scales(config))
        kept = module_names(quantization, "modules_to_not_convert")

        def layout_of(module: str) -> Awq | None:
            return layout if in_layers(module) and not any(name in module for name in kept) else None

        return Coded(layout_of)

    def format(self, columns: int) -> WeightFormat:
        return grouped(f"AWQ int{BITS}", BITS, self.group, columns, symmetric=False, half=self.half)

    def take(self, name: str, found: dict[str, StoredTensor]) -> StoredTensor | None:
        module = name.removesuffix(".weight")
        words = found.pop(f"{module}.qweight", None)
        if words is None:
            return None
        scales, zeros = (part_of(words, f"{module}.{part}", found) for part in ("scales", "qzeros"))
        k, width = words.shape if len(words.shape) == 2 else (0, 0)
        groups = -(-k // self.group) if self.group else 1
        expect(words, name, ("I32",), (k // 2 * 2, width))
        expect(scales, name, tuple(FLOAT_BYTES), (groups, width * IN_WORD))
        expect(zeros, name, ("I32",), (groups, width))
        others = words, scales, zeros
        return matrix(words, self.format(k), (width * IN_WORD, k), (2, 1), Decode(self, others))

    def decode(self, rows: Rows, others: tuple[StoredTensor, ...], part: ReadPart) -> Rows:
        words, scales, zeros = others
        first, count, step = rows_between(part)
        fmt = self.format(words.rows)
        held, size = group_of(part.columns, self.group)[:: fmt.group], FLOAT_BYTES[scales.dtype]
        groups = range(held[0], held[-1] + 1)
        factors = floats(part.read(scales, groups, size * first, size * count), scales.dtype)
        points = _unpacked(zeros, groups, first, count, part)
        own = held - held[0]
        codes = _unpacked(words, part.columns, first, count, part)
        return coded(codes[step], factors.take(own, 0).T[step], points[step].take(own, 1), BITS, fmt)


def _unpacked(tensor: StoredTensor, along: range, first: int, count: int, part: ReadPart) -> "NDArray[np.uint8]":
    """The codes [count, along] of rows from `first` on in some rows of a tensor of words."""
    import numpy as np  # not at the top: see stored.py

    begin, end = first // IN_WORD, -(-(first + count) // IN_WORD)
    words = part.read(tensor, along, 4 * begin, 4 * (end - begin)).view(np.uint32)
    codes = unpack(np.ascontiguousarray(words.T), BITS).reshape(end - begin, len(along), IN_WORD)
    out = np.ascontiguousarray(codes[:, :, np.argsort(ORDER)].transpose(0, 2, 1))
    skip = first % IN_WORD
    return out.reshape(-1, len(along))[skip : skip + count]
