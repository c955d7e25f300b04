"""Makes the table of supported models: the names of each architecture, and what it combines with. Only the names are
written here. The rest is what the checks of settings and of splits say of a small model of the family."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from penstock.config.checks.model import check_model
from penstock.config.checks.speculation import cannot_speculate
from penstock.config.facts import ModelFacts
from penstock.config.sources import ConfigError
from penstock.config.split import Split
from penstock.families.registry import ENCODER_KINDS, ENCODERS, FAMILIES, model_facts, spec_from_config
from penstock.families.shard import CannotSplit, check_split
from penstock.families.spec import ModelSpec

# architecture: (models, architectures of GGUF files)
_NAMES: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "LlamaForCausalLM": ("Llama 2 and 3, SmolLM 2 and their like", ("llama",)),
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
        "Gemma4ForConditionalGeneration": ("Gemma 4, its language model", ()),
        "PhiForCausalLM": ("Phi 1, 1.5, 2", ()),
        "Phi3ForCausalLM": ("Phi 3, 3.5, 4, 4-mini", ("phi3",)),
        "SmolLM3ForCausalLM": ("SmolLM 3", ("smollm3",)),
        "SeedOssForCausalLM": ("Seed-OSS", ("seed_oss",)),
        "Olmo2ForCausalLM": ("OLMo 2", ("olmo2",)),
        "Olmo3ForCausalLM": ("OLMo 3", ("olmo2",)),
        "OlmoeForCausalLM": ("OLMoE", ()),
        "MiniMaxM2ForCausalLM": ("MiniMax M2", ()),
        "Exaone4ForCausalLM": ("EXAONE 4", ()),
        "ArceeForCausalLM": ("Arcee AFM", ()),
        "Ernie4_5ForCausalLM": ("ERNIE 4.5, dense", ()),
        "StableLmForCausalLM": ("StableLM 3B, Zephyr, 2", ()),
        "GraniteForCausalLM": ("Granite 3", ("granite",)),
        "GraniteMoeForCausalLM": ("Granite 3 MoE", ("granitemoe",)),
        "GraniteMoeSharedForCausalLM": ("Granite 4 preview, no Mamba layers", ("granitemoe",)),
        "GraniteMoeHybridForCausalLM": ("Granite 4; without Mamba as Granite 3", ("granitehybrid",)),
        "CohereForCausalLM": ("Command R, Command R+, Aya 23", ("command-r",)),
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
        "XLMRoberta": "XLM-RoBERTa: E5, BGE-M3, BGE rerankers",
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
        "layers_block_type": ["mamba", "attention"] * 2,
        "hidden_size_per_layer_input": 0,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "sliding_window": 16,
        "attention_chunk_size": 16,
        "new_decoder_architecture": True,
    }
)


_SPLITS = {"tensor": Split(tensor=2), "pipeline": Split(pipeline=2), "expert": Split(tensor=2, expert=True)}
_SETTINGS: Mapping[str, Any] = MappingProxyType(
    {
        "device": "cpu",
        "quantization": "none",
        "kv_cache_dtype": "auto",
        "enable_prefix_caching": False,
        "distributed_executor": "auto",
        "max_model_len": 64,
        "max_num_batched_tokens": 64,
    }
)


@dataclass(frozen=True)
class SupportedModel:
    """A row of the table."""

    architecture: str
    models: str
    gives: str
    gguf: tuple[str, ...]  # values of general.architecture
    ranks: tuple[str, ...]  # what can divide it: "tensor", "pipeline", "expert"
    quantization: tuple[str, ...]  # values of --quantization
    quantized_kv: bool  # whether --kv-cache-dtype int8 is possible
    prefix_cache: bool
    speculation: bool
    gpu: bool
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
    facts, text = model_facts(spec), spec.encoder is None
    gpu = _accepted(facts, device="cuda")
    return SupportedModel(
        architecture,
        models,
        "text" if text else "scores" if architecture.endswith("Classification") else "embeddings",
        gguf,
        ranks=tuple(name for name, split in _SPLITS.items() if _divided(spec, split)),
        quantization=tuple(kind for kind in ("int8", "int4") if _accepted(facts, quantization=kind)),
        quantized_kv=any(group.page.width for group in facts.groups) and _accepted(facts, kv_cache_dtype="int8"),
        prefix_cache=text and _accepted(facts, enable_prefix_caching=True),
        speculation=text and cannot_speculate(facts) is None,
        gpu=gpu,
        states=bool(spec.state_layers),
    )


def _accepted(facts: ModelFacts, **changes: Any) -> bool:
    """Whether a model is served with these settings."""
    values = {**_SETTINGS, **changes}
    try:
        check_model(values, dict.fromkeys(values, ""), facts, values["device"])
    except ConfigError:
        return False
    return True


def _divided(spec: ModelSpec, split: Split) -> bool:
    try:
        check_split(spec, split)
    except CannotSplit:
        return False
    return True


def _sample(architecture: str) -> ModelSpec:
    """A small spec of the family, with its defaults."""
    return spec_from_config({**_SAMPLE, "text_config": dict(_SAMPLE), "architectures": [architecture]})
