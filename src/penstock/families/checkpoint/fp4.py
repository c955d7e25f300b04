"""Matrices of FP4 (E2M1), in the packing of compressed-tensors and of ModelOpt: NVFP4 and MXFP4.

Of a matrix [n, k], `weight_packed` (ModelOpt: `weight`) uint8 [n, k / 2] has two codes in a byte, the first in its low
half. NVFP4 has `weight_scale` E4M3 [n, k / 16] and one fp32 for the tensor: `weight_global_scale`, which divides the
others, or ModelOpt's `weight_scale_2`, which multiplies them. MXFP4 has exponents, uint8 [n, k / 32].
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.config.weights import GGUF_FORMATS, WeightFormat
from penstock.families.checkpoint.codes import expect, grouped, matrix, part_of, unpack
from penstock.families.checkpoint.fp8 import FP8
from penstock.families.checkpoint.scheme import Decode
from penstock.families.checkpoint.stored import ReadPart, Rows, StoredTensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

OF_TENSOR = ((), (1,), (1, 1))  # shapes of a scale for the tensor


@dataclass(frozen=True)
class Fp4:
    """The layout of a matrix. `group`: 16 for NVFP4, 32 for MXFP4. Codes are places in the table of MXFP4, whose values
    are twice those of E2M1, so scales are halved."""

    group: int

    def format(self, columns: int) -> WeightFormat:
        if self.group == 32:
            return replace(GGUF_FORMATS["MXFP4"], scales="f32")
        return grouped("NVFP4", 4, self.group, columns, table="mxfp4")

    def take(self, name: str, found: dict[str, StoredTensor]) -> StoredTensor | None:
        codes = found.pop(f"{name}_packed", None) or found.get(name)
        if codes is None or codes.dtype != "U8" or len(codes.shape) != 2:
            return None
        n, width = codes.shape
        expect(codes, name, ("U8",), (n, width // (self.group // 2) * (self.group // 2)))
        scales = part_of(codes, f"{name}_scale", found)
        others = [codes, expect(scales, name, (FP8 if self.group == 16 else "U8",), (n, 2 * width // self.group))]
        if self.group == 16:
            by = next((end for end in ("_global_scale", "_scale_2") if name + end in found), "_global_scale")
            others.append(expect(part_of(codes, name + by, found), name, ("F32",), *OF_TENSOR))
        return matrix(codes, self.format(2 * width), (n, 2 * width), (2, 1), Decode(self, tuple(others)))

    def decode(self, rows: Rows, others: tuple[StoredTensor, ...], part: ReadPart) -> Rows:
        import numpy as np  # not at the top: see stored.py

        words, scales, *whole = others
        first, count = part.columns.start, len(part.columns)
        codes = unpack(part.read(words, part.rows, first // 2, count // 2), 4)
        stored = part.read(scales, part.rows, first // self.group, count // self.group)
        if whole:
            one = part.read(whole[0], range(1), 0, 4).view(np.float32)[0, 0]
            factors = e4m3()[stored]
            with np.errstate(all="ignore"):  # what is not finite is refused later
                factors = factors * one if whole[0].name.endswith("_scale_2") else factors / one
        else:
            factors = np.ldexp(np.float32(1), stored.astype(np.int32) - 127)
        fmt = self.format(2 * words.shape[1])
        return Rows(codes, factors * np.float32(0.5), fmt)


def e4m3() -> "NDArray[np.float32]":
    """The values of the 256 codes of E4M3."""
    import numpy as np

    codes = np.arange(256, dtype=np.uint16)
    values = ((codes & 128) << 8 | (codes & 127) << 7).view(np.float16).astype(np.float32) * np.float32(256)
    values[codes & 127 == 127] = np.nan
    return values
