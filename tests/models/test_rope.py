"""Frequencies are those of transformers, bit for bit; a rotation is what qk_norm_rope takes."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from penstock.families import RopeSpec
from penstock.families.hf_config import HFConfig
from penstock.families.rope_config import rope_of
from penstock.kernels.attention import TorchPages
from penstock.models.rope import inverse_frequencies, rotary_frequencies

SIZES = {"hidden_size": 256, "num_attention_heads": 2, "max_position_embeddings": 131_072}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32_768}
YARN_SCALES = {
    **YARN,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "truncate": False,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 4096,
    "short_factor": [1 + i / 64 for i in range(64)],
    "long_factor": [1 + i / 4 for i in range(64)],
}


@pytest.mark.parametrize(
    ("parameters", "spec"),
    [
        ({"rope_type": "default", "rope_theta": 1e6}, RopeSpec(theta=1e6)),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}, RopeSpec(scaling="linear", factor=8.0)),
        (LLAMA3, RopeSpec(theta=5e5, scaling="llama3", factor=8.0)),
        (YARN, rope_of(HFConfig(YARN), HFConfig(SIZES), 1e4)),
        (YARN_SCALES, rope_of(HFConfig(YARN_SCALES), HFConfig(SIZES), 1e4)),
        (LONG, rope_of(HFConfig(LONG), HFConfig(SIZES), 1e4)),
    ],
)
def test_frequencies_and_angles(parameters: dict[str, object], spec: RopeSpec) -> None:
    config = LlamaConfig(**SIZES, rope_parameters=parameters)
    theirs = LlamaRotaryEmbedding(config)
    frequencies = rotary_frequencies(spec, 128, context=100)
    assert torch.equal(frequencies[0], theirs.inv_freq)
    assert frequencies[1].unique().tolist() == [torch.tensor(theirs.attention_scaling).item()]
    positions = torch.tensor([0, 1, 77] if spec.scaling == "longrope" else [0, 1, 77, 9000, 131071])
    for dtype in (torch.float32, torch.bfloat16):
        cos, sin = TorchPages().rotation(positions, frequencies, dtype)
        want_cos, want_sin = theirs(torch.zeros(1, dtype=dtype), positions[None])
        assert torch.equal(cos[:, 0], want_cos[0])
        assert torch.equal(sin[:, 0, 64:], want_sin[0, :, 64:]) and torch.equal(-sin[:, 0, :64], want_sin[0, :, :64])


def test_long_factors_are_those_of_a_model_that_serves_more_than_the_original_context() -> None:
    spec = rope_of(HFConfig(LONG), HFConfig(SIZES), 1e4)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**SIZES, rope_parameters=LONG))
    theirs(torch.zeros(1), torch.tensor([[4096]]))
    assert torch.equal(rotary_frequencies(spec, 128, context=4097)[0], theirs.inv_freq)
    assert not torch.equal(rotary_frequencies(spec, 128, context=4096)[0], theirs.inv_freq)


def test_llama3_keeps_fast_waves_and_slows_long_ones() -> None:
    spec = RopeSpec(theta=5e5, scaling="llama3", factor=8.0)
    plain, scaled = inverse_frequencies(RopeSpec(theta=5e5), 128), inverse_frequencies(spec, 128)
    fast, slow = plain > 2 * math.pi * 4 / 8192, plain < 2 * math.pi / 8192
    assert torch.equal(scaled[fast], plain[fast]) and torch.equal(scaled[slow], plain[slow] / 8)
    between = ~fast & ~slow
    assert between.any() and ((scaled < plain) & (scaled > plain / 8))[between].all()
