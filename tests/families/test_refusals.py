"""Configurations and files that no family can execute are refused by name; a folder's generation defaults."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.families import (
    UnsupportedModel,
    load_generation_defaults,
    load_spec,
    spec_from_config,
)
from penstock.families.registry import FAMILIES
from tests.families.configurations import LLAMA, LLAMA4, MIXTRAL, QWEN3_MOE


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["BloomForCausalLM"]}, ["'BloomForCausalLM'", *FAMILIES]),
        ({"architectures": None}, ["no architecture is named; supported: ArceeForCausalLM"]),
        ({"architectures": "LlamaForCausalLM"}, ["a list of strings"]),
        ({"vocab_size": None}, ["vocab_size is missing"]),
        ({"hidden_size": "32"}, ["hidden_size is '32'", "an integer"]),
        ({"hidden_size": True}, ["hidden_size is True"]),
        ({"hidden_size": -1}, ["-1"]),
        ({"num_hidden_layers": 10**9}, ["from 1 to 2000"]),
        ({"num_attention_heads": 6}, ["num_attention_heads 6", "hidden_size (32)"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads 3", "divisor of num_attention_heads (4)"]),
        ({"head_dim": 7}, ["head_dim 7", "even"]),
        ({"hidden_act": "relu"}, ["hidden_act 'relu'", "silu", "gelu_pytorch_tanh"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps is 0"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps is nan"]),
        ({"rope_parameters": {"rope_type": "ntk", "factor": 4.0}}, ["'ntk'", "default, linear, dynamic, llama3, yarn"]),
        ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, ["type 'mrope'"]),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            ["short_factor is [1.0]", "a list of 4 numbers"],
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1.0}, ["rope_theta 1.0", "above 1"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling: factor is missing"]),
        ({"rope_scaling": [2.0]}, ["rope_scaling is [2.0]", "an object"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["one per layer type"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
        ({"quantization_config": {"quant_method": "aqlm"}}, ["'aqlm'", "gptq, "]),
        ({"dtype": "float64"}, ["dtype 'float64'", "float16"]),
        ({"attention_bias": 1}, ["attention_bias is 1", "true or false"]),
        ({"eos_token_id": [1, "x"]}, ["eos_token_id", "a token id or a list"]),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]}, ["1 entries", "2 layers"]),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention", "linear_attention"]},
            ["'linear_attention'", "full_attention, sliding_attention"],
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]},
            ["sliding_window None", "a size"],
        ),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]},
            ["layer_types", "mixed"],
        ),
        (LLAMA4 | {"layer_types": ["chunked_attention"]}, ["layer_types", "1 entries", "2 layers"]),
        (
            LLAMA4 | {"layer_types": ["chunked_attention", "sliding_attention"]},
            ["layer_types 'sliding_attention'", "full_attention, chunked_attention"],
        ),
        (LLAMA4 | {"attention_chunk_size": 0}, ["attention_chunk_size is 0", "an integer from 1"]),
        (LLAMA4 | {"floor_scale": 0}, ["floor_scale is 0", "an integer from 1"]),
        ({"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 30.0}, ["final_logit_softcapping 30.0"]),
        ({"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 50.0}, ["attn_logit_softcapping 50.0"]),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, ["causal"]),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, ["text_config"]),
        (MIXTRAL | {"num_experts_per_tok": 5}, ["num_experts_per_tok 5", "at most num_local_experts (4)"]),
        (MIXTRAL | {"num_local_experts": 0}, ["num_local_experts is 0", "an integer from 1"]),
        (QWEN3_MOE | {"mlp_only_layers": [0, -1]}, ["mlp_only_layers is [0, -1]", "a list of integers"]),
        (QWEN3_MOE | {"decoder_sparse_step": 0}, ["decoder_sparse_step is 0"]),
    ],
)
def test_what_cannot_be_executed_is_refused_by_name(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        spec_from_config({**LLAMA, **change})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_refused_configuration_is_fine_without_the_change() -> None:
    assert spec_from_config(LLAMA).family == "llama"


class TestFolder:
    def write(self, folder: Path, config: object, generation: object = None) -> Path:
        (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        return folder

    @pytest.mark.parametrize(
        ("generation", "expected"),
        [(None, (2,)), ({}, (2,)), ({"eos_token_id": None}, (2,)), ({"eos_token_id": [5, 7, 5]}, (5, 7, 2))],
    )
    def test_the_generation_configuration_names_the_end_too(
        self, tmp_path: Path, generation: object, expected: tuple[int, ...]
    ) -> None:
        assert load_spec(self.write(tmp_path, LLAMA, generation)).eos_token_ids == expected

    def test_generation_defaults(self, tmp_path: Path) -> None:
        given = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "min_p": None}
        assert load_generation_defaults(self.write(tmp_path, LLAMA, given)) == {
            "temperature": 0.6,
            "top_p": 0.95,
            "top_k": 20,
        }

    def test_no_generation_defaults(self, tmp_path: Path) -> None:
        assert load_generation_defaults(tmp_path) == {}

    def test_wrong_generation_defaults_name_the_file(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match=r"generation_config\.json: temperature is 'hot'"):
            load_generation_defaults(self.write(tmp_path, LLAMA, {"temperature": "hot"}))

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("{", "not valid JSON"),
            ("[]", "a JSON object is expected"),
            ('{"a": 1, "a": 2}', "'a' appears twice"),
            ('{"a":' + "[" * 40 + "]" * 40 + "}", "deeper than 32"),
            ("[" * 100_000, "deeper than 32"),
            ("{" + " " * (4 << 20) + "}", "more than the 4194304 allowed"),
        ],
    )
    def test_a_broken_file_is_named(self, tmp_path: Path, text: str, words: str) -> None:
        with pytest.raises(UnsupportedModel) as caught:
            load_spec(self.write(tmp_path, text))
        assert words in str(caught.value) and "config.json" in str(caught.value)

    def test_a_folder_without_configuration(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match=r"has no config\.json"):
            load_spec(tmp_path)

    def test_an_unsupported_model_names_its_folder(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match=str(tmp_path)):
            load_spec(self.write(tmp_path, LLAMA | {"architectures": ["X"]}))
