"""Rotates queries and keys with our kernel where transformers' attention calls the function that most of its models
share. The function is recognised by what it computes (see module_graphs.py)."""

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.models.module_graphs import same_function

_Rotate = Callable[..., tuple[Tensor, Tensor]]
_Turn = Callable[[Tensor, int, Tensor], Tensor]  # (rows [tokens, heads * size], heads, rotation [tokens, 2, half])


class RotatedHeads:
    """Computes `theirs`: queries and keys [1, heads, tokens, size], rotated by cosines and sines [1, tokens, size]."""

    def __init__(self, theirs: _Rotate, turn: _Turn) -> None:
        self._theirs, self._turn = theirs, turn
        self._of: tuple[Tensor, Tensor] | None = None  # what `_rotation` was made of
        self._rotation: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if self._of is None or self._of[0] is not cos or self._of[1] is not sin:  # once a step: layers share them
            self._of, self._rotation = (cos, sin), _rotation(cos, sin)
        rotation = self._rotation
        if rotation is None or unsqueeze_dim != 1 or q.dim() != 4 or q.dtype != cos.dtype or k.dtype != cos.dtype:
            return self._theirs(q, k, cos, sin, unsqueeze_dim)
        return self._rotated(q, rotation), self._rotated(k, rotation)

    def _rotated(self, x: Tensor, rotation: Tensor) -> Tensor:
        by_token = x.transpose(1, 2).contiguous()
        _, tokens, heads, _ = by_token.shape
        return self._turn(by_token.view(tokens, -1), heads, rotation).view(by_token.shape).transpose(1, 2)


def rotating_forward(module: nn.Module, turn: _Turn, known: dict[Any, _Rotate | None]) -> MethodType | None:
    """Returns the forward of an attention module with our rotation; None if it does not call the usual function.
    `known`: ours for functions that other modules call, None for others."""
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType):
        return None
    for name in forward.__code__.co_names:
        theirs = forward.__globals__.get(name)
        if not isinstance(theirs, FunctionType):
            continue
        if theirs not in known:
            known[theirs] = RotatedHeads(theirs, turn) if same_function(theirs, _rotate) else None
        if (ours := known[theirs]) is not None:
            names = {**forward.__globals__, name: ours}
            copied = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
            copied.__kwdefaults__ = forward.__kwdefaults__
            return MethodType(copied, module)
    return None


def _rotation(cos: Tensor, sin: Tensor) -> Tensor | None:
    """fp32 [tokens, 2, half] of [1, tokens, size]; None if the halves differ."""
    if cos.dim() != 3 or cos.shape[0] != 1 or cos.shape != sin.shape or cos.shape[2] % 2:
        return None
    halves = torch.stack((cos[0], sin[0]), 1).float().unflatten(2, (2, -1))
    first: Tensor = halves[:, :, 0]
    return first.contiguous() if torch.equal(first, halves[:, :, 1]) else None


def _half(x: Tensor) -> Tensor:
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The function that most of transformers' models share. Only its graph is used."""
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    return (q * cos) + (_half(q) * sin), (k * cos) + (_half(k) * sin)
