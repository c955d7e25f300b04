"""The formats and the bytes of weights in memory, as the native kernels pack them and as a GPU's kernels do. The native
kernels allocate by these sizes.

`Scheme` and `Format` in kernels/native/cpp/ops.h describe the native layout: blocks of 16 columns, lines of 64 bytes.
kernels/triton/weights.py describes a GPU's layout.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from penstock.config.engine import EngineConfig

if TYPE_CHECKING:
    from penstock.config.facts import MatrixFacts, ModelFacts

Scheme = Literal["f32", "bf16", "int16", "grouped"]
Codes = Literal["bytes", "nibbles", "iq4", "mxfp4", "nf4", "fp4"]
Scales = Literal["f16", "f32", "two_levels", "by_column"]
DeviceScheme = Literal["f32", "bf16", "int8", "int4", "fp8"]  # what a GPU makes of weights that are floats

COLUMNS = 16  # of a block
LINE_BYTES = 64
ORDER_BYTES = 4  # of a column, if they have an order of their own
GROUP_OF_X = 32  # values of an activation that share a scale
SUPER = 256  # values along k that share the second level of scales
DEVICE_HALF = 32  # most values along k that a GPU's kernel for codes multiplies at once: half of a run
WIDENED_ROWS = 65  # with so many rows or more, a GPU's kernels widen codes into scratch memory before a product,
WIDENED_BYTES = 64 << 20  # of at most this size
_BITS: dict[Scheme, int] = {"f32": 32, "bf16": 16, "int16": 16}
_SCALE_BYTES: dict[Scales, int] = {"f16": 2, "f32": 4, "two_levels": 1, "by_column": 2}
# The values of codes that are places in a table, which cpp/ops.h has too.
TABLES: dict[str, tuple[int, ...]] = {
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "mxfp4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    "nf4": (-124, -86, -65, -49, -35, -23, -11, 0, 10, 20, 31, 42, 55, 70, 90, 124),
    "fp4": (0, 1, 80, 120, 40, 60, 20, 30, 0, -1, -80, -120, -40, -60, -20, -30),
}
# Tables of bitsandbytes, whose values are no integers: their values, and what an integer of TABLES stands for.
# 1 / 124.11 is the unit with the least mean error for normal values; 1 / 120 makes all values of FP4 exact but 1 / 192.
FRACTIONS: dict[str, tuple[tuple[float, ...], float]] = {
    "nf4": (
        (
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
            *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
            *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
            *(0.7229568362236023, 1.0),
        ),
        1 / 124.11,
    ),
    "fp4": (tuple(sign * x / 192 for sign in (1, -1) for x in (0, 1, 128, 192, 64, 96, 32, 48)), 1 / 120),
}


@dataclass(frozen=True)
class WeightFormat:
    """How the native kernels hold a weight: floats, int16, or `grouped` integer codes.

    A grouped weight is scale * (code - zero) + minimum. Groups of values along k have a scale and, with `mins`, a
    minimum. Codes have 8 bits, or 4 (nibbles), or 4 that are places in a table. Scales of two levels are an int8 for
    each group times an fp16 for each 256 values. Those by column are an fp16 for each group times a power of two for
    each column.

    A checkpoint's codes are described by the format that holds them without loss. `name` is then what people call them;
    formats that differ in it alone are equal.
    """

    scheme: Scheme
    codes: Codes = "bytes"
    scales: Scales = "f16"
    mins: bool = False
    group: int = 32
    zero: int = 128
    ordered: bool = False  # columns have an order of their own (act-order), in which x is gathered before a product
    name: str = field(default="", compare=False)

    @property
    def bits(self) -> int:
        """The bits of a value, without its share of scales."""
        return _BITS.get(self.scheme) or (8 if self.codes == "bytes" else 4)

    @property
    def values(self) -> int:
        """Values along k, of each column, in a line."""
        return 8 * LINE_BYTES // COLUMNS // self.bits

    @property
    def block(self) -> int:
        """Values along k that share all levels of scales. Ranks cannot divide them."""
        return SUPER if self.scales == "two_levels" else self.group

    @property
    def scale_bytes(self) -> int:
        """Bytes of a group's scale, at the first level."""
        return _SCALE_BYTES[self.scales]

    @property
    def column_bytes(self) -> int:
        """Bytes that a column has beside its values and groups: those of its scale."""
        return 4 if self.scheme == "int16" or (self.scheme == "grouped" and self.scales == "by_column") else 0

    @property
    def bits_per_weight(self) -> float:
        """The bits of a value with its share of scales and minima, in a long row."""
        factors = 8 * self.scale_bytes / self.group + (16 / SUPER if self.scales == "two_levels" else 0)
        return self.bits + (factors * (2 if self.mins else 1) if self.scheme == "grouped" else 0)

    def padded_width(self, k: int) -> int:
        """k with its padding."""
        if self.scheme == "f32":
            return k
        multiple = 32 if self.scheme != "grouped" else max(self.group, GROUP_OF_X)
        return -(-k // multiple) * multiple

    def groups(self, k: int) -> int:
        """The number of groups along k; 0 unless grouped."""
        return self.padded_width(k) // self.group if self.scheme == "grouped" else 0

    def supers(self, k: int) -> int:
        """The number of second-level scales along k."""
        return -(-self.padded_width(k) // SUPER) if self.groups(k) and self.scales == "two_levels" else 0


MULTIPLY_BF16 = ("amx", "avx512_bf16")  # instruction sets with products of bf16
F32, BF16, INT16 = WeightFormat("f32"), WeightFormat("bf16"), WeightFormat("int16")
INT8 = WeightFormat("grouped")
# The format that holds each block type of a GGUF file without loss.
_GGUF_FORMATS: dict[str, WeightFormat] = {
    "Q4_0": replace(INT8, codes="nibbles", zero=8),
    "Q4_1": replace(INT8, codes="nibbles", zero=0, mins=True),
    "Q5_0": INT8,
    "Q5_1": replace(INT8, mins=True),
    "Q8_0": INT8,
    "Q2_K": replace(INT8, codes="nibbles", zero=0, scales="two_levels", mins=True, group=16),
    "Q3_K": replace(INT8, codes="nibbles", zero=4, scales="two_levels", group=16),
    "Q4_K": replace(INT8, codes="nibbles", zero=0, scales="two_levels", mins=True),
    "Q5_K": replace(INT8, scales="two_levels", mins=True),
    "Q6_K": replace(INT8, scales="two_levels", group=16),
    "IQ4_NL": replace(INT8, codes="iq4"),
    "IQ4_XS": replace(INT8, codes="iq4", scales="two_levels"),
    "MXFP4": replace(INT8, codes="mxfp4"),
}
GGUF_FORMATS = {name: replace(fmt, name=name) for name, fmt in _GGUF_FORMATS.items()}
Stored = Sequence[WeightFormat | None]  # the codes of the tensors that a matrix is made of, None for floats


def int4_format(group: int) -> WeightFormat:
    """The format of --quantization int4."""
    return WeightFormat("grouped", "nibbles", "two_levels", mins=True, group=group, zero=0)


def held_as(fmt: WeightFormat, isa: str) -> WeightFormat:
    """The format in which the kernels of an instruction set multiply these codes. AMX's widen them to fp16, so their
    scales are by column, whose values lie within the range of fp16."""
    return replace(fmt, scales="by_column") if isa == "amx" and fmt.scheme == "grouped" else fmt


def format_of(stored: Iterable[WeightFormat]) -> WeightFormat:
    """The smallest format that holds tensors of these formats without loss, stacked in one matrix."""
    formats = set(stored)
    if len(formats) == 1:
        return formats.pop()
    same_codes = len({(one.codes, one.zero) for one in formats}) == 1
    scales = {one.scales for one in formats}
    return WeightFormat(
        "grouped",
        next(iter(formats)).codes if same_codes else "bytes",
        scales.pop() if len(scales) == 1 else "f32",
        mins=any(one.mins for one in formats),
        group=min(one.group for one in formats),
        zero=next(iter(formats)).zero if same_codes else 128,
        ordered=any(one.ordered for one in formats),
    )


def cpu_format(
    kind: str,
    stored: Stored,
    dtype: str,
    quantization: str,
    group: int,
    isa: str = "",
    *,
    sensitive: bool = False,
) -> WeightFormat:
    """The format of a matrix for the native kernels of an instruction set. `kind`: see families.Parameter.kind.

    Codes stay as they are, unless another tensor of the matrix has floats. Routers are never quantised, because they
    choose a token's experts. With int4, embedding, head and `sensitive` matrices are int8. A CPU that has no
    instruction for products of bf16 multiplies integers faster than floats, so matrices of bf16 become int16, but for
    embedding and head. With AMX the scales of codes are by column.
    """
    floats = F32 if dtype == "float32" else BF16
    if kind == "router":
        return floats
    grouped = None
    if codes := codes_of(stored):
        grouped = format_of(codes)
    elif quantization in ("int8", "int4"):
        as_int4 = quantization == "int4" and kind != "vocabulary" and not sensitive
        grouped = int4_format(group) if as_int4 else INT8
    if grouped is not None:
        return held_as(grouped, isa)
    return INT16 if floats == BF16 and kind != "vocabulary" and isa not in MULTIPLY_BF16 else floats


def schemes(dtype: str, quantization: str) -> tuple[DeviceScheme, DeviceScheme]:
    """The schemes on a GPU of (the layers' matrices, the embedding and the head). With int4, embedding and head are
    int8, because the choice of a token is more sensitive."""
    pairs: dict[str, tuple[DeviceScheme, DeviceScheme]] = {
        "int8": ("int8", "int8"),
        "int4": ("int4", "int8"),
        "fp8": ("fp8", "fp8"),
    }
    return pairs.get(quantization) or (unquantized(dtype), unquantized(dtype))


def device_format(kind: str, stored: Stored, dtype: str, quantization: str) -> DeviceScheme | WeightFormat:
    """Returns the scheme of a matrix on a GPU. If all its tensors are codes, and --quantization is not given, returns
    the format of these codes, which stay as they are. `kind` and `stored` are as for `cpu_format`."""
    if kind == "router":
        return unquantized(dtype)
    if quantization == "none" and (codes := codes_of(stored)):
        return format_of(codes)
    matrices, vocabulary = schemes(dtype, quantization)
    return vocabulary if kind == "vocabulary" else matrices


def device_int4(group: int) -> WeightFormat:
    """The format of --quantization int4 on a GPU."""
    return replace(INT8, codes="nibbles", zero=8, group=group)


def unquantized(dtype: str) -> Literal["f32", "bf16"]:
    """The scheme of weights that are not quantised."""
    return "f32" if dtype == "float32" else "bf16"


def num_blocks(n: int, *, gated: bool) -> int:
    """The number of blocks of 16 columns; a gated weight's have 8 columns of each half."""
    return -(-(n // 2) // (COLUMNS // 2)) if gated else -(-n // COLUMNS)


def packed_bytes(n: int, k: int, fmt: WeightFormat, *, gated: bool = False, bias: bool = False) -> int:
    """Bytes of a packed weight [n, k]: lines, scales, minima and fp32 bias, all padded."""
    columns = num_blocks(n, gated=gated) * COLUMNS
    values = fmt.padded_width(k) * fmt.bits // 8 + fmt.column_bytes
    factors = fmt.groups(k) * fmt.scale_bytes + fmt.supers(k) * 2
    order = ORDER_BYTES * k if fmt.ordered else 0
    return columns * (values + factors * (2 if fmt.mins else 1) + (4 if bias else 0)) + order


def device_half(fmt: WeightFormat) -> int:
    """Returns the values along k of half a run: at most a group's, since a half has one scale for each column."""
    return min(fmt.group, DEVICE_HALF)


def device_width(k: int, fmt: WeightFormat) -> int:
    """Returns k with its padding on a GPU: a multiple of a run and of a group."""
    multiple = max(fmt.group, 2 * device_half(fmt))
    return -(-k // multiple) * multiple


def device_bytes(n: int, k: int, fmt: DeviceScheme | WeightFormat, group: int, *, bias_size: int = 0) -> int:
    """Bytes of a weight [n, k] on a GPU, its scales, and its bias of `bias_size` bytes an element. `group` is used for
    int4 alone: the other schemes have none, and a format has its own."""
    fmt = device_int4(group) if fmt == "int4" else fmt
    if isinstance(fmt, WeightFormat):
        width = device_width(k, fmt)
        factors = width // fmt.group * fmt.scale_bytes
        if fmt.scales == "two_levels":
            factors += -(-width // SUPER) * 2
        order = ORDER_BYTES * k if fmt.ordered else 0
        size = n * (width * fmt.bits // 8 + factors * (2 if fmt.mins else 1)) + order
    elif fmt in ("int8", "fp8"):
        size = n * k + 4 * n
    else:
        size = n * k * (4 if fmt == "f32" else 2)
    return size + n * bias_size


def stored_as(engine: EngineConfig, isa: str = "", stored: Iterable[Stored] = ()) -> str:
    """The format of the weights in memory, for people. `isa` is the instruction set if native kernels read them.
    `stored` are the codes of each matrix (see MatrixFacts), for kernels that take codes as they are."""
    matrices = [] if engine.device == "cuda" and engine.quantization != "none" else list(map(codes_of, stored))
    kept = sorted({fmt.name for codes in matrices for fmt in codes})
    if not kept:
        return _dense_as(engine, isa)
    as_stored = f"{', '.join(kept[:-1])} and {kept[-1]}" if kept[1:] else kept[0]
    others = engine.dtype if engine.quantization == "none" else engine.quantization
    return f"{as_stored} as in the file" + ("" if all(matrices) else f", others {others}")


def _dense_as(engine: EngineConfig, isa: str) -> str:
    if engine.quantization == "int4":
        return f"int4 in groups of {engine.quantization_group}, and int8"
    if engine.quantization != "none":
        return engine.quantization
    integers = isa and cpu_format("matrix", (), engine.dtype, "none", 0, isa) == INT16
    return f"{engine.dtype}, matrices as int16" if integers else engine.dtype


def codes_of(stored: Stored) -> Sequence[WeightFormat]:
    """Returns the codes of a matrix's tensors; () if one of them has floats, since all are read as floats then."""
    codes = [fmt for fmt in stored if fmt is not None]
    return codes if len(codes) == len(stored) else ()


def weights_bytes(facts: "ModelFacts", engine: EngineConfig) -> int:
    """Bytes of all weights, packed for the kernels of the device."""
    packed = sum(matrix.count * _matrix_bytes(matrix, engine, facts.isa) for matrix in facts.matrices)
    return packed + facts.vector_elements * engine.element_size + facts.float32_elements * 4


def matmul_bytes(facts: "ModelFacts", engine: EngineConfig, rows: int = 1) -> int:
    """Bytes of weights that a decode step of `rows` sequences reads: every layer's matrices and the head. Experts count
    by the average number that is chosen if all are equally likely. The few rows of the embedding do not count."""
    layers = sum(
        int(m.count * _matrix_bytes(m, engine, facts.isa) * (1.0 - (1.0 - m.share) ** rows))
        for m in facts.matrices
        if not m.vocabulary
    )
    if not (facts.samples or facts.head_part):
        return layers
    return layers + max(_matrix_bytes(m, engine, facts.isa) for m in facts.matrices if m.vocabulary)


def widened_bytes(facts: "ModelFacts", engine: EngineConfig, rows: int) -> int:
    """Bytes of scratch memory in which a GPU's kernels widen codes in a step of so many rows."""
    if engine.device != "cuda" or engine.deterministic or engine.element_size != 2 or rows < WIDENED_ROWS:
        return 0
    formats = [_device_format(matrix, engine) for matrix in facts.matrices if matrix.experts == 1]
    return WIDENED_BYTES if any(fmt == "int4" or isinstance(fmt, WeightFormat) for fmt in formats) else 0


def _device_format(matrix: "MatrixFacts", engine: EngineConfig) -> DeviceScheme | WeightFormat:
    return device_format(_kind(matrix), matrix.stored, engine.dtype, engine.quantization)


def _kind(matrix: "MatrixFacts") -> str:
    return "router" if matrix.router else "vocabulary" if matrix.vocabulary else "matrix"


def _matrix_bytes(matrix: "MatrixFacts", engine: EngineConfig, isa: str) -> int:
    shape = (matrix.rows, matrix.columns)
    if engine.device == "cuda":
        on_device = _device_format(matrix, engine)
        bias = engine.element_size if matrix.bias else 0
        return matrix.experts * device_bytes(*shape, on_device, engine.quantization_group, bias_size=bias)
    settings = (engine.dtype, engine.quantization, engine.quantization_group, isa)
    fmt = cpu_format(_kind(matrix), matrix.stored, *settings, sensitive=matrix.sensitive)
    return matrix.experts * packed_bytes(*shape, fmt, gated=matrix.gated, bias=matrix.bias)
