"""Elementwise ops in torch: embedding, norms, rotary positions and the gated activation.

They round where transformers does: norms run in fp32, and families differ in when the weight is multiplied.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# See rms_norm. The first result is Any as it may be rows that a norm has quantised.
RmsNorm = Callable[..., tuple[Any, Tensor]]
LayerNorm = Callable[[Tensor, Tensor | None, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]

SWIGLU_LIMIT = 7.0


def embedding(token_ids: Tensor, weight: Tensor, scale: float, first: int | None = None) -> Tensor:
    """Rows of `weight` [vocab, hidden] for int64 token_ids [tokens], times `scale` rounded to the weight's dtype.

    With `first` the weight has the rows of tokens `first`, `first` + 1, ..., and other tokens give zeros.
    """
    if first is None:
        rows = weight.index_select(0, token_ids)
    else:
        own = token_ids - first
        elsewhere = (own < 0) | (own >= len(weight))
        rows = weight.index_select(0, own.masked_fill_(elsewhere, 0)).masked_fill_(elsewhere[:, None], 0.0)
    return rows if scale == 1.0 else rows.mul_(torch.tensor(scale, dtype=weight.dtype))


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum): both like x, [tokens, hidden]. The sum is (x + residual) * scale; without a residual
    it is x, and the scale must be 1.

    The norm's factor is weight + offset. With an offset (Gemma) it is applied in fp32, else after rounding (Llama).
    """
    if residual is not None:
        x = x + residual if scale == 1.0 else ((x.float() + residual.float()) * scale).to(x.dtype)
    return normed(x, weight, eps, offset), x


def layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(LayerNorm of x + residual, x + residual): both like x, [tokens, hidden]. Without a residual the second is x.
    Computed in fp32, and rounded once."""
    if residual is not None:
        x = x + residual
    return _centered(x, weight, bias, eps), x


def normed_together(qkv: Tensor, heads: int, kv_heads: int, weight: Tensor, eps: float, offset: float) -> Tensor:
    """A fused projection [tokens, heads + 2 kv_heads, head_dim] with all query heads normed together, and all key
    heads. weight [heads + kv_heads, head_dim]."""
    parts = list(qkv.split((heads, kv_heads, kv_heads), 1))
    for i, factors in enumerate(weight.split((heads, kv_heads))):
        parts[i] = normed(parts[i].flatten(1), factors.flatten(), eps, offset).view(parts[i].shape)
    return torch.cat(parts, 1)


def normed_centered(qkv: Tensor, heads: int, kv_heads: int, weight: Tensor, eps: float) -> Tensor:
    """A fused projection [tokens, heads + 2 kv_heads, head_dim] with LayerNorm of each query and key head. weight
    [heads + kv_heads, head_dim]."""
    qk, values = qkv.split((heads + kv_heads, kv_heads), 1)
    return torch.cat((_centered(qk, weight, None, eps), values), 1)


def qk_norm_rope(qk: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float, offset: float) -> Tensor:
    """Query and key heads [tokens, heads, head_dim], normed per head if there is a `weight`, then rotated.

    weight [heads, head_dim], one row per head. cos and sin [tokens, 1, head_dim] have the halves layout, and the first
    half of sin is negated: x * cos + swap_halves(x) * sin is the rotation.
    """
    if weight is not None:
        qk = normed(qk, weight, eps, offset)
    swapped = torch.roll(qk, qk.shape[-1] // 2, -1)
    return (qk * cos).addcmul_(swapped, sin)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [tokens, 2 * width], gate first."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh approximation, of [tokens, 2 * width], gate first."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up of [tokens, 2 * width], gate first."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate).mul_(up)


def swiglu_oai_and_mul(gate_up: Tensor) -> Tensor:
    """gpt-oss' activation of [tokens, 2 * width], gate first: both halves are bounded, and 1 is added to the second."""
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * torch.sigmoid(gate * 1.702) * (up + 1)


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


def capped(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap)."""
    return torch.tanh(x / cap) * cap


def _centered(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last dimension."""
    wide = x.float()
    wide = wide - wide.mean(-1, keepdim=True)
    out = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()
    return (out if bias is None else out + bias.float()).to(x.dtype)


def normed(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """RMSNorm over the last dimension; see rms_norm for the factor."""
    wide = x.float()
    # vector_norm reads x once and allocates nothing of its size; x.pow(2).mean() would write a copy of x.
    length: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    if offset:
        return (wide * scale).mul_(weight.float() + offset).to(x.dtype)
    return (wide * scale).to(x.dtype).mul_(weight)
