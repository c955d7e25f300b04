"""Tiny random checkpoints of architectures that only transformers' code executes."""

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.checkpoints import SIZES, randomise, write_tokenizer

_NO_GROUPS = {"num_key_value_heads": None}  # a key for every query

# The class's prefix in transformers, and what differs from SIZES.
OTHERS: dict[str, dict[str, Any]] = {
    "Apertus": {},
    "BitNet": {},
    "CodeGen": {
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 512,
        "n_ctx": 512,
        "rotary_dim": 8,
        **_NO_GROUPS,
    },
    "Dots1": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "FlexOlmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "GPTJ": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "rotary_dim": 8, **_NO_GROUPS},
    "GPTBigCode": {
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 512,
        "n_inner": 112,
        **_NO_GROUPS,
    },
    "Helium": {"head_dim": 16},
    "HunYuanDenseV1": {"head_dim": 16},
    "HunYuanMoEV1": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "Jais2": {},
    "NanoChat": {},
    "Nemotron": {},
    "Olmo": {},
    "Persimmon": {"num_key_value_heads": 4},
    "Phimoe": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "VaultGemma": {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16},
}


WITH_OFFSET = ("Nemotron", "VaultGemma")  # their norms store weight - 1


def other_model(prefix: str, *, seed: int = 0) -> Any:
    """The transformers model with random fp32 weights, in eval mode."""
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **OTHERS[prefix]})
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    randomise(model, seed, norm_mean=0.0 if prefix in WITH_OFFSET else 1.0)
    return model


def write_other(prefix: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    other_model(prefix).to(dtype).save_pretrained(folder)
    write_tokenizer(folder)
    return folder
