"""Checkpoints of GPTQ, as GPTQModel and AutoGPTQ write them.

Of a matrix [n, k], `qweight` int32 [k * bits / 32, n] has codes along k, the lowest bits first; `scales` [groups, n];
`qzeros` int32 [groups, n * bits / 32], zero points along n; `g_idx` int32 [k], the group of each column.

Zero points are stored less one in the first version of the format ("gptq"), and as they are in the second ("gptq_v2").
The version of a symmetric matrix is seen from the values, since files exist that name the wrong one.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.config.weights import WeightFormat
from penstock.families.checkpoint.coded import Coded, group_size, half_scales, in_layers, is_head, pattern
from penstock.families.checkpoint.codes import (
    FLOAT_BYTES,
    UNIT,
    arranged,
    broken,
    expect,
    floats,
    grouped,
    matrix,
    part_of,
    read_groups,
    rows_between,
    unpack,
    words_of,
)
from penstock.families.checkpoint.scheme import Decode
from penstock.families.checkpoint.stored import ReadPart, Rows, StoredTensor
from penstock.families.hf_config import HFConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BITS = (2, 3, 4, 8)
# What is added to the words of zero points of the first version. A carry goes into the next zero point, as it came when
# they were written: by subtraction of the same words.
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
_ONES_OF_3 = (0x24924924, 0x92492492, 0x49249249)  # GPTQModel's, for three words; they do not add 1 to each field


@dataclass(frozen=True)
class Gptq:
    """The layout of a matrix. With `act_order`, columns of a group do not lie side by side in the file."""

    bits: int
    group: int  # 0: all of a row
    symmetric: bool
    act_order: bool
    version: int  # 1 or 2, of zero points
    half: bool  # scales are fp16
    by_gptqmodel: bool  # wrote the file

    @classmethod
    def of(cls, config: HFConfig, quantization: HFConfig) -> Coded:
        """Returns the scheme of a quantization_config. Raises UnsupportedModel."""
        named = quantization.get("checkpoint_format") or quantization.get("format") or "gptq"
        if named not in ("gptq", "gptq_v2"):
            raise quantization.unsupported("checkpoint_format", named, "gptq or gptq_v2")
        quantization.refuse("is_marlin_format", "weights in the order of Marlin's kernel")
        quantization.one_of("pack_dtype", "int32")
        meta = quantization.section("meta")
        version, by_gptqmodel = (1 if named == "gptq" else 2), "gptqmodel" in str(meta.get("quantizer") if meta else "")
        half, with_head = half_scales(config), quantization.flag("lm_head")

        def layout(fields: HFConfig) -> Gptq:
            bits = fields.integer("bits")
            if bits not in BITS:
                raise fields.unsupported("bits", bits, ", ".join(map(str, BITS)))
            group = group_size(fields, multiple=UNIT)
            act_order = fields.flag("desc_act") and group > 0
            return cls(bits, group, fields.flag("sym", True), act_order, version, half, by_gptqmodel)

        listed = quantization.get("modules_in_block_to_quantize") or []
        kept_to = tuple(name for names in listed for name in (names if isinstance(names, list) else [names]))
        if not all(isinstance(name, str) for name in kept_to):
            raise quantization.unsupported("modules_in_block_to_quantize", listed, "lists of names")

        common = layout(quantization)
        rules = []
        if (dynamic := quantization.section("dynamic")) is not None:
            for text in dynamic.names():
                fields = dynamic.section(text) or HFConfig({})
                own = quantization.inheriting(fields, *fields.names())
                skipped = text.startswith("-:")
                rules.append((pattern(dynamic, text), None if skipped else layout(own)))

        def layout_of(module: str) -> Gptq | None:
            rule = next((own for expression, own in rules if expression.match(module)), common)
            in_layer = in_layers(module) and (not kept_to or module.endswith(kept_to))
            return rule if in_layer or (with_head and is_head(module)) else None

        return Coded(layout_of)

    def format(self, columns: int) -> WeightFormat:
        sizes = self.bits, self.group, columns
        return grouped(f"GPTQ int{self.bits}", *sizes, symmetric=self.symmetric, half=self.half, ordered=self.act_order)

    def take(self, name: str, found: dict[str, StoredTensor]) -> StoredTensor | None:
        module = name.removesuffix(".weight")
        words = found.pop(f"{module}.qweight", None)
        if words is None:
            return None
        scales, zeros = (part_of(words, f"{module}.{part}", found) for part in ("scales", "qzeros"))
        height, n = words.shape if len(words.shape) == 2 else (0, 0)
        k = height * 32 // self.bits // UNIT * UNIT
        groups = -(-k // self.group) if self.group else 1
        expect(words, name, ("I32",), (k * self.bits // 32, n))
        expect(scales, name, tuple(FLOAT_BYTES), (groups, n))
        expect(zeros, name, ("I32",), (groups, -(-n * self.bits // 32)))
        others = [words, scales, zeros]
        if (order := found.pop(f"{module}.g_idx", None)) is not None:
            others.append(expect(order, name, ("I32",), (k,)))
        fmt, block = self.format(k), (UNIT, UNIT * self.bits // 8)
        return matrix(words, fmt, (n, k), block, Decode(self, tuple(others)))

    def decode(self, rows: Rows, others: tuple[StoredTensor, ...], part: ReadPart) -> Rows:
        import numpy as np  # not at the top: see stored.py

        words, scales, zeros, *order = others
        first, rows_read, step = rows_between(part)
        all_groups, size = range(scales.rows), FLOAT_BYTES[scales.dtype]
        in_column = range(part.columns.start * self.bits // 32, part.columns.stop * self.bits // 32)
        packed = part.read(words, in_column, 4 * first, 4 * rows_read).view(np.uint32)[:, step]
        codes = unpack(np.ascontiguousarray(packed.T), self.bits)
        factors = floats(part.read(scales, all_groups, size * first, size * rows_read), scales.dtype)[:, step]
        points = self._zero_points(zeros, first, rows_read, part)[:, step]
        count, k = scales.rows, words.rows * 32 // self.bits
        groups = read_groups(order[0] if order else None, part, self.group, count, act_order=self.act_order)
        own = None if self.symmetric else points.T
        return arranged(codes, factors.T, own, groups, k, self.bits, self.format(k))

    def _zero_points(self, zeros: StoredTensor, first: int, count: int, part: ReadPart) -> "NDArray[np.uint8]":
        """Zero points [groups, count] of rows from `first` on."""
        import numpy as np

        read, own = words_of(range(first, first + count), self.bits, zeros.shape[1])
        words = part.read(zeros, range(zeros.rows), 4 * read.start, 4 * len(read)).view(np.uint32)
        stored = unpack(words, self.bits)[:, own]
        if self.bits == 3:
            ones = np.resize(np.array(_ONES_OF_3, np.uint32), words.shape[1])
        else:
            ones = np.full(words.shape[1], _ONES[self.bits], np.uint32)
        added = unpack(words + ones, self.bits)[:, own]
        plus_one = stored + np.uint8(1) & np.uint8((1 << self.bits) - 1)
        if not self.symmetric:
            return stored if self.version == 2 else plus_one if self.bits == 3 and not self.by_gptqmodel else added
        half = 1 << self.bits - 1
        for points in (stored, added, plus_one):
            if (points == half).all():
                return points
        raise broken(zeros, f'has zero points other than {half}, but config.json says "sym": true')
