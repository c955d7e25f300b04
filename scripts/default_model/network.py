"""Qwen3 in plain torch, fp32, for training on a CPU. The parameters are named as in transformers."""

import re
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RMS_EPS = 1e-6
ROPE_THETA = 10_000.0
Cache = list[Tensor]  # keys and values [batch, kv_heads, length, head_dim]; empty at first


@dataclass(frozen=True)
class Shape:
    """A model's sizes. ``heads`` and ``kv_heads`` are of ``head_dim`` each."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 64
    vocab: int = 8192
    max_positions: int = 2048


SHAPES = {
    "main": Shape(hidden=256, layers=8, intermediate=768, heads=4, kv_heads=2),
}


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, RMS_EPS)


def rope_tables(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each ``[length, head_dim]``, in the half-split layout of transformers."""
    inverse = ROPE_THETA ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to ``x`` of shape ``[batch, heads, length, head_dim]``."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim)
        self.k_norm = RMSNorm(shape.head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self._project(x, cos, sin)
        groups = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        return self._join(F.scaled_dot_product_attention(q, k, v, is_causal=True))

    def extend(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache) -> Tensor:
        """The same for tokens that follow those in the cache, which get into it."""
        q, *new = self._project(x, cos, sin)
        cache[:] = [torch.cat(pair, 2) for pair in zip(cache, new, strict=True)] if cache else new
        causal = x.shape[1] > 1
        return self._join(F.scaled_dot_product_attention(q, *cache, is_causal=causal, enable_gqa=True))

    def _project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, rotated, and values: each ``[batch, heads, length, head_dim]``."""
        split = (*x.shape[:2], -1, self.shape.head_dim)
        q = self.q_norm(self.q_proj(x).view(split)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(split)).transpose(1, 2)
        v = self.v_proj(x).view(split).transpose(1, 2)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def _join(self, heads: Tensor) -> Tensor:
        return self.o_proj(heads.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden)


class Network(nn.Module):
    """A causal language model with tied embeddings; ``state_dict`` is the Hugging Face layout of Qwen3."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Backbone(shape)
        cos, sin = rope_tables(shape.max_positions, shape.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for layer in self.model.layers:
            layer.compile()  # a fifth faster: norms, rotary positions and gates are fused
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if residual else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits ``[batch, length, vocab]`` for token ids ``[batch, length]``."""
        length = ids.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    @torch.no_grad()
    def complete(self, ids: Tensor, count: int) -> Tensor:
        """Append ``count`` greedy tokens to each row of ``[batch, length]``.

        On one thread: a token is too little work to share, and threads that wait for each other are slow where others
        use the processors as well.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        caches: list[Cache] = [[] for _ in self.model.layers]
        new = ids
        for _ in range(count):
            start, end = ids.shape[1] - new.shape[1], ids.shape[1]
            x = self.model.embed_tokens(new)
            for layer, cache in zip(self.model.layers, caches, strict=True):
                attended = layer.self_attn.extend(
                    layer.input_layernorm(x), self.cos[start:end], self.sin[start:end], cache
                )
                x = x + attended
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            new = F.linear(self.model.norm(x[:, -1:]), self.model.embed_tokens.weight).argmax(-1)
            ids = torch.cat((ids, new), 1)
        torch.set_num_threads(threads)
        return ids

    def loss(self, ids: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted mean cross entropy in nats of ``targets``, all ``[batch, length]``."""
        losses = F.cross_entropy(self(ids).flatten(0, 1), targets.flatten(), reduction="none")
        return (losses * weights.flatten()).sum() / weights.sum()


def layer_before_growth(name: str) -> str:
    """Return the name, in the network of half the depth, of the parameter that ``name`` was copied from."""
    return re.sub(r"(?<=layers\.)\d+", lambda index: str(int(index.group()) // 2), name)


def doubled(network: Network) -> Network:
    """Return a network of twice the depth that computes about the same.

    Each layer becomes two of half its output, one after the other. A shallow network learns faster at first, for it
    does more steps in the same time (Du et al., "Stacking Your Transformers", 2024).
    """
    deep = Network(replace(network.shape, layers=2 * network.shape.layers))
    shallow = network.state_dict()
    state = {}
    for name in deep.state_dict():
        halved = name.endswith(("o_proj.weight", "down_proj.weight"))
        state[name] = shallow[layer_before_growth(name)] * (0.5 if halved else 1.0)
    deep.load_state_dict(state)
    return deep
