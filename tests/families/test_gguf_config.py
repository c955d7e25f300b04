"""The spec of a GGUF file against that of the checkpoint it was made of, and what a file's metadata may not say."""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter, get_tensor_name_map
from gguf.constants import MODEL_ARCH

from penstock.families import RopeSpec, UnsupportedModel, load_generation_defaults, load_spec, spec_from_config
from penstock.families.gguf.names import hf_tensor_name, is_interleaved
from penstock.families.gguf.rope import llama3_scaling
from penstock.families.spec import Parameter
from penstock.weights.checkpoint import check_tensors, stored_tensors
from tests.checkpoints import END, END_TURN
from tests.gguf_models import REFORMED, REORDERED, REPRESENTABLE, Written, llama3_factors, writer


@pytest.fixture
def written(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Written:
    return writer(tiny_checkpoint, tmp_path)


def without_order(parameters: tuple[Parameter, ...]) -> list[Parameter]:
    """Parameters whose sources have their rows in the order of the tensors."""
    return [replace(p, sources=tuple(replace(each, order=()) for each in p.sources)) for p in parameters]


@pytest.mark.parametrize("variant", [*REPRESENTABLE, *(each for each in REFORMED if each != "phi3_long"), *REORDERED])
def test_the_spec_is_that_of_the_checkpoint(
    written: Written, tiny_checkpoint: Callable[..., Path], variant: str
) -> None:
    config = json.loads((tiny_checkpoint(variant) / "config.json").read_text())
    if "query_pre_attn_scalar" in config:  # a file does not have it: it follows from the size of a head
        config["query_pre_attn_scalar"] = config["head_dim"]
    expected = spec_from_config({**config, "gguf": True})
    path = written(variant)
    spec = load_spec(path)
    assert spec.eos_token_ids == (END, END_TURN)  # the second one by its text
    family = "llama" if variant == "mistral" else expected.family  # a file does not say which of the two it is
    assert without_order(spec.parameters) == without_order(expected.parameters)  # a file may have another one
    ours = {"parameters": spec.parameters, "scheme": spec.scheme}
    assert spec == replace(expected, eos_token_ids=spec.eos_token_ids, family=family, **ours)
    check_tensors(spec, stored_tensors(path, spec))


@pytest.mark.parametrize(
    ("arch", "ours", "family"),
    [
        (MODEL_ARCH.LLAMA, "llama", "llama_bias"),
        (MODEL_ARCH.LLAMA, "llama", "mixtral"),
        (MODEL_ARCH.MISTRAL3, "mistral3", "ministral3"),
        (MODEL_ARCH.QWEN2, "qwen2", "qwen2"),
        (MODEL_ARCH.QWEN3, "qwen3", "qwen3_bias"),
        (MODEL_ARCH.QWEN2MOE, "qwen2moe", "qwen2_moe_plain"),
        (MODEL_ARCH.QWEN3MOE, "qwen3moe", "qwen3_moe"),
        (MODEL_ARCH.GEMMA3, "gemma3", "gemma3_linear"),
        (MODEL_ARCH.GEMMA, "gemma", "gemma"),
        (MODEL_ARCH.GEMMA2, "gemma2", "gemma2"),
        (MODEL_ARCH.GRANITE, "granite", "granite"),
        (MODEL_ARCH.OLMO2, "olmo2", "olmo2"),
        (MODEL_ARCH.SMOLLM3, "smollm3", "smollm3"),
        (MODEL_ARCH.SEED_OSS, "seed_oss", "seed_oss"),
        (MODEL_ARCH.PHI3, "phi3", "phi3"),
        (MODEL_ARCH.COMMAND_R, "command-r", "cohere"),
        (MODEL_ARCH.COHERE2, "cohere2", "cohere2"),
        (MODEL_ARCH.CHATGLM, "chatglm", "glm"),
        (MODEL_ARCH.GLM4, "glm4", "glm4"),
        (MODEL_ARCH.STARCODER2, "starcoder2", "starcoder2"),
        (MODEL_ARCH.GPT2, "gpt2", "gpt2"),
        (MODEL_ARCH.GPTNEOX, "gptneox", "gpt_neox"),
    ],
)
def test_names_are_those_of_the_gguf_package(
    arch: MODEL_ARCH, ours: str, family: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    """Every tensor of the checkpoint that is not an expert's, through the map that llama.cpp's conversion uses."""
    names = get_tensor_name_map(arch, 8)
    sources = {s.name for p in load_spec(tiny_checkpoint(family)).parameters for s in p.sources}
    plain = [name for name in sources if ".experts." not in name]
    assert len(plain) > 10
    for name in plain:
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None and hf_tensor_name(ours, theirs) == name


def test_rows_are_interleaved_in_q_and_k_of_llama_alone() -> None:
    assert is_interleaved("llama", "blk.3.attn_q.weight") and is_interleaved("llama", "blk.0.attn_k.bias")
    assert not any(is_interleaved("llama", f"blk.3.{other}.weight") for other in ("attn_v", "attn_q_norm", "ffn_up"))
    assert not any(is_interleaved(other, "blk.3.attn_q.weight") for other in ("qwen2", "qwen3", "gemma3", "qwen3moe"))


@pytest.mark.parametrize("name", ["blk.01.attn_q.weight", "blk.1.attn_q.scale", "blk.x.attn_q.weight", "a.weight"])
def test_an_unknown_name_stays(name: str) -> None:
    assert hf_tensor_name("llama", name) == name


@pytest.mark.parametrize(
    ("factor", "positions", "theta", "head_dim"),
    [(8.0, 8192, 5e5, 128), (32.0, 8192, 5e5, 64), (16.0, 8192, 5e5, 128), (8.0, 64, 5e5, 16), (4.0, 4096, 1e6, 96)],
)
def test_llama3s_scaling_is_recovered_from_its_factors(
    factor: float, positions: int, theta: float, head_dim: int
) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": positions,
    }
    found = llama3_scaling(llama3_factors(rope, head_dim).tolist(), theta, "here")
    assert found == {name: value for name, value in rope.items() if name != "rope_theta"}


def test_factors_of_another_form_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="rope_freqs: the factors of rope, 1 to 8, are not those"):
        llama3_scaling([1.0, 1.5, 2.0, 8.0], 5e5, "rope_freqs")
    assert llama3_scaling([1.0, 1.0], 5e5, "rope_freqs") is None


@pytest.mark.parametrize(
    ("variant", "changes", "words"),
    [
        ("llama2", {"general.type": "adapter"}, ["general.type is 'adapter'", "a LoRA adapter"]),
        ("llama2", {"llama.block_count": None}, ["llama.block_count is missing"]),
        ("llama2", {"llama.block_count": 1 << 30}, ["llama.block_count is 1073741824", "1 to 2000"]),
        ("llama2", {"llama.embedding_length": "wide"}, ["llama.embedding_length is 'wide'", "an integer"]),
        ("llama2", {"llama.rope.dimension_count": 8}, ["llama.rope.dimension_count 8", "16, the size of a head"]),
        ("llama2", {"llama.attention.value_length": 8}, ["llama.attention.value_length 8"]),
        ("llama2", {"llama.attention.head_count": [4, 4, 2]}, ["llama.attention.head_count is [4, 4, 2]"]),
        ("llama2", {"llama.attention.causal": False}, ["llama.attention.causal False", "causal"]),
        ("llama2", {"llama.attention.layer_norm_rms_epsilon": float("nan")}, ["layer_norm_rms_epsilon is nan"]),
        ("llama2", {"llama.rope.scaling.type": "longrope"}, ["short_factor is None", "a list of 8 numbers"]),
        (
            "llama2",
            {"llama.rope.scaling.type": "mrope", "llama.rope.scaling.factor": 4.0},
            ["rope_type 'mrope'", "supported: default, linear, dynamic, llama3"],
        ),
        ("llama2", {"tokenizer.ggml.eos_token_id": 5000}, ["tokenizer.ggml.eos_token_id is 5000", "0 to 306"]),
        ("llama2", {"llama.nextn_predict_layers": 1}, ["llama.nextn_predict_layers 1"]),
        ("mixtral", {"llama.expert_gating_func": 2}, ["llama.expert_gating_func 2", "softmax"]),
        ("mixtral", {"llama.expert_used_count": 9}, ["num_experts_per_tok 9"]),
        ("gemma3", {"gemma3.final_logit_softcapping": 30.0}, ["final_logit_softcapping"]),
        (
            "gemma3",
            {"gemma3.attention.sliding_window_pattern": [True, False]},
            ["with 2 entries", "each of 6 layers"],
        ),
        ("llama2", {"llama.attention.temperature_scale": 0.1}, ["llama.attention.temperature_scale 0.1"]),
        (
            "ministral3",
            {"mistral3.rope.scaling.original_context_length": None},
            ["original_max_position_embeddings is missing"],
        ),
        ("qwen2", {"qwen2.attention.head_count_kv": 3}, ["num_key_value_heads 3"]),
        ("gemma4", {"gemma4.attention.value_length_swa": 32}, ["attention.value_length_swa 32", "48"]),
        ("gemma4", {"gemma4.attention.head_count_kv": [2, 1]}, ["gemma4.attention.head_count_kv is [2, 1]"]),
        ("gemma4", {"gemma4.attention.shared_kv_layers": 6}, ["num_kv_shared_layers 6"]),
        ("qwen3_5", {"qwen35.ssm.inner_size": 145}, ["qwen35.ssm.inner_size 145", "ssm.time_step_rank (6)"]),
    ],
)
def test_what_is_not_supported_names_the_key(
    written: Written, variant: str, changes: dict[str, Any], words: list[str]
) -> None:
    path = written(variant, changes=changes)
    with pytest.raises(UnsupportedModel) as caught:
        load_spec(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and "\n" not in text
    assert all(word in text for word in words), text


@pytest.mark.parametrize(("variant", "arch"), [("qwen3_5", "qwen35"), ("qwen3_5_moe", "qwen35moe")])
def test_a_layer_that_predicts_a_token_further_on_is_left_out(written: Written, variant: str, arch: str) -> None:
    plain = load_spec(written(variant))
    last = len(plain.layers) - 1

    def predict(tensors: dict[str, Any]) -> None:
        ours = {name: tensor for name, tensor in tensors.items() if name.startswith(f"blk.{last}.")}
        tensors |= {name.replace(f"blk.{last}", f"blk.{last + 1}"): tensor for name, tensor in ours.items()}
        norm = tensors["output_norm.weight"]
        tensors |= {f"blk.{last + 1}.nextn.{name}.weight": norm for name in ("enorm", "hnorm", "shared_head_norm")}
        tensors[f"blk.{last + 1}.nextn.eh_proj.weight"] = np.zeros((64, 128), np.float32)

    changes = {f"{arch}.block_count": last + 2, f"{arch}.nextn_predict_layers": 1}
    path = written(variant, edit=predict, changes=changes)
    check_tensors(load_spec(path), stored_tensors(path))
    assert load_spec(path) == plain


def test_mistral3_without_a_temperature_is_mistral(written: Written) -> None:
    spec = load_spec(written("ministral3", changes={"mistral3.attention.temperature_scale": None}))
    with_temperature = load_spec(written("ministral3"))
    assert (spec.family, with_temperature.family) == ("mistral", "ministral3")
    (rope, _), (tempered, _) = (each.layers[0].attention.rotary or (None, 0) for each in (spec, with_temperature))
    assert rope is not None and tempered is not None and tempered.temperature is not None
    assert rope == replace(tempered, temperature=None)


def test_gemma4s_rope_turns_the_first_pairs_alone(written: Written) -> None:
    def mixed(tensors: dict[str, Any]) -> None:
        tensors["rope_freqs.weight"][-1] = 1.0

    assert load_spec(written("gemma4")).layers[-1].attention.rotary == (
        RopeSpec(theta=1e6, scaling="proportional", turning=8),
        64,
    )
    with pytest.raises(UnsupportedModel, match=r"rope_freqs.weight: the factors of rope, 1 to 1e\+30, are not those"):
        load_spec(written("gemma4", edit=mixed))


def test_q_k_and_v_in_one_tensor_are_refused(written: Written) -> None:
    def fuse(tensors: dict[str, Any]) -> None:
        parts = [tensors.pop(f"blk.0.attn_{part}.weight") for part in "qkv"]
        tensors["blk.0.attn_qkv.weight"] = np.concatenate(parts)

    with pytest.raises(UnsupportedModel, match="q, k and v are one tensor; convert the model without --fuse-qkv"):
        load_spec(written("llama2", edit=fuse))


def test_latents_whose_keys_and_values_are_one_tensor_are_refused(written: Written) -> None:
    def join(tensors: dict[str, Any]) -> None:
        keys, values = (tensors.pop(f"blk.0.attn_{part}_b.weight") for part in "kv")
        tensors["blk.0.attn_kv_b.weight"] = np.concatenate([keys.swapaxes(1, 2), values], 1).reshape(-1, keys.shape[1])

    with pytest.raises(UnsupportedModel, match=r"blk.0.attn_kv_b.weight: .* convert the model again"):
        load_spec(written("deepseek_v3", edit=join))


def test_an_unknown_architecture_is_named_with_those_that_are_known(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"general.architecture is 'mamba'.*llama.*qwen3moe.*gemma3"):
        load_spec(tmp_path / "m.gguf")


def test_a_vocabulary_is_not_a_model(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_block_count(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"no tensor token_embd.weight"):
        load_spec(tmp_path / "m.gguf")


def test_equal_values_for_each_layer_are_one(written: Written, tiny_checkpoint: Callable[..., Path]) -> None:
    path = written("llama2", changes={"llama.attention.head_count": [4, 4, 4], "llama.feed_forward_length": [112] * 3})
    assert load_spec(path).layers == load_spec(tiny_checkpoint("llama2")).layers


def test_old_files_name_linear_scaling_otherwise(written: Written) -> None:
    path = written("llama2", changes={"llama.rope.scale_linear": 4.0})
    assert load_spec(path).layers[0].attention.rotary == (RopeSpec(scaling="linear", factor=4.0), 16)


def test_all_named_end_tokens_count(written: Written) -> None:
    changes = {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 8}
    assert load_spec(written("llama2", changes=changes)).eos_token_ids == (7, 9, 8, END, END_TURN)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")]
)
def test_the_dtype_follows_from_the_matrices(written: Written, kind: str, dtype: str) -> None:
    assert load_spec(written("qwen2", kind=kind)).checkpoint_dtype == dtype


def test_recommended_sampling_is_read(written: Written) -> None:
    changes = {"general.sampling.temp": 0.7, "general.sampling.top_k": 20, "general.sampling.min_p": 0.05}
    assert load_generation_defaults(written("qwen2", changes=changes)) == {
        "temperature": 0.7,
        "top_k": 20,
        "min_p": 0.05,
    }
    assert struct.unpack("<f", struct.pack("<f", 0.7))[0] != 0.7  # as the file has it
    assert load_generation_defaults(written("llama2")) == {}


def test_a_27b_of_gemma_has_another_scale(written: Written) -> None:
    """llama.cpp recognises it by its 62 layers: the file does not say it."""
    path = written("gemma3", changes={"gemma3.block_count": 62})
    assert load_spec(path).layers[0].attention.scale == (72 // 4) ** -0.5  # type: ignore[attr-defined]
    assert load_spec(written("gemma3")).layers[0].attention.scale == 48**-0.5  # type: ignore[attr-defined]
