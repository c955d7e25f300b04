"""What packed weights take, worked out by hand from the layout's description."""

from dataclasses import replace

import pytest
from msgspec.structs import replace as structs_replace

from penstock.config import size_memory
from penstock.config.weights import (
    BF16,
    F32,
    GGUF_FORMATS,
    INT8,
    INT16,
    WeightFormat,
    cpu_format,
    device_format,
    format_of,
    held_as,
    int4_format,
    packed_bytes,
    schemes,
    stored_as,
    weights_bytes,
)
from tests.config.models import FULL, GIB
from tests.config.test_memory import engine


@pytest.mark.parametrize(
    ("shape", "fmt", "size"),
    [
        ((16, 3), F32, 3 * 64),  # a line for each value along k
        ((17, 40), BF16, 2 * 32 * 64),  # two blocks, k padded to 64, two values a line
        ((17, 40), INT16, 2 * (32 * 64 + 16 * 4)),  # the same, and a scale for each column
        ((16, 65), INT8, 24 * 64 + 3 * 16 * 2),  # k padded to 96; an fp16 for each group and column
        # k padded to 96; a scale and a minimum of a byte for each group, and an fp16 of each for the first 256 values
        ((16, 65), int4_format(32), 12 * 64 + 3 * 16 * 2 + 16 * 4),
        ((16, 65), int4_format(128), 16 * 64 + 16 * 2 + 16 * 4),
        ((16, 300), int4_format(64), 40 * 64 + 5 * 16 * 2 + 2 * 16 * 4),
    ],
)
def test_lines_and_scales(shape: tuple[int, int], fmt: WeightFormat, size: int) -> None:
    assert packed_bytes(*shape, fmt) == size
    assert packed_bytes(*shape, fmt, bias=True) == size + -(-shape[0] // 16) * 64


# Of 16 columns and 256 values along k: the lines; scales, and perhaps minima, of the groups; those of the second level.
BYTES, NIBBLES = 64 * 64, 32 * 64


@pytest.mark.parametrize(
    ("stored", "size"),
    [
        (("Q4_0",), NIBBLES + 8 * 16 * 2),
        (("Q4_1",), NIBBLES + 8 * 16 * 4),
        (("Q5_0",), BYTES + 8 * 16 * 2),
        (("Q5_1",), BYTES + 8 * 16 * 4),
        (("Q8_0",), BYTES + 8 * 16 * 2),
        (("Q2_K",), NIBBLES + 16 * 16 * 2 + 16 * 4),
        (("Q3_K",), NIBBLES + 16 * 16 + 16 * 2),
        (("Q4_K",), NIBBLES + 8 * 16 * 2 + 16 * 4),
        (("Q5_K",), BYTES + 8 * 16 * 2 + 16 * 4),
        (("Q6_K",), BYTES + 16 * 16 + 16 * 2),
        (("IQ4_NL",), NIBBLES + 8 * 16 * 2),
        (("IQ4_XS",), NIBBLES + 8 * 16 + 16 * 2),
        (("MXFP4",), NIBBLES + 8 * 16 * 2),
        (("Q4_K", "Q4_K", "Q6_K"), BYTES + 16 * 16 * 2 + 16 * 4),  # codes of bytes, groups of 16, with minima
        (("Q4_0", "Q8_0"), BYTES + 8 * 16 * 2),
        (("Q4_0", "Q4_1"), BYTES + 8 * 16 * 4),  # nibbles of another zero
        (("Q4_1", "Q4_K"), NIBBLES + 8 * 16 * 8),  # the same codes; scales of one and of two levels are fp32
        (("Q8_0", "Q6_K"), BYTES + 16 * 16 * 4),
    ],
)
def test_the_types_of_a_gguf_file(stored: tuple[str, ...], size: int) -> None:
    formats = [GGUF_FORMATS[name] for name in stored]
    assert packed_bytes(16, 256, format_of(formats)) == size
    assert packed_bytes(16, 256, format_of(formats[::-1])) == size


def test_each_half_of_a_gated_weight_is_padded_to_eight() -> None:
    assert packed_bytes(2 * 9, 1, F32, gated=True) == 2 * 64
    assert packed_bytes(2 * 9, 1, F32) == 2 * 64
    assert packed_bytes(2 * 17, 1, F32, gated=True) == 3 * 64


def test_embedding_and_head_stay_int8_in_int4() -> None:
    assert schemes("bfloat16", "none") == ("bf16", "bf16")
    assert schemes("float32", "none") == ("f32", "f32")
    assert schemes("bfloat16", "int8") == ("int8", "int8")
    assert schemes("float32", "int4") == ("int4", "int8")


def formats(*settings: str) -> tuple[WeightFormat, WeightFormat]:
    """The formats of a layer's matrices and of the embedding."""
    dtype, quantization, isa = settings
    matrix, gated, vocabulary = (
        cpu_format(kind, (), dtype, quantization, 64, isa) for kind in ("matrix", "gated", "vocabulary")
    )
    assert gated == matrix
    return matrix, vocabulary


def test_a_cpu_multiplies_integers_where_it_cannot_multiply_bf16() -> None:
    assert formats("bfloat16", "none", "avx2") == formats("bfloat16", "none", "avx512") == (INT16, BF16)
    assert formats("bfloat16", "none", "amx") == formats("bfloat16", "none", "avx512_bf16") == (BF16, BF16)
    assert formats("float32", "none", "avx2") == (F32, F32)
    assert formats("bfloat16", "int8", "avx2") == formats("float32", "int8", "avx512") == (INT8, INT8)
    assert formats("bfloat16", "int4", "avx2") == (int4_format(64), INT8)
    assert stored_as(engine(), "avx2") == "bfloat16, matrices as int16"
    assert stored_as(engine(), "amx") == stored_as(engine()) == "bfloat16"
    assert stored_as(engine(quantization="int8"), "avx2") == "int8"


def test_amx_has_scales_by_column() -> None:
    by_column = {"scales": "by_column"}
    assert formats("float32", "int8", "amx") == (replace(INT8, **by_column),) * 2
    assert formats("bfloat16", "int4", "amx") == (replace(int4_format(64), **by_column), replace(INT8, **by_column))
    for names in (("Q4_K",), ("Q4_1", "Q4_K"), ("Q6_K", "Q8_0")):
        stored = [GGUF_FORMATS[name] for name in names]
        fmt = format_of(stored)
        assert cpu_format("matrix", stored, "bfloat16", "none", 32, "amx") == replace(fmt, **by_column)
        assert cpu_format("router", stored, "bfloat16", "none", 32, "amx") == BF16
    # The lines; an fp16 for each group, with minima two; and an fp32 for each column.
    assert packed_bytes(16, 256, held_as(GGUF_FORMATS["Q6_K"], "amx")) == BYTES + 16 * 16 * 2 + 16 * 4
    assert packed_bytes(17, 200, held_as(GGUF_FORMATS["Q4_K"], "amx")) == 2 * (28 * 64 + 7 * 16 * 4 + 16 * 4)
    matrices = tuple(structs_replace(matrix, stored=(GGUF_FORMATS["Q4_K"],)) for matrix in FULL.matrices)
    facts = structs_replace(FULL, matrices=matrices)
    planned, others = (weights_bytes(facts.for_kernels(isa), engine()) for isa in ("amx", "avx512"))
    assert 1.07 < planned / others < 1.09


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize(("dtype", "floats"), [("bfloat16", BF16), ("float32", F32)])
def test_codes_of_a_file_stay_and_routers_are_floats(dtype: str, floats: WeightFormat, quantization: str) -> None:
    q4 = GGUF_FORMATS["Q4_K"]
    for kind in ("matrix", "gated", "vocabulary"):
        assert cpu_format(kind, (q4,), dtype, quantization, 32, "avx2") == q4
        # A matrix of which one tensor is floats is quantised, or is floats, as if all of them were.
        dense = cpu_format(kind, (), dtype, quantization, 32, "avx2")
        assert cpu_format(kind, (None, q4), dtype, quantization, 32, "avx2") == dense
    assert cpu_format("router", (q4,), dtype, quantization, 32, "avx2") == floats


def test_the_types_in_memory_are_named() -> None:
    (q4, q5, q6, q8), floats = ((GGUF_FORMATS[name],) for name in ("Q4_K", "Q5_0", "Q6_K", "Q8_0")), (None,)
    mixed = floats + q4
    assert stored_as(engine(), "avx2", [q8, q4, q8]) == "Q4_K and Q8_0 as in the file"
    assert stored_as(engine(), "amx", [q4 + q6, q8]) == "Q4_K, Q6_K and Q8_0 as in the file"
    assert q5 == q8 and stored_as(engine(), "avx2", [q5, q8]) == "Q5_0 and Q8_0 as in the file"
    assert stored_as(engine(), "avx2", [q8, floats]) == "Q8_0 as in the file, others bfloat16"
    assert stored_as(engine(quantization="int4"), "avx2", [q8, mixed]) == "Q8_0 as in the file, others int4"
    assert stored_as(engine(dtype="float32"), "avx2", [mixed, floats, ()]) == "float32"


def test_codes_take_less_where_kernels_read_them() -> None:
    matrices = tuple(structs_replace(matrix, stored=(GGUF_FORMATS["Q4_0"],)) for matrix in FULL.matrices)
    facts, elements = structs_replace(FULL, matrices=matrices), 151_936 * 1024 + 28 * 15_360 * 1024
    norms = 4 * FULL.vector_elements
    assert weights_bytes(facts, engine(dtype="float32")) == elements // 32 * 18 + norms
    assert weights_bytes(facts.without_codes(), engine(dtype="float32")) == 4 * elements + norms
    plan = size_memory(facts, engine(), 16 * GIB)
    assert plan.rows[0].note == "596.0 M parameters, Q4_0 as in the file"
    assert size_memory(facts.without_codes(), engine(), 16 * GIB).rows[0].note == "596.0 M parameters, bfloat16"


def test_a_gpu_keeps_codes_unless_a_quantisation_is_chosen() -> None:
    matrices = tuple(structs_replace(matrix, stored=(GGUF_FORMATS["Q4_0"],)) for matrix in FULL.matrices)
    facts, elements = structs_replace(FULL, matrices=matrices), 151_936 * 1024 + 28 * 15_360 * 1024
    norms = 2 * FULL.vector_elements
    assert weights_bytes(facts, engine(device="cuda")) == elements // 32 * 18 + norms
    assert size_memory(facts, engine(device="cuda"), 16 * GIB).rows[0].note == "596.0 M parameters, Q4_0 as in the file"
    fp8 = engine(device="cuda", quantization="fp8")
    assert weights_bytes(facts, fp8) == weights_bytes(FULL, fp8)
    assert size_memory(facts, fp8, 16 * GIB).rows[0].note == "596.0 M parameters, fp8"
    q4 = GGUF_FORMATS["Q4_K"]
    for kind in ("matrix", "vocabulary"):
        assert device_format(kind, (q4,), "bfloat16", "none") == q4
        assert device_format(kind, (None, q4), "bfloat16", "none") == "bf16"
        assert device_format(kind, (q4,), "bfloat16", "int8") == "int8"
    assert device_format("router", (q4,), "float32", "none") == "f32"


def test_a_known_model() -> None:
    """Qwen3-0.6B: a byte, or half of one, for each parameter; and scales and minima."""
    vocabulary, layers = 151_936 * 1024, 28 * (4096 * 1024 + 2048 * 1024 + 6144 * 1024 + 3072 * 1024)
    norms = 2 * FULL.vector_elements
    sizes = {}
    for quantization, group in (("int8", 32), ("int4", 32), ("int4", 128)):
        plan = size_memory(FULL, engine(quantization=quantization, quantization_group=group), 16 * GIB)
        sizes[quantization, group] = plan.rows[0].bytes
        assert quantization in plan.rows[0].note
    assert sizes["int8", 32] == (vocabulary + layers) // 32 * 34 + norms
    second_level = layers // 256 * 4
    assert sizes["int4", 32] == vocabulary // 32 * 34 + layers // 2 + layers // 32 * 2 + second_level + norms
    assert sizes["int4", 128] == sizes["int4", 32] - (layers // 32 - layers // 128) * 2
