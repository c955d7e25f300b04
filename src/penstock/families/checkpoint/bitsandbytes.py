"""Checkpoints of bitsandbytes.

Of a matrix [n, k] in 4 bits, `weight` uint8 [n * k / 2, 1] has two codes in a byte, the first in its high half;
`weight.absmax` a scale for each block of the flattened matrix; `weight.quant_map` fp32 [16] the values of codes. With
double quantisation `weight.absmax` are places in `weight.nested_quant_map` fp32 [256], times `weight.nested_absmax` for
each block of scales, plus an offset. `weight.quant_state.bitsandbytes__nf4` (or fp4) is JSON with the sizes.

Of a matrix of int8, `SCB` fp32 [n] are the largest values of rows.
"""

import math
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.config.weights import FRACTIONS, INT8, Codes, WeightFormat
from penstock.families.checkpoint.coded import Coded, in_layers, is_head, module_names
from penstock.families.checkpoint.codes import broken, coded, expect, first_bytes, grouped, matrix, part_of
from penstock.families.checkpoint.scheme import Decode
from penstock.families.checkpoint.stored import ReadPart, Rows, StoredTensor
from penstock.families.hf_config import HFConfig
from penstock.gguf.json_file import parse_json_object

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_STATE_BYTES = 64 << 10
GROUP = 64  # values of a block, or of a part of one
_TABLE_ERROR = 1e-6  # between the values that a file has for its codes and those of their type
_BITS_PER_LARGEST = 127


def bitsandbytes(config: HFConfig, quantization: HFConfig) -> Coded:
    """The scheme of a quantization_config. Raises UnsupportedModel."""
    layout: FourBits | EightBits
    if quantization.flag("load_in_4bit"):
        quantization.one_of("bnb_4bit_quant_storage", "uint8")
        layout = FourBits("nf4" if quantization.one_of("bnb_4bit_quant_type", "fp4", "nf4") == "nf4" else "fp4")
    elif quantization.flag("load_in_8bit"):
        layout = EightBits()
    else:
        raise quantization.unsupported("load_in_4bit", False, "load_in_4bit or load_in_8bit")
    kept = module_names(quantization, "llm_int8_skip_modules")

    def layout_of(module: str) -> FourBits | EightBits | None:
        linear = in_layers(module) or (is_head(module) and bool(kept))  # without a list heads stay in floats
        skipped = any(module == name or module.endswith(f".{name}") for name in kept)
        return layout if linear and not skipped else None

    return Coded(layout_of)


@dataclass(frozen=True)
class FourBits:
    """The layout of a matrix of NF4 or FP4. If rows are no whole blocks, it is read as floats."""

    kind: Codes
    block: int = GROUP  # values of the flattened matrix that share a scale
    nested_block: int = 0  # scales that share one of theirs; 0: scales are fp32
    offset: float = 0.0  # of scales

    def format(self, columns: int) -> WeightFormat | None:
        if columns % GROUP:
            return None
        return replace(INT8, codes=self.kind, scales="f32", group=GROUP, name=self.kind.upper())

    def take(self, name: str, found: dict[str, StoredTensor]) -> StoredTensor | None:
        codes = found.get(name)
        state_tensor = found.pop(f"{name}.quant_state.bitsandbytes__{self.kind}", None)
        if codes is None or state_tensor is None:
            return None
        try:
            state = HFConfig(parse_json_object(first_bytes(state_tensor, MAX_STATE_BYTES), "quant_state"))
            shape = state.integers("shape")
            nested = state.integer("nested_blocksize", 0, least=0)
            offset = state.get("nested_offset") if nested else 0.0
            layout = replace(self, block=state.integer("blocksize"), nested_block=nested, offset=float(offset))
        except (TypeError, ValueError) as error:  # UnsupportedModel among them
            raise broken(state_tensor, f"is no state of bitsandbytes: {error}") from None
        if len(shape) != 2 or 0 in shape or shape[1] % 2 or not math.isfinite(layout.offset):
            raise broken(state_tensor, f"has the shape {shape}; expected rows and an even number of columns")
        n, k = shape
        if layout.block % GROUP and self.format(k):
            raise broken(state_tensor, f"has blocks of {layout.block} values; expected a multiple of {GROUP}")
        blocks = -(-n * k // layout.block)
        expect(codes, name, ("U8",), (n * k // 2, 1), (1, n * k // 2))
        absmax, table = (part_of(codes, f"{name}.{end}", found) for end in ("absmax", "quant_map"))
        expect(absmax, name, ("U8" if nested else "F32",), (blocks,))
        others = [replace(codes, shape=(n, k // 2)), absmax, expect(table, name, ("F32",), (16,))]
        of_kind, _ = FRACTIONS[self.kind]
        in_file = struct.unpack("<16f", first_bytes(table, table.size))
        if not all(abs(one - other) < _TABLE_ERROR for one, other in zip(in_file, of_kind, strict=True)):
            raise broken(table, f"has other values than those of {self.kind.upper()}")
        if nested:
            of_scales, values = (part_of(codes, f"{name}.nested_{end}", found) for end in ("absmax", "quant_map"))
            others += [
                expect(of_scales, name, ("F32",), (-(-blocks // nested),)),
                expect(values, name, ("F32",), (256,)),
            ]
        return matrix(codes, self.format(k) or self.kind.upper(), (n, k), (2, 1), Decode(layout, tuple(others)))

    def decode(self, rows: Rows, others: tuple[StoredTensor, ...], part: ReadPart) -> Rows:
        import numpy as np  # not at the top: see stored.py

        codes, _, table, *_ = others
        data = part.read(codes, part.rows, part.columns.start // 2, len(part.columns) // 2)
        values = np.stack((data >> 4, data & 15), -1).reshape(len(data), -1)
        k = 2 * codes.shape[1]
        first, last = part.rows[0] * k // self.block, (part.rows[-1] * k + k - 1) // self.block
        fmt, places = self.format(k), np.arange(part.rows.start, part.rows.stop, part.rows.step)[:, None] * k
        each = np.arange(part.columns.start, part.columns.stop, fmt.group if fmt else 1)  # what has a scale
        scales = self._scales(others, range(first, last + 1), part).take((places + each) // self.block - first)
        return Rows(values, scales, fmt) if fmt else Rows(_all(table, part).take(values) * scales)

    def _scales(self, others: tuple[StoredTensor, ...], blocks: range, part: ReadPart) -> "NDArray[np.float32]":
        """The scales of some blocks."""
        import numpy as np

        stored = part.read(others[1], blocks, 0, others[1].row_bytes)
        if not self.nested_block:
            return stored.view(np.float32).reshape(-1)
        of_scales, table = (_all(tensor, part) for tensor in others[3:])
        nested = np.arange(blocks.start, blocks.stop) // self.nested_block
        return table.take(stored.reshape(-1)) * of_scales.take(nested) + np.float32(self.offset)


def _all(tensor: StoredTensor, part: ReadPart) -> "NDArray[np.float32]":
    """All values of a tensor of one dimension."""
    import numpy as np

    return part.read(tensor, range(tensor.rows), 0, 4).view(np.float32).reshape(-1)


@dataclass(frozen=True)
class EightBits:
    """The layout of a matrix of int8."""

    def format(self, columns: int) -> WeightFormat:
        return grouped("bitsandbytes int8", 8, 0, columns)

    def take(self, name: str, found: dict[str, StoredTensor]) -> StoredTensor | None:
        codes = found.get(name)
        if codes is None or codes.dtype != "I8" or len(codes.shape) != 2:
            return None
        module = name.removesuffix(".weight")
        largest = expect(part_of(codes, f"{module}.SCB", found), name, ("F32",), (codes.shape[0],))
        found.pop(f"{module}.weight_format", None)
        return matrix(
            codes, self.format(codes.shape[1]), (codes.shape[0], codes.shape[1]), (1, 1), Decode(self, (codes, largest))
        )

    def decode(self, rows: Rows, others: tuple[StoredTensor, ...], part: ReadPart) -> Rows:
        import numpy as np

        codes, largest = others
        own = part.read(codes, part.rows, part.columns.start, len(part.columns)) ^ np.uint8(128)
        fmt = self.format(codes.shape[1])
        scales = part.read(largest, part.rows, 0, 4).view(np.float32) * np.float32(1 / _BITS_PER_LARGEST)
        return coded(own, np.repeat(scales, fmt.groups(len(part.columns)), 1), None, 8, fmt)
