"""The longest context of a model with scaled rope is what vLLM takes it for."""

from typing import Any

import pytest

from penstock.families import UnsupportedModel, spec_from_config
from tests.families.configurations import LLAMA

POSITIONS = 2048
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 512}


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize(
    ("kind", "scaling", "context"),
    [
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": POSITIONS}, 8192),
        ("yarn", {"factor": 4.0}, 8192),  # the original is max_position_embeddings
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 256}, POSITIONS),  # the larger of both
        ("yarn", {"original_max_position_embeddings": 512}, POSITIONS),  # the factor is what reaches it
        ("yarn", {"factor": 1e12}, 2**31 - 1),
        ("linear", {"factor": 4.0}, 8192),
        ("linear", {"factor": 0.5}, POSITIONS),
        ("dynamic", {"factor": 4.0}, POSITIONS),
        ("llama3", LLAMA3, POSITIONS),
        ("longrope", FACTORS, POSITIONS),
        ("default", {}, POSITIONS),
    ],
)
def test_context(where: str, key: str, kind: str, scaling: dict[str, Any], context: int) -> None:
    config = {**LLAMA, "max_position_embeddings": POSITIONS, where: {key: kind, **scaling}}
    assert spec_from_config(config).max_position == context


def test_a_gguf_file_has_the_whole_length_of_a_linear_scaling() -> None:
    config = {**LLAMA, "max_position_embeddings": POSITIONS, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    assert spec_from_config({**config, "gguf": True}).max_position == POSITIONS


def test_a_wrong_factor_is_named() -> None:
    with pytest.raises(UnsupportedModel, match="factor is 'four'"):
        spec_from_config({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": "four"}})
