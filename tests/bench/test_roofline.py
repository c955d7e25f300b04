import msgspec
import pytest

from penstock.bench.roofline import MachineRates, least_seconds
from penstock.bench.workload import Case
from penstock.config import EngineConfig
from penstock.families import model_facts, spec_from_config

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


ENGINE = EngineConfig(model="", name="")


def test_the_roofline_of_a_known_model_agrees_with_the_arithmetic_by_hand() -> None:
    """0.44e9 matmul parameters, 1.19 GB a step, 114,688 bytes of KV a token, at 33 GB/s and 1.8 TFLOP/s."""
    facts = model_facts(spec_from_config(QWEN3_06B))
    machine = MachineRates(bandwidth=33e9, flops=1.8e12)
    case = Case(8, 256, 64)
    prefill = 2 * 0.4404e9 * 256 * 8 / 1.8e12
    step = 1.192e9 / 33e9 + 8 * (256 + 31.5) * 114_688 / 33e9
    assert least_seconds(case, facts, ENGINE, machine) == pytest.approx(prefill + 63 * step, rel=0.01)


def test_arithmetic_bounds_a_large_batch() -> None:
    facts = model_facts(spec_from_config(QWEN3_06B))
    wide = MachineRates(bandwidth=1e15, flops=1e12)
    seconds = least_seconds(Case(64, 1, 2), facts, ENGINE, wide)
    assert seconds == pytest.approx(2 * (0.4404e9 + 0.596e9) * 64 / 1e12, rel=0.01)


def test_quantised_weights_and_cache_are_read_as_they_are_stored() -> None:
    """596 M weights: in int8 8.5 bits each. In int4 the layers' 440 M take 4.625, but for the first and the last of 28;
    these and the head take 8.5. A token's cache has a scale per head."""
    facts = model_facts(spec_from_config(QWEN3_06B))
    narrow = MachineRates(bandwidth=1e9, flops=1e15)
    for quantization, weights in (("int8", 0.633e9), ("int4", 0.435e9)):
        engine = msgspec.structs.replace(ENGINE, quantization=quantization, kv_cache_dtype="int8")
        kv = 57_344 + 4 * 28 * 2 * 8
        assert least_seconds(Case(1, 100, 2), facts, engine, narrow) == pytest.approx(
            (weights + 100.5 * kv) / 1e9, rel=0.01
        )
