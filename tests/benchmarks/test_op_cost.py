"""What an op must read and multiply, against the arithmetic by hand."""

from collections.abc import Callable
from ctypes import c_int64

import numpy as np
import pytest
import torch
from op_timing.cost import OpCost, op_cost

from penstock.bench.roofline import MachineRates
from penstock.config.weights import BF16 as BF16_FORMAT
from penstock.config.weights import INT8, INT16, WeightFormat, held_as, int4_format
from penstock.kernels import AttentionBatch
from penstock.kernels.native.attention import NativeAttention
from penstock.kernels.native.linear import NativeLinear
from penstock.kernels.native.moe import NativeExperts
from penstock.kernels.native.norm import NativeNorm
from penstock.kernels.native.pack import pack
from penstock.kernels.native.session import Program, native_session
from penstock.messages import Window

BF16 = torch.bfloat16


def recorded(call: Callable[[Callable[[torch.Tensor], torch.Tensor]], object]) -> OpCost:
    """The work of the last op that `call` records; it is given what declares an input."""
    with native_session().record() as program:

        def declare(tensor: torch.Tensor) -> torch.Tensor:
            return program.input(tensor, c_int64(len(tensor)))

        call(declare)
    return op_cost(last(program))


def last(program: Program) -> object:
    return program.timed([0.0] * len(program))[-1].op


@pytest.mark.parametrize(
    ("fmt", "weight"),
    [
        (BF16_FORMAT, 96 * 64 * 2),
        (INT16, 96 * 64 * 2 + 96 * 4),
        (INT8, 96 * 64 + 96 * 2 * 2),  # a scale for each of two groups
        (held_as(INT8, "amx"), 96 * 64 + 96 * (2 * 2 + 4)),  # and one for each column
        (int4_format(32), 96 * 32 + 96 * 2 * (2 * 1 + 2)),  # scales and minima, of two groups and of 256 values
    ],
)
def test_a_product_reads_its_weight_and_its_rows_once(fmt: WeightFormat, weight: int) -> None:
    packed = pack(torch.randn(96, 64, dtype=BF16), None, fmt)
    linear = NativeLinear(native_session())
    done = recorded(lambda declare: linear(declare(torch.randn(5, 64).to(BF16)), packed))
    assert done == OpCost(weight + 5 * (64 + 96) * 2, 2 * 5 * 96 * 64)
    done = recorded(lambda declare: linear.logits(declare(torch.randn(5, 64).to(BF16)), packed))
    assert done.bytes == weight + 5 * (64 * 2 + 96 * 4)


def test_a_gated_product_writes_half_of_its_columns() -> None:
    packed = pack(torch.randn(96, 64, dtype=BF16), None, BF16_FORMAT, gated=True)
    linear = NativeLinear(native_session())
    done = recorded(lambda declare: linear.gated(declare(torch.randn(5, 64).to(BF16)), packed, "silu"))
    assert done == OpCost(96 * 64 * 2 + 5 * (64 + 48) * 2, 2 * 5 * 96 * 64)


def test_an_embedding_reads_only_its_rows() -> None:
    packed = pack(torch.randn(96, 64, dtype=BF16), None, BF16_FORMAT)
    linear = NativeLinear(native_session())
    assert recorded(lambda declare: linear.rows(declare(torch.tensor([3, 4])), packed, 1.0, BF16)).bytes == 2 * 64 * 4


def test_a_norm_with_a_residual_writes_the_sum_too() -> None:
    norm, x = NativeNorm(native_session()), torch.randn(3, 32)
    weight = torch.ones(32)
    assert recorded(lambda declare: norm(declare(x), None, weight, 1e-6, 0.0)).bytes == 3 * 32 * 4 * 2
    assert recorded(lambda declare: norm(declare(x), declare(x.clone()), weight, 1e-6, 0.0)).bytes == 3 * 32 * 4 * 4


def test_a_mixture_reads_the_experts_that_were_chosen() -> None:
    stacks = (
        pack(torch.randn(6 * n, k, dtype=BF16), None, BF16_FORMAT, gated=n == 96, count=6)
        for n, k in ((96, 64), (64, 48))
    )
    experts = NativeExperts(native_session())
    with native_session().record() as program:
        x, logits = (program.input(tensor, c_int64(5)) for tensor in (torch.randn(5, 64).to(BF16), torch.zeros(5, 6)))
        experts(x, experts.route(logits, 2, normalize=True), *stacks, "silu", residual=x)
    program.run()  # equal logits: experts 0 and 1 for all
    route, chosen = (timed.op for timed in program.timed([0.0, 0.0]))
    assert op_cost(route) == OpCost(5 * (6 * 4 + 2 * 12))
    values = 96 * 64 + 64 * 48
    assert op_cost(chosen) == OpCost(2 * 2 * values + 5 * (3 * 64 * 2 + 2 * 12), 2 * 10 * values)


@pytest.mark.parametrize(("dtype", "vector"), [(BF16, 64), (torch.int8, 36)])
@pytest.mark.parametrize("window", [Window(), Window(20), Window(40, chunked=True)])
def test_attention_reads_what_its_queries_see(dtype: torch.dtype, vector: int, window: Window) -> None:
    """A decode at 600 tokens, whose segments are split, and a chunk of 10 tokens at 50."""
    heads, kv_heads, dim = 4, 2, 32
    pages = torch.zeros(64, 2, kv_heads, 16, vector if dtype == torch.int8 else dim, dtype=dtype)
    tables = np.zeros((2, 38), np.int64)
    batch = AttentionBatch(16, window, np.array([0, 1, 11]), np.array([600, 50]), tables)
    attention = NativeAttention(native_session())
    prepared = attention.prepare(batch, pages[:, 0])
    query = torch.zeros(11, heads, dim, dtype=BF16)
    done = recorded(lambda declare: attention(declare(query), pages[:, 0], pages[:, 1], prepared, 1.0))
    pairs, read = 600 + sum(range(41, 51)), 600 + 50
    if window.chunked:
        pairs, read = 40 + sum(range(1, 11)), 40 + 10
    elif window:
        pairs, read = 20 + 10 * 20, 20 + 29
    assert done.flops == 4 * pairs * heads * dim
    assert done.bytes == read * 2 * kv_heads * vector + 2 * 11 * heads * dim * 2


def test_the_least_time_is_that_of_what_takes_longer() -> None:
    machine = MachineRates(bandwidth=10.0, flops=100.0)
    assert OpCost(50.0, 100.0).least_seconds(machine) == 5.0
    assert OpCost(50.0, 1000.0).least_seconds(machine) == 10.0
