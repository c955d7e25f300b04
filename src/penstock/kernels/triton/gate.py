"""Gated activations: activation(gate) * up, and the same with the rows quantised by the same kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.overlap import await_inputs, overlap
from penstock.kernels.triton.quantized import LIMITS, QuantizedRows, quantize, row_scale

COLUMNS = 1024  # per program
# Columns per iteration of a program, which has a whole row, and warps: for few rows, and for many.
FEW_QUANTIZED, MANY_QUANTIZED = (16384, 16), (4096, 8)
FEW_ROWS = 132  # a multiprocessor of an H100 or H200 has one program


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """[rows, 2 * width], the gates first, to [rows, width]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if rows:
        block = min(triton.next_power_of_2(width), COLUMNS)
        grid = (rows, triton.cdiv(width, block))
        _gate[grid](
            gate_up, out, width, gate_up.stride(0), ACTIVATION=activation, COLUMNS=block, num_warps=4, **overlap()
        )
    return out


def quantized_gate(gate_up: Tensor, activation: str, dtype: torch.dtype) -> QuantizedRows:
    """`gate`, quantised to fp8 or int8, with the bits of quantize_rows."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = QuantizedRows.empty(gate_up, width, dtype)
    most, warps = FEW_QUANTIZED if rows <= FEW_ROWS else MANY_QUANTIZED
    if rows:
        _quantized_gate[(rows,)](
            gate_up,
            out.values,
            out.scales,
            width,
            gate_up.stride(0),
            ACTIVATION=activation,
            LIMIT=LIMITS[dtype],
            COLUMNS=min(triton.next_power_of_2(width), most),
            num_warps=warps,
            **overlap(),
        )
    return out


@triton.jit
def activate(gates, ups, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """activation(gates) * ups of fp32 values. The activation is rounded to the dtype before the product, as in
    torch."""
    if ACTIVATION == "silu":
        active = gates * tl.sigmoid(gates)
    elif ACTIVATION == "gelu":
        active = 0.5 * gates * (1.0 + tl.erf(gates * 0.7071067811865476))
    elif ACTIVATION == "swiglu_oai":
        gates = tl.minimum(gates, 7.0)
        active = gates * tl.sigmoid(1.702 * gates)
        ups = tl.minimum(tl.maximum(ups, -7.0), 7.0) + 1.0
    else:
        # 0.5 (1 + tanh(u)) is sigmoid(2u).
        active = gates * tl.sigmoid(1.5957691216057308 * (gates + 0.044715 * gates * gates * gates))
    return (active.to(DTYPE).to(tl.float32) * ups).to(DTYPE)


@triton.jit
def _gated(gate_up, column, width, ACTIVATION: tl.constexpr):
    inside = column < width
    gates = tl.load(gate_up + column, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(gate_up + width + column, mask=inside, other=0.0).to(tl.float32)
    return activate(gates, ups, ACTIVATION, gate_up.dtype.element_ty)


@triton.jit
def _gate(gate_up, out, width, stride, ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr):
    await_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    product = _gated(gate_up + row * stride, column, width, ACTIVATION)
    tl.store(out + row * width + column, product, mask=column < width)


@triton.jit
def _quantized_gate(
    gate_up,
    values,
    scales,
    width,
    stride,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Each program computes one row twice, the second time from the cache."""
    await_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([COLUMNS], tl.float32)
    poison = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        product = _gated(gate_up + row * stride, column, width, ACTIVATION).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(product))
        poison += product * 0.0
    scale, inverse = row_scale(tl.max(largest, 0), tl.sum(poison, 0), LIMIT)
    tl.store(scales + row, scale)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        product = _gated(gate_up + row * stride, column, width, ACTIVATION).to(tl.float32)
        out = quantize(product, inverse, values.dtype.element_ty)
        tl.store(values + row * width + column, out, mask=column < width)
