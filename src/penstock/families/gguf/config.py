"""The configuration of a model in a GGUF file, as config.json of the same model has it.

Source: conversion/*.py and src/models/*.cpp of llama.cpp. It reads fewer keys than it writes, and sets some values by
the architecture: here they are the same.
"""

import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from penstock.families.experts import MAX_EXPERTS
from penstock.families.gguf.names import INTERLEAVED, ROPE_FACTORS
from penstock.families.gguf.rope import llama3_scaling, rope_scaling
from penstock.families.hf_config import HFConfig, UnsupportedModel
from penstock.families.llama_like import MAX_LAYERS
from penstock.families.wrong_models import unknown_gguf
from penstock.gguf import GgufError, GgufFile, read_floats
from penstock.gguf.vocabulary import end_token_ids

WHERE = "metadata"
MAX_HEAD_DIM = 4096


class GgufKeys:
    """The metadata of a file. Keys of the architecture are named without it: `block_count`.

    A value for each layer counts as one value if all are equal. A float32 is read as the decimal number that it was
    written for: 1e-5, not 9.99999975e-06.
    """

    def __init__(self, file: GgufFile) -> None:
        self.all = HFConfig({key: _plain(value) for key, value in file.metadata.items()}, WHERE)
        self.architecture = self.all.text("general.architecture")
        self.metadata = file.metadata
        self.tensors = file.tensors

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def integer(self, name: str, default: int | None = None, *, most: int | None = None) -> int:
        limits = {} if most is None else {"most": most}
        if default is None:
            return self.all.integer(self.key(name), **limits)
        return self.all.integer(self.key(name), default, **limits)

    def number(self, name: str, default: float) -> float:
        return self.all.number(self.key(name), default)

    def get(self, name: str) -> Any:
        return self.all.get(self.key(name))

    def refuse(self, name: str, why: str, *harmless: object) -> None:
        """Raise UnsupportedModel if the key is set to a value that is not among the harmless ones."""
        value = self.get(name)
        if value is not None and value not in harmless:
            raise self.all.unsupported(self.key(name), value, f"none: {why}")


def hf_config(file: GgufFile) -> dict[str, Any]:
    """The config.json of the model. Raises UnsupportedModel, which names the key."""
    keys = GgufKeys(file)
    kind = keys.all.text("general.type", "model")
    family = _FAMILIES.get(keys.architecture)
    if kind != "model" or family is None:
        raise UnsupportedModel(f"{WHERE}: {unknown_gguf(kind, keys.architecture, _FAMILIES)}")
    _refuse_unknown(keys)
    config = _common(keys) | family(keys)
    config["eos_token_id"] = _end_tokens(keys, config["vocab_size"])
    return {name: value for name, value in config.items() if value is not None}


def architectures() -> tuple[str, ...]:
    """The values of general.architecture that are supported."""
    return tuple(_FAMILIES)


def rotary_dim(file: GgufFile) -> int:
    """The size of the heads whose rows of q and k are interleaved in this file; 0 if none are."""
    keys = GgufKeys(file)
    return _head_dim(keys) if keys.architecture in INTERLEAVED else 0


def sampling_defaults(file: GgufFile) -> dict[str, Any]:
    """The recommended sampling parameters, by their names in generation_config.json."""
    names = {
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
    }
    found = {name: file.metadata.get(f"general.sampling.{key}") for key, name in names.items()}
    return {name: _plain(value) for name, value in found.items() if value is not None}


def _refuse_unknown(keys: GgufKeys) -> None:
    """Refuse what changes the model's output and is not implemented."""
    keys.refuse("attention.causal", "a decoder's attention is causal", True)
    keys.refuse("attention.temperature_scale", "attention does not depend on the position", 0)
    if keys.architecture != "gemma2":
        keys.refuse("attn_logit_softcapping", "it belongs to Gemma 2")
    if keys.architecture != "granite":
        keys.refuse("attention.scale", "the scale follows from the head's size", 0)
        keys.refuse("logit_scale", "logits are not scaled", 0, 1)
        keys.refuse("residual_scale", "the residual is not scaled", 0, 1)
        keys.refuse("embedding_scale", "the architecture decides it", 0, 1)
    keys.refuse("nextn_predict_layers", "there are no draft layers", 0)
    keys.refuse("expert_weights_scale", "the outputs of experts are not scaled", 0, 1)
    keys.refuse("expert_gating_func", "experts are chosen by softmax", 0, 1)
    keys.refuse("expert_group_count", "experts have no groups", 0, 1)


def _common(keys: GgufKeys) -> dict[str, Any]:
    """The settings that all architectures share."""
    embedding = keys.tensors.get("token_embd.weight")
    if embedding is None:
        raise UnsupportedModel("there is no tensor token_embd.weight: a vocabulary only; name a file with weights")
    if "blk.0.attn_qkv.weight" in keys.tensors:
        raise UnsupportedModel("blk.0.attn_qkv.weight: q, k and v are one tensor; convert the model without --fuse-qkv")
    heads = keys.integer("attention.head_count")
    return {
        "num_hidden_layers": keys.integer("block_count", most=MAX_LAYERS),
        "hidden_size": keys.integer("embedding_length"),
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": _head_dim(keys),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.all.number(keys.key("attention.layer_norm_rms_epsilon")),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(keys),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in keys.tensors,
        "dtype": _dtype(keys),
    }


def _head_dim(keys: GgufKeys) -> int:
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    size = keys.integer("attention.key_length", max(hidden // heads, 1), most=MAX_HEAD_DIM)
    for name in ("attention.value_length", "rope.dimension_count"):
        other = keys.integer(name, size)
        if other != size:
            raise keys.all.unsupported(keys.key(name), other, f"{size}, the size of a head")
    return size


def _rope_scaling(keys: GgufKeys) -> dict[str, Any] | None:
    tensor = keys.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return rope_scaling(keys.all, keys.architecture)
    if tensor.type.name != "F32" or tensor.shape != (_head_dim(keys) // 2,):
        raise UnsupportedModel(
            f"{ROPE_FACTORS} is {tensor.type.name} {list(tensor.shape)}; expected F32 [{_head_dim(keys) // 2}]"
        )
    factors = [_shortest(factor) for factor in read_floats(tensor)]
    return llama3_scaling(factors, keys.number("rope.freq_base", 10000.0), ROPE_FACTORS)


def _dtype(keys: GgufKeys) -> str:
    """The dtype to compute in: that of the matrices if all have one type that is not quantised, else bfloat16."""
    types = {tensor.type.name for tensor in keys.tensors.values() if len(tensor.shape) > 1}
    return {"F32": "float32", "F16": "float16"}.get(types.pop(), "bfloat16") if len(types) == 1 else "bfloat16"


def _end_tokens(keys: GgufKeys, vocab_size: int) -> list[int]:
    """Tokens that end an answer: those that the metadata names, then those with a known text."""
    names = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    named = [keys.all.integer(name, least=0, most=vocab_size - 1) for name in names if keys.all.get(name) is not None]
    try:
        known = end_token_ids(keys.metadata)
    except GgufError as error:
        raise UnsupportedModel(str(error)) from error
    return list(dict.fromkeys(named + [token_id for token_id in known if token_id < vocab_size]))


def _llama(keys: GgufKeys) -> dict[str, Any]:
    if keys.get("expert_count"):
        width = keys.integer("expert_feed_forward_length", keys.integer("feed_forward_length"))
        return {
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": keys.integer("expert_count", most=MAX_EXPERTS),
            "num_experts_per_tok": keys.integer("expert_used_count"),
            "intermediate_size": width,
            "sliding_window": keys.get("attention.sliding_window"),
        }
    if keys.get("attention.sliding_window"):
        return _mistral(keys)
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": "blk.0.attn_q.bias" in keys.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in keys.tensors,
    }


def _mistral(keys: GgufKeys) -> dict[str, Any]:
    return {"architectures": ["MistralForCausalLM"], "sliding_window": keys.get("attention.sliding_window")}


def _qwen2(keys: GgufKeys) -> dict[str, Any]:
    return {"architectures": ["Qwen2ForCausalLM"]}


def _qwen3(keys: GgufKeys) -> dict[str, Any]:
    return {"architectures": ["Qwen3ForCausalLM"], "attention_bias": "blk.0.attn_q.bias" in keys.tensors}


def _experts(keys: GgufKeys) -> dict[str, Any]:
    used = keys.integer("expert_used_count")
    return {
        "num_experts": keys.integer("expert_count", most=MAX_EXPERTS),
        "num_experts_per_tok": used,
        "moe_intermediate_size": keys.integer(
            "expert_feed_forward_length", max(keys.integer("feed_forward_length") // used, 1)
        ),
    }


def _qwen2_moe(keys: GgufKeys) -> dict[str, Any]:
    return {
        **_experts(keys),
        "architectures": ["Qwen2MoeForCausalLM"],
        "norm_topk_prob": False,
        "qkv_bias": "blk.0.attn_q.bias" in keys.tensors,
        "shared_expert_intermediate_size": keys.integer(
            "expert_shared_feed_forward_length", keys.integer("feed_forward_length")
        ),
    }


def _qwen3_moe(keys: GgufKeys) -> dict[str, Any]:
    return {
        **_experts(keys),
        "architectures": ["Qwen3MoeForCausalLM"],
        "norm_topk_prob": True,
        "attention_bias": "blk.0.attn_q.bias" in keys.tensors,
    }


def _gemma3(keys: GgufKeys) -> dict[str, Any]:
    count, window = keys.integer("block_count", most=MAX_LAYERS), keys.get("attention.sliding_window")
    pattern = keys.get("attention.sliding_window_pattern")
    if not window:
        sliding = [False] * count
    elif isinstance(pattern, list):
        sliding = [bool(slides) for slides in pattern]
    else:
        every = 6 if pattern is None else keys.integer("attention.sliding_window_pattern")
        sliding = [(layer + 1) % every != 0 for layer in range(count)]
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "query_pre_attn_scalar": hidden // heads if count == _LAYERS_OF_27B else _head_dim(keys),
        "sliding_window": window or None,
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in sliding],
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
    }


def _gemma(keys: GgufKeys) -> dict[str, Any]:
    return {"architectures": ["GemmaForCausalLM"]}


def _gemma2(keys: GgufKeys) -> dict[str, Any]:
    count = keys.integer("block_count", most=MAX_LAYERS)
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "query_pre_attn_scalar": hidden // heads if count == _LAYERS_OF_GEMMA2_27B else _head_dim(keys),
        "sliding_window": keys.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _granite(keys: GgufKeys) -> dict[str, Any]:
    return {
        "architectures": ["GraniteForCausalLM"],
        "attention_multiplier": keys.number("attention.scale", _head_dim(keys) ** -0.5),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def _olmo2(keys: GgufKeys) -> dict[str, Any]:
    keys.refuse("attention.sliding_window", "it belongs to OLMo 3", 0)
    return {"architectures": ["Olmo2ForCausalLM"]}


def _smollm3(keys: GgufKeys) -> dict[str, Any]:
    return {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 4}


_LAYERS_OF_GEMMA2_27B = 46
_LAYERS_OF_27B = 62  # the one Gemma 3 whose attention has another scale, which files do not hold

_FAMILIES: Mapping[str, Callable[[GgufKeys], dict[str, Any]]] = MappingProxyType(
    {
        "llama": _llama,
        "mistral3": _mistral,
        "qwen2": _qwen2,
        "qwen3": _qwen3,
        "qwen2moe": _qwen2_moe,
        "qwen3moe": _qwen3_moe,
        "gemma": _gemma,
        "gemma2": _gemma2,
        "gemma3": _gemma3,
        "granite": _granite,
        "olmo2": _olmo2,
        "smollm3": _smollm3,
    }
)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return _shortest(value)
    if isinstance(value, list) and 0 < len(value) <= MAX_LAYERS and all(item == value[0] for item in value):
        return value[0] if type(value[0]) is int else value
    return value


def _shortest(value: float) -> float:
    """The decimal number with the fewest digits that rounds to this float32; any other value as it is."""
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        return value
    if struct.unpack("<f", packed)[0] != value:
        return value
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == packed:
            return short
    return value
