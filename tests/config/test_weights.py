"""What packed weights take, worked out by hand from the layout's description."""

import pytest

from penstock.config import size_memory
from penstock.config.weights import Scheme, cpu_schemes, packed_bytes, schemes, stored_as
from tests.config.models import FULL, GIB
from tests.config.test_memory import engine


@pytest.mark.parametrize(
    ("shape", "scheme", "group", "size"),
    [
        ((16, 3), "f32", 32, 3 * 64),  # a line for each value along k
        ((17, 40), "bf16", 32, 2 * 32 * 64),  # two blocks, k padded to 64, two values a line
        ((17, 40), "int16", 32, 2 * (32 * 64 + 16 * 4)),  # the same, and a scale for each column
        ((16, 65), "int8", 32, 32 * 64 + 16 * 8),  # k padded to 128; a scale and a sum for each column
        ((16, 65), "int4", 32, 12 * 64 + 3 * 16 * 2),  # k padded to 96; a scale for each group and column
        ((16, 65), "int4", 128, 16 * 64 + 16 * 2),
    ],
)
def test_lines_and_scales(shape: tuple[int, int], scheme: Scheme, group: int, size: int) -> None:
    assert packed_bytes(*shape, scheme, group) == size
    assert packed_bytes(*shape, scheme, group, bias=True) == size + -(-shape[0] // 16) * 64


def test_each_half_of_a_gated_weight_is_padded_to_eight() -> None:
    assert packed_bytes(2 * 9, 1, "f32", 32, gated=True) == 2 * 64
    assert packed_bytes(2 * 9, 1, "f32", 32) == 2 * 64
    assert packed_bytes(2 * 17, 1, "f32", 32, gated=True) == 3 * 64


def test_embedding_and_head_stay_int8_in_int4() -> None:
    assert schemes("bfloat16", "none") == ("bf16", "bf16")
    assert schemes("float32", "none") == ("f32", "f32")
    assert schemes("bfloat16", "int8") == ("int8", "int8")
    assert schemes("float32", "int4") == ("int4", "int8")


def test_a_cpu_multiplies_integers_where_it_has_no_tiles() -> None:
    assert cpu_schemes("bfloat16", "none", "avx2") == cpu_schemes("bfloat16", "none", "avx512") == ("int16", "bf16")
    assert cpu_schemes("bfloat16", "none", "amx") == ("bf16", "bf16")
    assert cpu_schemes("float32", "none", "avx2") == ("f32", "f32")
    assert cpu_schemes("bfloat16", "int4", "avx2") == ("int4", "int8")
    assert stored_as(engine(), "avx2") == "bfloat16, matrices as int16"
    assert stored_as(engine(), "amx") == stored_as(engine()) == "bfloat16"
    assert stored_as(engine(quantization="int8"), "avx2") == "int8"


def test_a_known_model() -> None:
    """Qwen3-0.6B: a byte, or half of one, for each parameter; and scales and sums."""
    vocabulary, layers = 151_936 * 1024, 28 * (4096 * 1024 + 2048 * 1024 + 6144 * 1024 + 3072 * 1024)
    norms = 2 * FULL.vector_elements
    rows = 28 * (4096 + 1024 + 6144 + 1024)
    sizes = {}
    for quantization, group in (("int8", 32), ("int4", 32), ("int4", 128)):
        plan = size_memory(FULL, engine(quantization=quantization, quantization_group=group), 16 * GIB)
        sizes[quantization, group] = plan.rows[0].bytes
        assert quantization in plan.rows[0].note
    assert sizes["int8", 32] == vocabulary + layers + norms + 8 * (151_936 + rows)
    assert sizes["int4", 32] == vocabulary + 8 * 151_936 + layers // 2 + layers // 32 * 2 + norms
    assert sizes["int4", 128] == sizes["int4", 32] - (layers // 32 - layers // 128) * 2
