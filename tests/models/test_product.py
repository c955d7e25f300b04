"""A product gives what the kernels' ops give for its weight, and records one op."""

from collections.abc import Callable
from ctypes import c_int64
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels import Kernels, Needs, Platform, detect_platform, select_kernels
from penstock.models import LayerParameters, Product

TORCH = Platform("cpu", "AVX2")
NATIVE = pytest.param(detect_platform(), marks=pytest.mark.skipif(not detect_platform().isa, reason="none are built"))
IN, OUT, ROWS = 48, 32, 5


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def kernels_of(platform: Platform) -> Kernels:
    return select_kernels(platform, Needs(torch.float32))


@pytest.mark.parametrize("platform", [TORCH, NATIVE])
def test_results_are_those_of_the_weight_that_the_parameters_have(platform: Platform) -> None:
    weight, bias, x, residual = normal(OUT, IN), normal(OUT), normal(ROWS, IN), normal(ROWS, OUT)
    gated, table, ids = normal(2 * OUT, IN), normal(OUT, IN), torch.tensor([3, 0, 3])
    held = {"up.weight": weight, "up.bias": bias, "gate_up.weight": gated, "table.weight": table}
    named = {f"layers.0.{name}": each for name, each in held.items()}
    parameters = LayerParameters(named, "layers.0.", kernels_of(platform))
    up, gate_up, rows = parameters.matrix("up"), parameters.matrix("gate_up", gated=True), parameters.matrix("table")
    assert not parameters.all and up.nbytes >= 4 * OUT * (IN + 1)
    plain, (gate, other) = F.linear(x, weight, bias), F.linear(x, gated).chunk(2, 1)
    by_head = F.linear(x[:, : IN // 2], table[:16, : IN // 2]), F.linear(x[:, IN // 2 :], table[16:, : IN // 2])
    half = Product.pack(parameters.kernels, table[:, : IN // 2].contiguous())
    for got, want in (
        (up(x, residual, scale=0.5), 0.5 * plain + residual),
        (up.activated(x, "relu"), plain.relu()),
        (up.logits(x, scale=2.0, softcap=5.0), 5.0 * torch.tanh(2.0 * plain / 5.0)),
        (gate_up.activated(x, "silu"), F.silu(gate) * other),
        (rows.rows(ids, 3.0, torch.float32), 3.0 * table[ids]),
        (half.by_head(x, 2), torch.cat(by_head, 1)),
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


CALLS: dict[str, Callable[[Product, Tensor], Any]] = {
    "plain": lambda product, x: product(x, scale=0.5),
    "activated": lambda product, x: product.activated(x, "silu"),
    "logits": lambda product, x: product.logits(x),
    "by head": lambda product, x: product.by_head(x, 1),
}


@pytest.mark.skipif(not detect_platform().isa, reason="no native kernels for this machine")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("gated", [False, True])
def test_a_product_is_one_op_of_a_recorded_step(call: str, gated: bool) -> None:
    kernels = kernels_of(detect_platform())
    product, x = Product.pack(kernels, normal(OUT, IN), gated=gated), normal(ROWS, IN)
    assert kernels.session is not None
    with kernels.session.record() as program:
        CALLS[call](product, program.input(x, c_int64(ROWS)))
    assert len(program) == 1
