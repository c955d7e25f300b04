"""Rows quantised by themselves, by norms and by gates; and products with quantised weights."""

import pytest
import torch
from torch import Tensor

from penstock.config.weights import WIDENED_ROWS
from penstock.kernels.triton.gate import gate, quantized_gate
from penstock.kernels.triton.linear import TritonLinear
from penstock.kernels.triton.norm import TritonNorm
from penstock.kernels.triton.quantized import LIMITS, QuantizedRows, quantize_rows
from penstock.kernels.triton.tiles import parts_of
from penstock.kernels.triton.weights import CodedWeight, Scheme, empty_weight, write_rows
from tests.kernels.device_weights import dense, pack
from tests.kernels.triton.device import DEVICE, there

EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bits(rows: QuantizedRows) -> tuple[list[list[int]], list[list[int]]]:
    return rows.values.view(torch.uint8).tolist(), rows.scales.view(torch.int32).tolist()


@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize("width", [1, 40, 5000])
def test_rows_are_quantised_to_the_nearest_with_their_largest_at_the_limit(dtype: torch.dtype, width: int) -> None:
    x = normal(3, width).bfloat16() * torch.tensor([[1.0], [1e-3], [300.0]])
    x = x.bfloat16()
    got = quantize_rows(there(x), dtype)
    scales = x.float().abs().amax(1, keepdim=True) / LIMITS[dtype]
    torch.testing.assert_close(got.scales.cpu(), scales, rtol=1e-6, atol=0.0)
    exact = x.float() / scales
    want = exact.round() if dtype == torch.int8 else exact.to(dtype).float()
    # A quotient in the middle between two values may be rounded to either.
    steps = (got.values.cpu().float() - exact).abs() - (want - exact).abs()
    assert steps.max() <= 1e-3
    assert got.values.cpu().float().abs().amax(1).tolist() == [LIMITS[dtype]] * 3


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_what_is_not_finite_gives_a_scale_that_says_so_and_zeros_give_zeros(dtype: torch.dtype) -> None:
    x = normal(4, 70).bfloat16()
    x[0] = 0.0
    x[1, 5], x[2, 6] = torch.nan, torch.inf
    got = quantize_rows(there(x), dtype)
    assert got.scales[0] == 0.0 and not got.values[0].float().any()
    assert got.scales.isnan().flatten().tolist() == [False, True, True, False]


@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize("residual", [False, True])
def test_a_norm_gives_the_bits_of_quantising_what_it_gives(dtype: torch.dtype, residual: bool) -> None:
    x, weight = there((normal(3, 300).bfloat16(), normal(300, seed=1).bfloat16()))
    added = there(normal(3, 300, seed=2).bfloat16()) if residual else None
    normed, total = TritonNorm()(x, added, weight, 1e-6, 1.0)
    got, also = TritonNorm().quantized(x, added, weight, 1e-6, 1.0, dtype=dtype)
    assert bits(got) == bits(quantize_rows(normed, dtype)) and torch.equal(also, total)


@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 33), (3, 4100)])
def test_a_gate_gives_the_bits_of_quantising_what_it_gives(dtype: torch.dtype, rows: int, width: int) -> None:
    both = there(normal(rows, 2 * width).bfloat16())
    for activation in ("silu", "gelu_tanh"):
        assert bits(quantized_gate(both, activation, dtype)) == bits(quantize_rows(gate(both, activation), dtype))


CASES = [("int8", 32), ("fp8", 32), ("int4", 32), ("int4", 64), ("int4", 128)]


@pytest.mark.parametrize(("scheme", "group"), CASES)
@pytest.mark.parametrize(("rows", "n", "k"), [(0, 7, 40), (1, 53, 40), (5, 130, 1300), (70, 131, 200)])
def test_products_are_those_of_what_rows_and_weights_stand_for(
    scheme: Scheme, group: int, rows: int, n: int, k: int
) -> None:
    x, weight, bias, residual = normal(rows, k).bfloat16(), normal(n, k, seed=1), normal(n, seed=2), normal(rows, n)
    packed = pack(there(weight), scheme, group, there(bias))
    if isinstance(packed, CodedWeight):  # weights become activations' dtype
        want = x.double() @ dense(packed).cpu().bfloat16().double().t() + bias.double()
    else:
        quantised = quantize_rows(there(x), packed.values.dtype)
        exact = (quantised.values.float() * quantised.scales).cpu().double()
        want = exact @ dense(packed).cpu().double().t() + bias.double()
    linear = TritonLinear()
    got = linear.logits(there(x), packed)
    assert got.dtype == torch.float32
    atol = 1e-4 * k**0.5
    if scheme == "fp8" and rows > 64 and DEVICE.type == "cuda":  # Hopper's tensor cores add fp8 products in few bits
        atol = 2.0**-10 * want.abs().max().item()
    torch.testing.assert_close(got.cpu().double(), want, rtol=0.0, atol=atol)
    rounded = linear(there(x), packed, there(residual.bfloat16()))
    assert rounded.dtype == torch.bfloat16
    want = want + residual.bfloat16().double()
    if isinstance(packed, CodedWeight) and rows >= WIDENED_ROWS:  # torch's library rounds before a bias is added
        atol = 2.0**-7 * want.abs().max().item()
    torch.testing.assert_close(rounded.cpu().double(), want, rtol=1e-2, atol=atol)


def test_a_part_of_the_cases_divides_k() -> None:
    assert parts_of(2, 1300, 2) > 1 and parts_of(1, 40, 2) == 1 and parts_of(2 * 132, 8192, 2) == 1


@pytest.mark.parametrize(("scheme", "group"), CASES)
def test_packed_weights_are_near_what_was_packed(scheme: Scheme, group: int) -> None:
    weight = normal(37, 300)
    packed = empty_weight(37, 300, scheme, group, DEVICE)
    for start in range(0, 37, 10):
        write_rows(packed, start, weight[start : start + 10])
    assert torch.equal(dense(packed), dense(pack(there(weight), scheme, group)))
    steps = {"int8": 1 / 127, "fp8": 1 / 14, "int4": 1 / 4}  # of int4, 8 becomes 7
    largest = weight.abs().amax(1, keepdim=True)
    assert ((dense(packed).cpu() - weight).abs() <= largest * steps[scheme] * 0.51).all()
    assert torch.equal(dense(packed, 3, 9), dense(packed)[3:9])


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_gates_of_eight_bits_hand_on_quantised_rows(scheme: Scheme) -> None:
    x = there(normal(3, 40).bfloat16())
    gate_up, down = (pack(there(normal(n, k, seed=n)), scheme) for n, k in ((2 * 48, 40), (40, 48)))
    linear = TritonLinear()
    inner = linear.gated(x, gate_up, "silu")
    assert isinstance(inner, QuantizedRows)
    assert bits(inner) == bits(quantize_rows(gate(linear(x, gate_up), "silu"), gate_up.values.dtype))
    wide = linear(gate(linear(x, gate_up), "silu"), down)
    assert torch.equal(linear(inner, down), wide)


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_an_embedding_is_looked_up_in_eight_bits(scheme: Scheme) -> None:
    weight = pack(there(normal(19, 24)), scheme)
    tokens = torch.tensor([3, 18, 3, 0])
    got = TritonLinear().rows(there(tokens), weight, 2.0, torch.bfloat16).cpu()
    assert torch.equal(got, dense(weight).cpu()[tokens].bfloat16() * 2)
    part = TritonLinear().rows(there(tokens), weight, 1.0, torch.float32, first=3).cpu()
    assert torch.equal(part, dense(weight).cpu()[torch.tensor([0, 15, 0, 0])] * torch.tensor([[1.0], [1], [1], [0]]))
