"""Checkpoints of compressed-tensors, as llm-compressor writes them, and of ModelOpt.

Integers of a matrix [n, k] are `weight_packed` int32 [n, k * bits / 32], the lowest bits first, or `weight` int8
[n, k]; `weight_scale` [n, groups], [n, 1] or [1]; without symmetry `weight_zero_point`, packed along n as int32 or
int8 [n, groups]. Packed integers have 2^(bits - 1) added. `weight_g_idx` int32 [k] is the group of each column.
"""

import re
from dataclasses import dataclass, replace
from fnmatch import translate
from typing import TYPE_CHECKING

from penstock.config.weights import WeightFormat
from penstock.families.checkpoint.coded import (
    Coded,
    MatrixLayout,
    group_size,
    half_scales,
    in_layers,
    is_head,
    module_names,
    pattern,
)
from penstock.families.checkpoint.codes import (
    FLOAT_BYTES,
    arranged,
    broken,
    expect,
    first_bytes,
    floats,
    grouped,
    matrix,
    part_of,
    read_groups,
    rows_between,
    unpack,
    words_of,
)
from penstock.families.checkpoint.fp4 import OF_TENSOR, Fp4
from penstock.families.checkpoint.fp8 import Fp8
from penstock.families.checkpoint.scheme import Decode
from penstock.families.checkpoint.stored import ReadPart, Rows, StoredTensor
from penstock.families.hf_config import HFConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
)
SCHEMES = "weights of 2, 3, 4 or 8 bits in integers, of 8 bits in floats, or of 4 in floats in groups of 16 or 32"
_BLOCKS = {2: (4, 1), 3: (32, 12), 4: (2, 1), 8: (1, 1)}  # by bits: the fewest codes in whole bytes, words for 3 bits
MAX_ZERO_BYTES = 16 << 20


@dataclass(frozen=True)
class PackedIntegers:
    """The layout of a matrix of integers. With `act_order`, columns of a group do not lie side by side."""

    bits: int
    group: int  # 0: one scale for a row or for the tensor
    symmetric: bool
    act_order: bool
    half: bool  # scales are fp16
    columns: int = 0  # of the matrix, once it is known

    def format(self, columns: int) -> WeightFormat:
        sizes = self.bits, self.group, columns
        return grouped(f"int{self.bits}", *sizes, symmetric=self.symmetric, half=self.half, ordered=self.act_order)

    def take(self, name: str, found: dict[str, StoredTensor]) -> StoredTensor | None:
        packed = found.pop(f"{name}_packed", None)
        words = packed or found.get(name)
        if words is None or len(words.shape) != 2 or (packed is None and words.dtype != "I8"):
            return None
        bits, word, dtypes = (self.bits, 32, ("I32",)) if packed else (8, 8, ("I8",))
        n, width = words.shape
        shape = found.pop(f"{name}_shape", None)
        k = width * word // bits if shape is None else _columns(shape, n)
        expect(words, name, dtypes, (n, -(-k * bits // word)))
        groups = -(-k // self.group) if self.group else 1
        scales = part_of(words, f"{name}_scale", found)
        expect(scales, name, tuple(FLOAT_BYTES), (n, groups), *(((n,), *OF_TENSOR) if groups == 1 else ()))
        others = [words, replace(scales, shape=(scales.rows, groups))]
        zeros, order = (found.pop(f"{name}_{end}", None) for end in ("zero_point", "g_idx"))
        if not self.symmetric:
            zeros = zeros or part_of(words, f"{name}_zero_point", found)
            others.append(expect(zeros, name, dtypes, (-(-n * bits // word), groups)))
        elif zeros is not None and (zeros.size > MAX_ZERO_BYTES or any(first_bytes(zeros, zeros.size))):
            raise broken(zeros, 'has zero points, but config.json says "symmetric": true')
        if order is not None:
            others.append(expect(order, name, ("I32", "I64"), (k,)))
        block = _BLOCKS[bits]
        if k % block[0]:
            raise broken(words, f"has rows of {k} codes of {bits} bits; expected a multiple of {block[0]}")
        return matrix(words, self.format(k), (n, k), block, Decode(replace(self, columns=k), tuple(others)))

    def decode(self, rows: Rows, others: tuple[StoredTensor, ...], part: ReadPart) -> Rows:
        import numpy as np  # not at the top: see stored.py

        words, scales, *rest = others
        points = None if self.symmetric else self._zero_points(rest.pop(0), part)
        scaled = part.rows if scales.rows > 1 else range(1)  # one scale is all rows'
        factors = floats(part.read(scales, scaled, 0, scales.row_bytes), scales.dtype)
        factors = np.broadcast_to(factors, (len(part.rows), factors.shape[1]))
        order = rest[0] if rest else None
        groups = read_groups(order, part, self.group, scales.shape[1], act_order=self.act_order)
        fmt = self.format(self.columns)
        return arranged(self._codes(words, part), factors, points, groups, self.columns, self.bits, fmt)

    def _codes(self, words: StoredTensor, part: ReadPart) -> "NDArray[np.uint8]":
        """Codes with 2^(bits - 1) added."""
        import numpy as np

        columns = part.columns
        if words.dtype == "I8":
            return self._raised(words, part.read(words, part.rows, columns.start, len(columns)))
        read, own = words_of(columns, self.bits, words.shape[1])
        data = part.read(words, part.rows, 4 * read.start, 4 * len(read)).view(np.uint32)
        return np.ascontiguousarray(unpack(data, self.bits)[:, own])

    def _zero_points(self, zeros: StoredTensor, part: ReadPart) -> "NDArray[np.uint8]":
        """Zero points [rows, groups] with 2^(bits - 1) added."""
        import numpy as np

        if zeros.dtype == "I8":
            return self._raised(zeros, part.read(zeros, part.rows, 0, zeros.row_bytes))
        first, count, step = rows_between(part)
        read, own = words_of(range(first, first + count), self.bits, zeros.rows)
        words = part.read(zeros, read, 0, zeros.row_bytes).view(np.uint32)
        return unpack(np.ascontiguousarray(words.T), self.bits)[:, own][:, step].T

    def _raised(self, tensor: StoredTensor, data: "NDArray[np.uint8]") -> "NDArray[np.uint8]":
        """Bytes of signed integers with 2^(bits - 1) added."""
        raised = data + data.dtype.type(1 << self.bits - 1)
        if self.bits < 8 and (raised >= 1 << self.bits).any():
            raise broken(tensor, f"has integers that do not fit in {self.bits} bits")
        return raised


def _columns(shape: StoredTensor, rows: int) -> int:
    """The columns of a packed matrix, which its `weight_shape` has."""
    data = first_bytes(expect(shape, shape.name, ("I64", "I32"), (2,)), 16)
    half = len(data) // 2
    n, k = (int.from_bytes(data[i : i + half], "little", signed=True) for i in (0, half))
    if n != rows or k < 1:
        raise broken(shape, f"says [{n}, {k}], but there are {rows} rows")
    return k


def compressed_tensors(config: HFConfig, quantization: HFConfig) -> Coded:
    """The scheme of a quantization_config of compressed-tensors. Raises UnsupportedModel."""
    _check_format(quantization)
    sparsity = quantization.section("sparsity_config")
    if sparsity is not None and sparsity.get("format") not in (None, "dense"):
        raise sparsity.unsupported("format", sparsity.get("format"), "dense: no sparsity")
    if quantization.get("transform_config"):
        raise quantization.unsupported("transform_config", "with transforms", "none: they are computed in each step")
    groups = quantization.section("config_groups") or HFConfig({})
    half, fp8 = half_scales(config), None
    found: list[tuple[_Modules, MatrixLayout | None]] = []
    for name in groups.names():
        group = groups.section(name) or HFConfig({})
        _check_format(group)
        weights = group.section("weights")
        if weights is None:
            raise groups.unsupported(name, "without weights", SCHEMES)
        layout = _layout(weights, half)
        if isinstance(layout, Fp8):
            if fp8 not in (None, layout):
                raise groups.unsupported(name, "FP8 in blocks of another size than another group's", "one size")
            fp8 = layout
        found.append((_Modules(group, "targets"), None if isinstance(layout, Fp8) else layout))
    if not found:
        raise quantization.unsupported("config_groups", None, SCHEMES)
    ignored = _Modules(quantization, "ignore")

    def layout_of(module: str) -> MatrixLayout | None:
        if module in ignored:
            return None
        for matches in (_Modules.by_name, _Modules.by_class):  # names come first
            for targets, layout in found:
                if matches(targets, module):
                    return layout
        return None

    return Coded(layout_of, fp8)


def _check_format(fields: HFConfig) -> None:
    named = fields.get("format")
    if named not in (None, *FORMATS):
        raise fields.unsupported("format", named, ", ".join(FORMATS))


def _layout(weights: HFConfig, half: bool) -> MatrixLayout | Fp8:
    bits, kind = weights.integer("num_bits", 8), weights.one_of("type", "int", "float")
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("group" if size else "tensor")
    if (kind, bits) == ("float", 8):
        return Fp8.of_block(weights, "block_structure")
    if (kind, bits) == ("float", 4) and size in (16, 32):
        return Fp4(int(size))
    if kind != "int" or bits not in _BLOCKS or strategy not in ("group", "channel", "tensor"):
        raise weights.unsupported("weights", f"{kind} of {bits} bits, strategy {strategy}", SCHEMES)
    group = group_size(weights, multiple=16) if strategy == "group" else 0
    act_order = group > 0 and weights.get("actorder") not in (None, False, "weight", "static")
    return PackedIntegers(bits, group, weights.flag("symmetric", True), act_order, half)


class _Modules:
    """The modules that a list of names, `re:` patterns and classes means."""

    def __init__(self, fields: HFConfig, name: str) -> None:
        texts = module_names(fields, name)
        self._exact = frozenset(text for text in texts if not text.startswith("re:"))
        self._patterns = tuple(pattern(fields, text) for text in texts if text.startswith("re:"))

    def by_name(self, module: str) -> bool:
        return module in self._exact or any(each.match(module) for each in self._patterns)

    def by_class(self, module: str) -> bool:
        return "Linear" in self._exact and (in_layers(module) or is_head(module))

    def __contains__(self, module: str) -> bool:
        return self.by_name(module) or self.by_class(module)


def modelopt(config: HFConfig, quantization: HFConfig) -> Coded:
    """The scheme of a quantization_config of ModelOpt, or of its hf_quant_config.json. Raises UnsupportedModel."""
    inner = quantization.section("quantization") or quantization
    algorithm = inner.text("quant_algo")
    if algorithm not in ("FP8", "NVFP4"):
        raise inner.unsupported("quant_algo", algorithm, "FP8 or NVFP4")
    texts = [*module_names(inner, "exclude_modules"), *module_names(inner, "ignore")]
    kept = [re.compile(translate(text)) for text in texts]
    if algorithm == "FP8":
        return Coded(lambda module: None, Fp8())
    layout = Fp4(16)

    def layout_of(module: str) -> Fp4 | None:
        linear = in_layers(module) or is_head(module)
        return layout if linear and not any(each.match(module) for each in kept) else None

    return Coded(layout_of)
