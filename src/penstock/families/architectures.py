"""The supported architectures: the `architectures` entry of config.json, and what makes the spec of such a model."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from penstock.families.decoders.cohere import cohere, cohere2
from penstock.families.decoders.falcon import falcon
from penstock.families.decoders.gemma import gemma, gemma2
from penstock.families.decoders.gemma3 import gemma3
from penstock.families.decoders.gemma4 import gemma4
from penstock.families.decoders.glm import glm, glm4
from penstock.families.decoders.gpt2 import gpt2
from penstock.families.decoders.gpt_neox import gpt_neox
from penstock.families.decoders.hybrids.granite import granite, granite_4, granite_moe
from penstock.families.decoders.hybrids.mamba2 import mamba2
from penstock.families.decoders.hybrids.nemotron_h import nemotron_h
from penstock.families.decoders.hybrids.qwen3_next import qwen3_5, qwen3_5_moe, qwen3_next
from penstock.families.decoders.llama import arcee, ernie4_5, llama
from penstock.families.decoders.mistral import ministral, ministral3, mistral
from penstock.families.decoders.mixtures.deepseek import deepseek_v2, deepseek_v3
from penstock.families.decoders.mixtures.glm4_moe import glm4_moe
from penstock.families.decoders.mixtures.gpt_oss import gpt_oss
from penstock.families.decoders.mixtures.llama4 import llama4
from penstock.families.decoders.mixtures.minimax import minimax_m2
from penstock.families.decoders.mixtures.mixtral import mixtral
from penstock.families.decoders.mixtures.olmoe import olmoe
from penstock.families.decoders.olmo import exaone4, olmo2, olmo3
from penstock.families.decoders.opt import opt
from penstock.families.decoders.phi3 import phi3
from penstock.families.decoders.qwen2 import qwen2, qwen2_moe
from penstock.families.decoders.qwen3 import qwen3, qwen3_moe
from penstock.families.decoders.seed_oss import seed_oss
from penstock.families.decoders.smollm3 import smollm3
from penstock.families.decoders.stablelm import phi, stablelm
from penstock.families.decoders.starcoder2 import starcoder2
from penstock.families.encoders.bert import bert, roberta
from penstock.families.encoders.modernbert import modernbert
from penstock.families.hf_config import HFConfig
from penstock.families.multimodal import (
    gemma3_language,
    gemma4_language,
    llama4_language,
    qwen3_5_language,
    qwen3_5_moe_language,
)
from penstock.families.spec import ModelSpec

Family = Callable[[HFConfig], ModelSpec]


class Architecture(NamedTuple):
    """A row of the table of supported models: what makes the spec of such a model, and what the models are called."""

    family: Family
    models: str
    gguf: tuple[str, ...] = ()  # values of general.architecture


# Decoders with a head, in the order of the table
ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(llama, "Llama 2 and 3, SmolLM 2 and their like", ("llama",)),
    "Llama4ForCausalLM": Architecture(llama4, "Llama 4 (text)", ("llama4",)),
    "Llama4ForConditionalGeneration": Architecture(llama4_language, "Llama 4, its language model"),
    "Qwen2ForCausalLM": Architecture(qwen2, "Qwen 2, 2.5", ("qwen2",)),
    "Qwen2MoeForCausalLM": Architecture(qwen2_moe, "Qwen 1.5 MoE, Qwen 2 MoE", ("qwen2moe",)),
    "Qwen3ForCausalLM": Architecture(qwen3, "Qwen 3", ("qwen3",)),
    "Qwen3MoeForCausalLM": Architecture(qwen3_moe, "Qwen 3 MoE", ("qwen3moe",)),
    "Qwen3NextForCausalLM": Architecture(qwen3_next, "Qwen3-Next", ("qwen3next",)),
    "Qwen3_5ForCausalLM": Architecture(qwen3_5, "Qwen 3.5 (text), dense", ("qwen35",)),
    "Qwen3_5ForConditionalGeneration": Architecture(qwen3_5_language, "Qwen 3.5, its language model, dense"),
    "Qwen3_5MoeForCausalLM": Architecture(qwen3_5_moe, "Qwen 3.5 MoE (text)", ("qwen35moe",)),
    "Qwen3_5MoeForConditionalGeneration": Architecture(qwen3_5_moe_language, "Qwen 3.5 MoE, its language model"),
    "MistralForCausalLM": Architecture(mistral, "Mistral 7B, Nemo, Small", ("llama", "mistral3")),
    "MinistralForCausalLM": Architecture(ministral, "Ministral"),
    "Ministral3ForCausalLM": Architecture(ministral3, "Ministral 3", ("mistral3",)),
    "MixtralForCausalLM": Architecture(mixtral, "Mixtral", ("llama",)),
    "GemmaForCausalLM": Architecture(gemma, "Gemma 1", ("gemma",)),
    "Gemma2ForCausalLM": Architecture(gemma2, "Gemma 2", ("gemma2",)),
    "Gemma3ForCausalLM": Architecture(gemma3, "Gemma 3 (text)", ("gemma3",)),
    "Gemma3ForConditionalGeneration": Architecture(gemma3_language, "Gemma 3, its language model"),
    "Gemma4ForCausalLM": Architecture(gemma4, "Gemma 4 (text): E2B, E4B, 26B-A4B, 31B", ("gemma4",)),
    "Gemma4ForConditionalGeneration": Architecture(gemma4_language, "Gemma 4, its language model"),
    "PhiForCausalLM": Architecture(phi, "Phi 1, 1.5, 2"),
    "Phi3ForCausalLM": Architecture(phi3, "Phi 3, 3.5, 4, 4-mini", ("phi3",)),
    "SmolLM3ForCausalLM": Architecture(smollm3, "SmolLM 3", ("smollm3",)),
    "SeedOssForCausalLM": Architecture(seed_oss, "Seed-OSS", ("seed_oss",)),
    "Olmo2ForCausalLM": Architecture(olmo2, "OLMo 2", ("olmo2",)),
    "Olmo3ForCausalLM": Architecture(olmo3, "OLMo 3", ("olmo2",)),
    "OlmoeForCausalLM": Architecture(olmoe, "OLMoE"),
    "MiniMaxM2ForCausalLM": Architecture(minimax_m2, "MiniMax M2"),
    "Exaone4ForCausalLM": Architecture(exaone4, "EXAONE 4"),
    "ArceeForCausalLM": Architecture(arcee, "Arcee AFM"),
    "Ernie4_5ForCausalLM": Architecture(ernie4_5, "ERNIE 4.5, dense"),
    "StableLmForCausalLM": Architecture(stablelm, "StableLM 3B, Zephyr, 2"),
    "GraniteForCausalLM": Architecture(granite, "Granite 3", ("granite",)),
    "GraniteMoeForCausalLM": Architecture(granite_moe, "Granite 3 MoE", ("granitemoe",)),
    "GraniteMoeSharedForCausalLM": Architecture(granite_moe, "Granite 4 preview, no Mamba layers", ("granitemoe",)),
    "GraniteMoeHybridForCausalLM": Architecture(granite_4, "Granite 4; without Mamba as Granite 3", ("granitehybrid",)),
    "CohereForCausalLM": Architecture(cohere, "Command R, Command R+, Aya 23", ("command-r",)),
    "Cohere2ForCausalLM": Architecture(cohere2, "Command R7B, Command A", ("cohere2",)),
    "GlmForCausalLM": Architecture(glm, "GLM-4 (2024)", ("chatglm",)),
    "Glm4ForCausalLM": Architecture(glm4, "GLM-4 (0414)", ("glm4",)),
    "Glm4MoeForCausalLM": Architecture(glm4_moe, "GLM-4.5, 4.6", ("glm4moe",)),
    "Starcoder2ForCausalLM": Architecture(starcoder2, "StarCoder 2", ("starcoder2",)),
    "GPT2LMHeadModel": Architecture(gpt2, "GPT-2", ("gpt2",)),
    "GPTNeoXForCausalLM": Architecture(gpt_neox, "Pythia, GPT-NeoX", ("gptneox",)),
    "OPTForCausalLM": Architecture(opt, "OPT, except 350m"),
    "FalconForCausalLM": Architecture(falcon, "Falcon 7B, 11B, 40B, 180B", ("falcon",)),
    "GptOssForCausalLM": Architecture(gpt_oss, "gpt-oss 20B, 120B", ("gpt-oss",)),
    "Mamba2ForCausalLM": Architecture(mamba2, "Mamba 2, Codestral Mamba", ("mamba2",)),
    "NemotronHForCausalLM": Architecture(nemotron_h, "Nemotron-H, Nemotron 3", ("nemotron_h", "nemotron_h_moe")),
    "DeepseekV2ForCausalLM": Architecture(deepseek_v2, "DeepSeek V2, V2.5 and V2 Lite", ("deepseek2",)),
    "DeepseekV3ForCausalLM": Architecture(deepseek_v3, "DeepSeek V3 and R1; Moonlight", ("deepseek2",)),
}
_ENCODERS = {
    "Bert": Architecture(bert, "BERT: all-MiniLM, BGE, E5, GTE"),
    "Roberta": Architecture(roberta, "RoBERTa"),
    "XLMRoberta": Architecture(roberta, "XLM-RoBERTa: E5, BGE-M3, BGE rerankers"),
    "ModernBert": Architecture(modernbert, "ModernBERT"),
}
_ENCODER_KINDS = ("Model", "ForMaskedLM", "ForSequenceClassification")
ENCODER_ARCHITECTURES: Mapping[str, Architecture] = {
    f"{name}{kind}": each for name, each in _ENCODERS.items() for kind in _ENCODER_KINDS
}

FAMILIES: Mapping[str, Family] = {name: each.family for name, each in ARCHITECTURES.items()}
ENCODERS: Mapping[str, Family] = {name: each.family for name, each in ENCODER_ARCHITECTURES.items()}
# Decoders without a head: their folders say how they pool.
DECODERS: Mapping[str, Family] = {
    "LlamaModel": llama,
    "MistralModel": mistral,
    "Qwen2Model": qwen2,
    "Qwen3Model": qwen3,
}
