"""Makes the table of supported models: the names of each architecture, and what it combines with. Only the names are
written here; the rest is computed from a small spec of the family."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from penstock.families.registry import ENCODER_KINDS, ENCODERS, FAMILIES, model_facts, spec_from_config
from penstock.families.shard import tensor_sizes
from penstock.families.spec import ModelSpec

# architecture: (models, architectures of GGUF files)
_NAMES: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "LlamaForCausalLM": ("Llama 2, 3, 3.1 to 3.3; SmolLM 2; and all that have its architecture", ("llama",)),
        "Llama4ForCausalLM": ("Llama 4 (text)", ("llama4",)),
        "Llama4ForConditionalGeneration": ("Llama 4, its language model", ()),
        "Qwen2ForCausalLM": ("Qwen 2, 2.5", ("qwen2",)),
        "Qwen2MoeForCausalLM": ("Qwen 1.5 MoE, Qwen 2 MoE", ("qwen2moe",)),
        "Qwen3ForCausalLM": ("Qwen 3", ("qwen3",)),
        "Qwen3MoeForCausalLM": ("Qwen 3 MoE", ("qwen3moe",)),
        "Qwen3NextForCausalLM": ("Qwen3-Next", ("qwen3next",)),
        "Qwen3_5ForCausalLM": ("Qwen 3.5 (text), dense", ("qwen35",)),
        "Qwen3_5ForConditionalGeneration": ("Qwen 3.5, its language model, dense", ()),
        "Qwen3_5MoeForCausalLM": ("Qwen 3.5 MoE (text)", ("qwen35moe",)),
        "Qwen3_5MoeForConditionalGeneration": ("Qwen 3.5 MoE, its language model", ()),
        "MistralForCausalLM": ("Mistral 7B, Nemo, Small", ("llama", "mistral3")),
        "MinistralForCausalLM": ("Ministral", ()),
        "Ministral3ForCausalLM": ("Ministral 3", ("mistral3",)),
        "MixtralForCausalLM": ("Mixtral", ("llama",)),
        "GemmaForCausalLM": ("Gemma 1", ("gemma",)),
        "Gemma2ForCausalLM": ("Gemma 2", ("gemma2",)),
        "Gemma3ForCausalLM": ("Gemma 3 (text)", ("gemma3",)),
        "Gemma3ForConditionalGeneration": ("Gemma 3, its language model", ()),
        "Gemma4ForCausalLM": ("Gemma 4 (text): E2B, E4B, 26B-A4B, 31B", ("gemma4",)),
        "Gemma4ForConditionalGeneration": ("Gemma 4, its language model: E2B, E4B, 26B-A4B, 31B", ()),
        "Phi3ForCausalLM": ("Phi 3, 3.5, 4, 4-mini", ("phi3",)),
        "SmolLM3ForCausalLM": ("SmolLM 3", ("smollm3",)),
        "Olmo2ForCausalLM": ("OLMo 2", ("olmo2",)),
        "Olmo3ForCausalLM": ("OLMo 3", ("olmo2",)),
        "GraniteForCausalLM": ("Granite 3", ("granite",)),
        "GraniteMoeForCausalLM": ("Granite 3 MoE", ("granitemoe",)),
        "GraniteMoeSharedForCausalLM": ("Granite 4 preview, without Mamba layers", ("granitemoe",)),
        "GraniteMoeHybridForCausalLM": ("Granite 4; without Mamba layers as Granite 3", ("granitehybrid",)),
        "CohereForCausalLM": ("Command R (without norms of heads)", ("command-r",)),
        "Cohere2ForCausalLM": ("Command R7B, Command A", ("cohere2",)),
        "GlmForCausalLM": ("GLM-4 (2024)", ("chatglm",)),
        "Glm4ForCausalLM": ("GLM-4 (0414)", ("glm4",)),
        "Glm4MoeForCausalLM": ("GLM-4.5, 4.6", ("glm4moe",)),
        "Starcoder2ForCausalLM": ("StarCoder 2", ("starcoder2",)),
        "GPT2LMHeadModel": ("GPT-2", ("gpt2",)),
        "GPTNeoXForCausalLM": ("Pythia, GPT-NeoX", ("gptneox",)),
        "OPTForCausalLM": ("OPT, except 350m", ()),
        "FalconForCausalLM": ("Falcon 7B, 11B, 40B, 180B", ("falcon",)),
        "GptOssForCausalLM": ("gpt-oss 20B, 120B", ("gpt-oss",)),
        "Mamba2ForCausalLM": ("Mamba 2, Codestral Mamba", ("mamba2",)),
        "NemotronHForCausalLM": ("Nemotron-H, Nemotron 3", ("nemotron_h", "nemotron_h_moe")),
        "DeepseekV2ForCausalLM": ("DeepSeek V2, V2.5 and V2 Lite", ("deepseek2",)),
        "DeepseekV3ForCausalLM": ("DeepSeek V3 and R1; Moonlight", ("deepseek2",)),
    }
)

# the beginning of an encoder's architecture: models
_ENCODERS: Mapping[str, str] = MappingProxyType(
    {
        "Bert": "BERT: all-MiniLM, BGE, E5, GTE",
        "Roberta": "RoBERTa",
        "XLMRoberta": "XLM-RoBERTa: multilingual E5, BGE-M3 (dense), BGE rerankers",
        "ModernBert": "ModernBERT",
    }
)

_SAMPLE: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "ffn_dim": 64,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_kv_heads": 2,
        "num_heads": 8,  # of Mamba 2
        "hybrid_override_pattern": "M-*E",
        "hidden_size_per_layer_input": 0,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "sliding_window": 16,
        "attention_chunk_size": 16,
        "new_decoder_architecture": True,
    }
)


@dataclass(frozen=True)
class SupportedModel:
    """A row of the table."""

    architecture: str
    models: str
    gives: str
    gguf: tuple[str, ...]  # values of general.architecture
    tensor_ranks: bool
    expert_ranks: bool
    flashinfer: bool  # whether FlashInfer can compute its attention; Triton always can
    states: bool  # whether layers keep states


def supported_models() -> list[SupportedModel]:
    """All rows, in the order of the table."""
    assert _NAMES.keys() == FAMILIES.keys(), "each architecture has its names"
    decoders = [_row(architecture, *names) for architecture, names in _NAMES.items()]
    names = {f"{name}{kind}": models for name, models in _ENCODERS.items() for kind in ENCODER_KINDS}
    assert names.keys() == ENCODERS.keys(), "each encoder has its names"
    return decoders + [_row(architecture, models, ()) for architecture, models in names.items()]


def _row(architecture: str, models: str, gguf: tuple[str, ...]) -> SupportedModel:
    spec = _sample(architecture)
    latents = model_facts(spec).latents
    return SupportedModel(
        architecture,
        models,
        "text" if spec.encoder is None else "scores" if architecture.endswith("Classification") else "embeddings",
        gguf,
        tensor_ranks=spec.encoder is None and 2 in tensor_sizes(spec),
        expert_ranks=any(layer.moe is not None for layer in spec.layers) and not spec.state_layers,
        flashinfer=spec.encoder is None and spec.plain_scores and not (spec.state_layers or latents),
        states=bool(spec.state_layers),
    )


def _sample(architecture: str) -> ModelSpec:
    """A small spec of the family, with its defaults."""
    return spec_from_config({**_SAMPLE, "text_config": dict(_SAMPLE), "architectures": [architecture]})
