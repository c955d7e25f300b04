"""The configuration of a model in a GGUF file, as config.json of the same model has it.

Source: conversion/*.py and src/models/*.cpp of llama.cpp. It reads fewer keys than it writes, and sets some values by
the architecture: here they are the same.
"""

from typing import Any

from penstock.declared.sampling import SAMPLING
from penstock.families.gguf.architectures import FAMILIES, FUSED, PARTIAL, PER_LAYER
from penstock.families.gguf.keys import WHERE, GgufKeys, plain
from penstock.families.gguf.names import INTERLEAVED
from penstock.families.gguf.rope import scaling_of
from penstock.families.hf_config import UnsupportedModel
from penstock.families.wrong_models import unknown_gguf
from penstock.gguf import GgufError, GgufFile
from penstock.gguf.vocabulary import end_token_ids


def hf_config(file: GgufFile) -> dict[str, Any]:
    """The config.json of the model. Raises UnsupportedModel, which names the key."""
    keys = GgufKeys(file)
    kind = keys.all.text("general.type", "model")
    family = FAMILIES.get(keys.architecture)
    if kind != "model" or family is None:
        raise UnsupportedModel(f"{WHERE}: {unknown_gguf(kind, keys.architecture, FAMILIES)}")
    config = _common(keys) | family(keys)
    _refuse_unread(keys)
    config["eos_token_id"] = _end_tokens(keys, config["vocab_size"])
    return {name: value for name, value in config.items() if value is not None}


def architectures() -> tuple[str, ...]:
    """The values of general.architecture that are supported."""
    return tuple(FAMILIES)


def rotary_dim(file: GgufFile) -> int:
    """The size of the heads whose rows of q and k are interleaved in this file; 0 if none are."""
    keys = GgufKeys(file)
    return keys.head_dim if keys.architecture in INTERLEAVED else 0


def sampling_defaults(file: GgufFile) -> dict[str, Any]:
    """The recommended sampling parameters, by their names in generation_config.json."""
    others = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
    names = [name for name, parameter in SAMPLING.items() if parameter.recommended]
    found = {name: file.metadata.get(f"general.sampling.{others.get(name, name)}") for name in names}
    return {name: plain(value) for name, value in found.items() if value is not None}


def _refuse_unread(keys: GgufKeys) -> None:
    """Refuse what changes the model's output and is not implemented for its architecture."""
    keys.refuse("attention.causal", "a decoder's attention is causal", True)
    keys.refuse_unread("attention.temperature_scale", "attention does not depend on the position", 0)
    keys.refuse_unread("attn_logit_softcapping", "it belongs to Gemma 2")
    keys.refuse_unread("attention.scale", "the scale follows from the head's size", 0)
    keys.refuse_unread("logit_scale", "logits are not scaled", 0, 1)
    keys.refuse_unread("residual_scale", "the residual is not scaled", 0, 1)
    keys.refuse_unread("embedding_scale", "the architecture decides it", 0, 1)
    keys.refuse_unread("nextn_predict_layers", "there are no draft layers", 0)
    keys.refuse_unread("expert_weights_scale", "the outputs of experts are not scaled", 0, 1)
    keys.refuse_unread("expert_gating_func", "experts are chosen by softmax", 0, 1)
    keys.refuse_unread("expert_group_count", "experts have no groups", 0, 1)


def _common(keys: GgufKeys) -> dict[str, Any]:
    """The settings that all architectures share."""
    embedding = keys.tensors.get("token_embd.weight")
    if embedding is None:
        raise UnsupportedModel("there is no tensor token_embd.weight: a vocabulary only; name a file with weights")
    if keys.has("attn_qkv.weight") and keys.architecture not in FUSED:
        raise UnsupportedModel("blk.0.attn_qkv.weight: q, k and v are one tensor; convert the model without --fuse-qkv")
    centered = keys.all.get(keys.key("attention.layer_norm_epsilon")) is not None
    eps = keys.all.number(keys.key(f"attention.layer_norm_{'' if centered else 'rms_'}epsilon"))
    width = "feed_forward_length"
    return {
        "num_hidden_layers": keys.layers,
        "hidden_size": keys.integer("embedding_length"),
        "intermediate_size": max(keys.each(width, 0)) if keys.architecture in PER_LAYER else keys.integer(width),
        **({} if keys.architecture == "mamba2" else _attention(keys)),
        "max_position_embeddings": keys.integer("context_length"),
        **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"), eps),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in keys.tensors,
        "dtype": _dtype(keys),
        "gguf": True,
    }


def _attention(keys: GgufKeys) -> dict[str, Any]:
    heads, size = keys.integer("attention.head_count"), keys.head_dim
    rotated = keys.integer("rope.dimension_count", size)
    if rotated != size and keys.architecture not in PARTIAL:
        raise keys.all.unsupported(keys.key("rope.dimension_count"), rotated, f"{size}, the size of a head")
    kv_heads = "attention.head_count_kv"
    each = max(keys.each(kv_heads)) if keys.architecture in PER_LAYER else keys.integer(kv_heads, heads)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": each or heads,  # 0 in layers with a state, if all have one
        "head_dim": size,
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": scaling_of(keys),
        # Half an element more, so that the product with the size is not less than the number for rounding.
        "partial_rotary_factor": 1.0 if rotated == size else (rotated + 0.5) / size,
    }


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
