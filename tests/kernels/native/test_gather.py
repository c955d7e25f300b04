"""A weight whose columns have an order of their own multiplies the columns of x in this order."""

from ctypes import c_int64
from dataclasses import replace

import pytest
import torch

from penstock.config.weights import INT8
from penstock.kernels.native.linear import NativeLinear
from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.pack import pack
from penstock.kernels.native.packing import SectionedWeight
from penstock.kernels.native.session import Session
from penstock.kernels.native.team import ThreadTeam


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [0, 1, 7, 70])
def test_x_is_gathered(rows: int, threads: int, dtype: torch.dtype) -> None:
    n, k = 40, 2080  # two whole pieces of columns and a part
    draw = torch.Generator().manual_seed(1)
    plain = pack(torch.randn(n, k, generator=draw).to(dtype), torch.randn(n, generator=draw).to(dtype), INT8)
    order = torch.randperm(k, generator=draw)
    ordered = replace(plain, order=order.int())
    session = Session(ThreadTeam(instruction_sets()[0], threads))
    linear, x = NativeLinear(session), torch.randn(rows, k, generator=draw).to(dtype)
    want = linear(x[:, order].contiguous(), plain)
    assert torch.equal(linear(x, ordered), want)
    both = linear(x, SectionedWeight((ordered, plain)))
    assert torch.equal(both, torch.cat([want, linear(x, plain)], 1))


def test_it_is_recorded() -> None:
    n, k = 32, 96
    draw = torch.Generator().manual_seed(2)
    plain = pack(torch.randn(n, k, generator=draw), None, INT8)
    order = torch.randperm(k, generator=draw)
    session = Session(ThreadTeam(instruction_sets()[0], 2))
    linear, x = NativeLinear(session), torch.zeros(8, k)
    cell = c_int64(8)
    with session.record() as program:
        out = linear(program.input(x, cell), replace(plain, order=order.int()))
    x.copy_(torch.randn(8, k, generator=draw))
    cell.value = 5
    program.run()
    assert torch.equal(out[:5], linear(x[:5, order].contiguous(), plain))
    assert program.timed(program.profile())[0].label == "gather"
