"""Modules that our kernels compute are recognised by what their forward does, and compute the same afterwards."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.kernels import Kernels, Needs, detect_platform, select_kernels
from penstock.models.module_graphs import MlpParts, activation_name, mlp_of, norm_of
from penstock.models.packed_modules import ModulePacking, their_forwards


class _Rms(nn.Module):
    """With names of its own, and `factor` to compute something else."""

    def __init__(self, factor: float | None = None) -> None:
        super().__init__()
        self.weight, self.small, self.factor = nn.Parameter(torch.rand(48)), 1e-5, factor

    def forward(self, states: Tensor) -> Tensor:
        kind = states.dtype
        wide = states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.small)
        if self.factor is not None:
            wide = wide * self.factor
        return self.weight * wide.to(kind)


class _RoundedLast(_Rms):
    def forward(self, states: Tensor) -> Tensor:
        wide = states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.small)
        return (self.weight * wide).to(states.dtype)


class _Plain(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.rest = nn.Linear(48, 80), nn.Linear(80, 48, bias=False), nn.Dropout(0.5)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.rest(self.two(self.activation(self.one(x))))
        return y


class _Gated(nn.Module):
    def __init__(self, *, bias: bool = False, width: int = 80) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(48, width, bias=bias), nn.Linear(48, width, bias=bias)
        self.down = nn.Linear(width, 48)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class _GatedTwice(_Gated):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.gate(x))
        return y


def test_norms_are_recognised() -> None:
    assert (norm := norm_of(_Rms())) is not None
    assert (norm.eps, norm.bias, norm.centered) == (1e-5, None, False)
    assert (norm := norm_of(nn.LayerNorm(48))) is not None
    assert norm.centered
    for other in (_Rms(2.0), _RoundedLast(), nn.LayerNorm((4, 48)), nn.LayerNorm(48, elementwise_affine=False)):
        assert norm_of(other) is None


def test_mlps_are_recognised() -> None:
    assert mlp_of(_Plain(F.relu)) == MlpParts("", "one", "two", "relu")
    assert mlp_of(_Plain(nn.GELU(approximate="tanh"))) == MlpParts("", "one", "two", "gelu_tanh")
    assert mlp_of(_Gated()) == MlpParts("gate", "up", "down", "silu")
    for other in (_Plain(F.relu6), _Plain(nn.PReLU()), _GatedTwice(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))):
        assert mlp_of(other) is None
    assert mlp_of(_Plain(lambda x: x + x)) is None  # a function of two tensors, which could not be tried with one


def test_activations_are_known_by_their_values() -> None:
    assert activation_name(lambda x: x * torch.sigmoid(x)) == "silu"
    assert activation_name(lambda x: x.clamp(-100, 100).relu()) is None


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return select_kernels(detect_platform("cpu"), Needs(torch.float32, 16, (16,)))


@pytest.mark.parametrize(
    "make",
    [
        _Rms,
        lambda: nn.LayerNorm(48, bias=False),
        lambda: _Plain(nn.GELU()),
        _Gated,
        lambda: _Gated(bias=True),
        lambda: _Gated(width=37),  # no whole block
    ],
    ids=["rms", "layer_norm", "plain", "gated", "biased", "odd"],
)
def test_they_compute_the_same(make: Callable[[], nn.Module], kernels: Kernels) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(make()).eval()
    x = torch.randn(1, 5, 48)
    heads = torch.randn(1, 5, 3, 48).transpose(1, 2)
    with torch.inference_mode():
        expected = [model(each) for each in (x, heads)]
        ModulePacking(model).pack(kernels)
        for each, value in zip((x, heads), expected, strict=True):
            torch.testing.assert_close(model(each), value, atol=1e-5, rtol=1e-4)
        with their_forwards(model):
            assert "forward" not in vars(model[0])
            torch.testing.assert_close(model(x), expected[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(model(x.double()), expected[0].double()) if isinstance(model[0], _Rms) else None
