"""Kernels for --deterministic: a row has the same bits alone, in a batch and, of attention, in a chunk of a prompt."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.config.weights import GGUF_FORMATS
from penstock.kernels import Needs, select_kernels
from penstock.kernels.linear import DenseWeight
from penstock.kernels.routing import Routing
from penstock.kernels.triton.attention import TritonAttention
from penstock.kernels.triton.experts import TritonExperts
from penstock.kernels.triton.linear import TritonLinear
from penstock.kernels.triton.tiles import tile_product
from penstock.kernels.triton.weights import Weight
from penstock.messages import Window
from tests.kernels.device_weights import pack
from tests.kernels.op_cases import EXPERTS, GATED_LINEAR, LINEAR, LOGITS, PAGED_ATTENTION, OpCase
from tests.kernels.triton.device import there
from tests.kernels.triton.test_attention import WHOLE, make
from tests.kernels.triton.test_coded import random_codes
from tests.kernels.triton.test_ops import GPU, tensors

ROWS = 70  # more than a tile


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def equal(left: Tensor, right: Tensor) -> bool:
    """Bit for bit."""
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@pytest.mark.parametrize("op", [LINEAR, GATED_LINEAR, LOGITS, EXPERTS, PAGED_ATTENTION], ids=lambda op: op.name)
def test_they_are_chosen_and_agree_with_the_reference(op: OpCase) -> None:
    needs = Needs(torch.bfloat16, deterministic=True)
    provider = op.select(GPU, needs)
    assert provider.name == "triton_fixed" and "linear=triton_fixed" in select_kernels(GPU, needs).fingerprint
    for arguments in op.inputs(torch.bfloat16, 1):
        if len(arguments[0]) <= 5:
            expected = tensors(op.run(op.reference.make(), arguments))
            for got, want in zip(tensors(op.run(provider.make(), there(arguments))), expected, strict=True):
                largest = want.abs().max().item() if want.numel() else 0.0
                atol = op.tolerance[torch.bfloat16] * max(largest, 1.0)
                torch.testing.assert_close(got.cpu(), want, rtol=0.0, atol=atol)


def weight_of(scheme: Any, n: int, k: int) -> Weight:
    weight = there(normal(n, k, seed=1).bfloat16())
    if scheme in GGUF_FORMATS:
        return random_codes(GGUF_FORMATS[scheme], n, k)
    return DenseWeight(weight, None) if scheme == "dense" else pack(weight, scheme)


@pytest.mark.parametrize("scheme", ["dense", "fp8", "int4", "Q6_K"])
def test_a_row_of_a_product(scheme: str) -> None:
    n, k = 130, 1100
    weight, x = weight_of(scheme, n, k), there(normal(ROWS, k).bfloat16())
    assert (
        tile_product(1, n, k, fixed=True).parts == tile_product(ROWS, n, k, fixed=True).parts == 2
    )  # and k is divided
    linear = TritonLinear(fixed=True)
    together = linear.logits(x, weight)
    for row in (0, 1, 69):
        assert equal(linear.logits(x[row : row + 1], weight)[0], together[row])
    assert equal(linear.logits(x[30:50], weight), together[30:50])


@pytest.mark.parametrize("scheme", ["dense", "int8"])
def test_a_token_of_a_mixture(scheme: str) -> None:
    count, hidden, width, slots = 5, 40, 24, 2
    x = there(normal(ROWS, hidden).bfloat16())
    gate_up, down = weight_of(scheme, count * 2 * width, hidden), weight_of(scheme, count * hidden, width)
    experts = TritonExperts(fixed=True)
    stacks = experts.pack(gate_up, count, gated=True), experts.pack(down, count)
    routing = experts.route(there(normal(ROWS, count, seed=2)), slots, normalize=True)
    together = experts(x, routing, *stacks, "silu")
    for some in (slice(0, 1), slice(33, 34), slice(20, 41)):
        part = Routing(routing.experts[some], routing.weights[some])
        assert equal(experts(x[some], part, *stacks, "silu"), together[some])


@pytest.mark.parametrize("window", [WHOLE, Window(37)])
def test_a_query_of_attention(window: Window) -> None:
    """Of a sequence's last 40 tokens as one chunk, beside others; and each as a step of its own would have it."""
    lens = [(40, 150), (1, 9), (3, 200)]
    query, keys, values, batch = make(lens, 4, 2, 32, window)
    # What lies beyond the context is masked, but must be numbers where a table points to it.
    q, k, v = there((query, keys.nan_to_num(), values.nan_to_num()))
    attention = TritonAttention(fixed=True)
    together = attention(q, k, v, attention.prepare(batch, k), 0.3)
    for nth in (0, 17, 39):
        seen = 150 - 40 + nth + 1
        alone = type(batch)(16, window, np.array([0, 1]), np.array([seen]), batch.block_tables[:1].copy())
        got = attention(q[nth : nth + 1], k, v, attention.prepare(alone, k), 0.3)
        assert equal(got[0], together[nth])
    if window == WHOLE:  # the usual kernels cut a context up where it is decoding
        usual = TritonAttention()(q[39:40], k, v, attention.prepare(alone, k), 0.3)
        assert not equal(usual, got)
        torch.testing.assert_close(usual, got)
    both = type(batch)(16, window, np.array([0, 1, 2]), np.array([150, 9]), batch.block_tables[:2].copy())
    got = attention(q[39:41], k, v, attention.prepare(both, k), 0.3)
    assert equal(got, together[39:41])
