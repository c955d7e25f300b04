"""Bytes of weights in memory, as the native kernels pack them and as a GPU's kernels do. The native kernels allocate by
these sizes.

`Scheme` in kernels/native/cpp/ops.h describes the native layout: blocks of 16 columns, lines of 64 bytes.
kernels/triton/weights.py describes a GPU's layout.
"""

from typing import Literal

from penstock.config.engine import EngineConfig
from penstock.config.facts import MatrixFacts, ModelFacts

Scheme = Literal["f32", "bf16", "int16", "int8", "int4", "fp8"]

COLUMNS = 16  # of a block
LINE_BYTES = 64
INT4_MULTIPLE = 128  # k is padded to a multiple of this on a GPU
# Values along k, of each column, in a line.
VALUES: dict[Scheme, int] = {"f32": 1, "bf16": 2, "int16": 2, "int8": 4, "int4": 8}
_MULTIPLES: dict[Scheme, int] = {
    "f32": 1,
    "bf16": 32,
    "int16": 32,
    "int8": 64,
}  # k is padded to a multiple of these; int4: of a group


def schemes(dtype: str, quantization: str) -> tuple[Scheme, Scheme]:
    """The schemes of (the layers' matrices, the embedding and the head). With int4, embedding and head are int8,
    because the choice of a token is more sensitive. Only a GPU supports fp8."""
    pairs: dict[str, tuple[Scheme, Scheme]] = {
        "int8": ("int8", "int8"),
        "int4": ("int4", "int8"),
        "fp8": ("fp8", "fp8"),
    }
    return pairs.get(quantization) or (unquantized(dtype), unquantized(dtype))


def cpu_schemes(dtype: str, quantization: str, isa: str = "") -> tuple[Scheme, Scheme]:
    """The same for the native kernels of an instruction set. Without AMX, a CPU multiplies integers faster than floats,
    so bf16 matrices become int16. The embedding, the head and routers, which look up or choose, stay bf16."""
    matrices, vocabulary = schemes(dtype, quantization)
    return "int16" if matrices == "bf16" and isa != "amx" else matrices, vocabulary


def unquantized(dtype: str) -> Scheme:
    """The scheme of weights that are not quantised. Routers never are, because they choose a token's experts."""
    return "f32" if dtype == "float32" else "bf16"


def padded_width(k: int, scheme: Scheme, group: int) -> int:
    """k with its padding."""
    multiple = group if scheme == "int4" else _MULTIPLES[scheme]
    return -(-k // multiple) * multiple


def num_blocks(n: int, *, gated: bool) -> int:
    """The number of blocks of 16 columns; a gated weight's have 8 columns of each half."""
    return -(-(n // 2) // (COLUMNS // 2)) if gated else -(-n // COLUMNS)


def packed_bytes(n: int, k: int, scheme: Scheme, group: int, *, gated: bool = False, bias: bool = False) -> int:
    """Bytes of a packed weight [n, k]: lines, scales, sums and fp32 bias, all padded."""
    blocks, width = num_blocks(n, gated=gated), padded_width(k, scheme, group)
    size = blocks * (width // VALUES[scheme]) * LINE_BYTES
    if scheme == "int8":
        size += blocks * COLUMNS * (4 + 4)
    if scheme == "int16":
        size += blocks * COLUMNS * 4
    if scheme == "int4":
        size += blocks * (width // group) * COLUMNS * 2
    return size + (blocks * COLUMNS * 4 if bias else 0)


def device_bytes(n: int, k: int, scheme: Scheme, group: int, *, bias_size: int = 0) -> int:
    """Bytes of a weight [n, k] on a GPU, its scales, and its bias of `bias_size` bytes an element."""
    if scheme in ("int8", "fp8"):
        size = n * k + 4 * n
    elif scheme == "int4":
        padded = -(-k // INT4_MULTIPLE) * INT4_MULTIPLE
        size = n * (padded // 2 + padded // group * 2)
    else:
        size = n * k * (4 if scheme == "f32" else 2)
    return size + n * bias_size


def stored_as(engine: EngineConfig, isa: str = "") -> str:
    """The format of the weights in memory, for people. `isa` is the instruction set if native kernels read them."""
    if engine.quantization == "int4":
        return f"int4 in groups of {engine.quantization_group}, embedding and head int8"
    if engine.quantization != "none":
        return engine.quantization
    integers = isa and cpu_schemes(engine.dtype, engine.quantization, isa)[0] == "int16"
    return f"{engine.dtype}, matrices as int16" if integers else engine.dtype


def weights_bytes(facts: ModelFacts, engine: EngineConfig) -> int:
    """Bytes of all weights, packed for the kernels of the device."""
    packed = sum(matrix.count * _matrix_bytes(matrix, engine) for matrix in facts.matrices)
    return packed + facts.vector_elements * engine.element_size


def matmul_bytes(facts: ModelFacts, engine: EngineConfig, rows: int = 1) -> int:
    """Bytes of weights that a decode step of `rows` sequences reads: every layer's matrices and the head. Of experts,
    the average number that is chosen if all are equally likely. The few rows of the embedding do not count."""
    layers = sum(
        int(m.count * _matrix_bytes(m, engine) * (1.0 - (1.0 - m.share) ** rows))
        for m in facts.matrices
        if not m.vocabulary
    )
    if not (facts.samples or facts.head_part):
        return layers
    return layers + max(_matrix_bytes(m, engine) for m in facts.matrices if m.vocabulary)


def _matrix_bytes(matrix: MatrixFacts, engine: EngineConfig) -> int:
    matrices, vocabulary = (schemes if engine.device == "cuda" else cpu_schemes)(engine.dtype, engine.quantization)
    scheme = vocabulary if matrix.vocabulary else unquantized(engine.dtype) if matrix.router else matrices
    shape = (matrix.rows, matrix.columns)
    if engine.device == "cuda":
        bias = engine.element_size if matrix.bias else 0
        return matrix.experts * device_bytes(*shape, scheme, engine.quantization_group, bias_size=bias)
    return matrix.experts * packed_bytes(
        *shape, scheme, engine.quantization_group, gated=matrix.gated, bias=matrix.bias
    )
