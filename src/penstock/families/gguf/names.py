"""Names of tensors: llama.cpp's in a GGUF file, and Hugging Face's for the same tensor."""

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from penstock.families.spec import ModelSpec, Parameter
from penstock.gguf import GgufFile

_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,5})\.([a-z_]+)\.(weight|bias)")

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# If a tensor holds the matrices of all experts, {} in its name is the expert's number.
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_QWEN_MOE = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BY_ARCHITECTURE: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "llama": _LLAMA | _MIXTRAL,
        "mistral3": _LLAMA,
        "qwen2": _LLAMA,
        "qwen3": _LLAMA,
        "qwen2moe": _LLAMA | _QWEN_MOE,
        "qwen3moe": _LLAMA | _QWEN_MOE,
        "gemma": _LLAMA,
        "gemma2": _LLAMA | _GEMMA,
        "gemma3": _LLAMA | _GEMMA,
        "granite": _LLAMA,
        "olmo2": _LLAMA | _GEMMA,
        "smollm3": _LLAMA,
    }
)

ROPE_FACTORS = "rope_freqs.weight"  # part of the configuration: see rope.py

# Architectures whose q and k llama.cpp's conversion permutes, so that the pairs that rope rotates lie side by side.
INTERLEAVED = frozenset({"llama", "mistral3", "granite", "smollm3"})

SHIFTED = frozenset({"gemma", "gemma2", "gemma3"})  # whose norms are stored with 1 added


def hf_tensor_name(architecture: str, name: str) -> str:
    """Hugging Face's name of a tensor, with {} for an expert's number; the name itself if it is not known."""
    if name in _OUTER:
        return _OUTER[name]
    match = _LAYER.fullmatch(name)
    theirs = _BY_ARCHITECTURE.get(architecture, {}).get(match[2]) if match else None
    return f"model.layers.{match[1]}.{theirs}.{match[3]}" if match and theirs else name


def is_interleaved(architecture: str, name: str) -> bool:
    """Whether a tensor of a GGUF file has its rows in the order of interleaved rope."""
    match = _LAYER.fullmatch(name)
    return architecture in INTERLEAVED and match is not None and match[2] in ("attn_q", "attn_k")


def with_stored_types(spec: ModelSpec, file: GgufFile) -> ModelSpec:
    """The spec, whose sources name the types of those tensors that hold codes."""
    architecture = str(file.metadata.get("general.architecture"))
    types = {hf_tensor_name(architecture, tensor.name): tensor.type for tensor in file.tensors.values()}

    def typed(parameter: Parameter) -> Parameter:
        kinds = [types.get(_EXPERT.sub("{}", source.name)) for source in parameter.sources]
        sources = (
            replace(source, stored=kind.name if kind and kind.quantized else "")
            for source, kind in zip(parameter.sources, kinds, strict=True)
        )
        return replace(parameter, sources=tuple(sources))

    return replace(spec, parameters=tuple(typed(parameter) for parameter in spec.parameters))
