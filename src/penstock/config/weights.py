"""What weights take in memory: the native kernels' packed layout, by whose sizes they also allocate; and a GPU's.

The layout is described at `Scheme` in kernels/native/cpp/ops.h: blocks of 16 columns, lines of 64 bytes; a GPU's in
kernels/triton/weights.py.
"""

from typing import Literal

from penstock.config.engine import EngineConfig
from penstock.config.facts import MatrixFacts, ModelFacts

Scheme = Literal["f32", "bf16", "int16", "int8", "int4", "fp8"]

COLUMNS = 16  # of a block
LINE_BYTES = 64
INT4_MULTIPLE = 128  # that k is padded to on a GPU
# Along k, of each column, in a line.
VALUES: dict[Scheme, int] = {"f32": 1, "bf16": 2, "int16": 2, "int8": 4, "int4": 8}
_MULTIPLES: dict[Scheme, int] = {"f32": 1, "bf16": 32, "int16": 32, "int8": 64}  # that k is padded to; int4: a group


def schemes(dtype: str, quantization: str) -> tuple[Scheme, Scheme]:
    """How (the layers' matrices, the embedding and the head) are packed. In int4 too, the latter two stay int8: the
    choice of a token is more sensitive than what led to it. fp8 is a GPU's."""
    pairs: dict[str, tuple[Scheme, Scheme]] = {
        "int8": ("int8", "int8"),
        "int4": ("int4", "int8"),
        "fp8": ("fp8", "fp8"),
    }
    return pairs.get(quantization) or (unquantized(dtype), unquantized(dtype))


def cpu_schemes(dtype: str, quantization: str, isa: str = "") -> tuple[Scheme, Scheme]:
    """The same by the native kernels of an instruction set. But for AMX's tiles a CPU multiplies integers faster than
    floats, so matrices in bf16 become int16. What is looked up or makes a choice stays as it is: the embedding, the
    head and routers."""
    matrices, vocabulary = schemes(dtype, quantization)
    return "int16" if matrices == "bf16" and isa != "amx" else matrices, vocabulary


def unquantized(dtype: str) -> Scheme:
    """How what is not quantised is packed, a router always: which experts a token goes through is a choice too."""
    return "f32" if dtype == "float32" else "bf16"


def padded_width(k: int, scheme: Scheme, group: int) -> int:
    """k as it is stored."""
    multiple = group if scheme == "int4" else _MULTIPLES[scheme]
    return -(-k // multiple) * multiple


def num_blocks(n: int, *, gated: bool) -> int:
    """Of 16 columns; in a gated weight, 8 of each half."""
    return -(-(n // 2) // (COLUMNS // 2)) if gated else -(-n // COLUMNS)


def packed_bytes(n: int, k: int, scheme: Scheme, group: int, *, gated: bool = False, bias: bool = False) -> int:
    """Lines, scales, sums and fp32 bias of a weight [n, k], all padded."""
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
    """Of a weight [n, k] on a GPU, its scales, and its bias of so many bytes an element."""
    if scheme in ("int8", "fp8"):
        size = n * k + 4 * n
    elif scheme == "int4":
        padded = -(-k // INT4_MULTIPLE) * INT4_MULTIPLE
        size = n * (padded // 2 + padded // group * 2)
    else:
        size = n * k * (4 if scheme == "f32" else 2)
    return size + n * bias_size


def stored_as(engine: EngineConfig, isa: str = "") -> str:
    """For people: what the weights are in memory, where native kernels of an instruction set read them."""
    if engine.quantization == "int4":
        return f"int4 in groups of {engine.quantization_group}, embedding and head int8"
    if engine.quantization != "none":
        return engine.quantization
    integers = isa and cpu_schemes(engine.dtype, engine.quantization, isa)[0] == "int16"
    return f"{engine.dtype}, matrices as int16" if integers else engine.dtype


def weights_bytes(facts: ModelFacts, engine: EngineConfig) -> int:
    """All of a model's weights, packed as the kernels of the device read them."""
    packed = sum(matrix.count * _matrix_bytes(matrix, engine) for matrix in facts.matrices)
    return packed + facts.vector_elements * engine.element_size


def matmul_bytes(facts: ModelFacts, engine: EngineConfig, rows: int = 1) -> int:
    """What a decode step of `rows` sequences reads of them: every layer's matrices and the head, and of experts those
    that are chosen, on average where all are equally likely. An embedding is looked up, not read."""
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
