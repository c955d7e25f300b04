"""Ops: what a model computes, with a torch reference each, and the providers that compute it on a given machine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.attention import WRITE_KV, AttentionBatch, PagedAttention
from penstock.kernels.elementwise import EMBEDDING, GELU_TANH_AND_MUL, QK_NORM_ROPE, RMS_NORM, SILU_AND_MUL
from penstock.kernels.gathered_attention import PAGED_ATTENTION
from penstock.kernels.linear import LINEAR
from penstock.kernels.registry import Op, Platform, Provider, detect_platform

OPS: tuple[Op, ...] = (
    EMBEDDING,
    RMS_NORM,
    LINEAR,
    QK_NORM_ROPE,
    WRITE_KV,
    PAGED_ATTENTION,
    SILU_AND_MUL,
    GELU_TANH_AND_MUL,
)


@dataclass(frozen=True)
class Kernels:
    """The functions a model calls, one per op and named like it. Signatures and meaning: see each op's reference."""

    embedding: Callable[[Tensor, Tensor, float], Tensor]
    rms_norm: Callable[[Tensor, Tensor | None, Tensor, float, float], tuple[Tensor, Tensor]]
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    qk_norm_rope: Callable[[Tensor, Tensor | None, Tensor, Tensor, float, float], Tensor]
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    paged_attention: PagedAttention
    silu_and_mul: Callable[[Tensor], Tensor]
    gelu_tanh_and_mul: Callable[[Tensor], Tensor]
    fingerprint: str  # which provider computes which op: part of what makes two results comparable bit for bit


def select_kernels(platform: Platform, dtype: torch.dtype) -> Kernels:
    """The best provider of every op for weights and activations of `dtype`."""
    chosen = {op.name: op.select(platform, dtype) for op in OPS}
    fingerprint = ",".join(f"{name}={provider.name}" for name, provider in chosen.items())
    functions: dict[str, Any] = {name: provider.make() for name, provider in chosen.items()}
    return Kernels(**functions, fingerprint=fingerprint)


__all__ = [
    "OPS",
    "AttentionBatch",
    "Kernels",
    "Op",
    "PagedAttention",
    "Platform",
    "Provider",
    "detect_platform",
    "select_kernels",
]
