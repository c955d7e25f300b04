"""Weights of codes on a GPU, as GGUF files and int4 have them: their products, and rows of embeddings."""

import pytest
import torch
from torch import Tensor

from penstock.config.weights import GGUF_FORMATS, WIDENED_ROWS, WeightFormat, device_int4, format_of
from penstock.kernels.linear import DenseWeight
from penstock.kernels.triton import coded
from penstock.kernels.triton.experts import TritonExperts
from penstock.kernels.triton.linear import TritonLinear
from penstock.kernels.triton.weights import CodedWeight, JoinedWeight, empty_codes
from tests.kernels.device_weights import dense, pack
from tests.kernels.native.reference import BITSANDBYTES, JOINED
from tests.kernels.triton.device import DEVICE, there

FORMATS: dict[str, WeightFormat] = {
    **GGUF_FORMATS,
    **BITSANDBYTES,
    **{"+".join(names): format_of(GGUF_FORMATS[name] for name in names) for names in JOINED},
    **{f"int4-{group}": device_int4(group) for group in (32, 64, 128)},
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_codes(fmt: WeightFormat, n: int, k: int, seed: int = 0) -> CodedWeight:
    """A weight of random codes and factors. Values are about as large as a normal number."""
    generator, weight = torch.Generator().manual_seed(seed), empty_codes(n, k, fmt, "cpu")
    weight.codes.copy_(torch.randint(0, 256, weight.codes.shape, generator=generator))
    small = 1 / 8 if fmt.bits == 4 and fmt.codes == "nibbles" else 1 / 128
    for factors, supers, size in ((*weight.factors[:2], small), (*weight.factors[2:], 1.0)):
        if factors is None:
            continue
        if supers is None:
            factors.copy_(torch.randn(factors.shape, generator=generator) * size)
        else:
            factors.copy_(torch.randint(-64, 64, factors.shape, generator=generator))
            supers.copy_(torch.randn(supers.shape, generator=generator) * size / 32)
    return there(weight)


def assert_product(x: Tensor, weight: CodedWeight, got: Tensor, added: Tensor | float = 0.0) -> None:
    """`got` is x times the values, which are rounded to x's dtype. A GPU adds a minimum without rounding the product
    first, so one value in thousands may become its neighbour."""
    rounded = dense(weight).cpu().to(x.dtype).double()
    want = x.double() @ rounded.t() + added
    share = 2.0**-14 if x.dtype == torch.bfloat16 and weight.mins is not None and DEVICE.type == "cuda" else 2.0**-20
    atol = share * (x.double().abs() @ rounded.t().abs()).max().item()
    roundings = (
        0 if got.dtype == torch.float32 else 2 if len(x) >= WIDENED_ROWS else 1
    )  # torch's library adds a bias later
    atol += 0.0 if got.dtype == torch.float32 else roundings * 2.0**-8 * want.abs().max().item()
    torch.testing.assert_close(got.cpu().double(), want, rtol=0.0, atol=atol)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_those_of_the_values(name: str, dtype: torch.dtype) -> None:
    weight, x = random_codes(FORMATS[name], 37, 544), normal(3, 544).to(dtype)
    assert_product(x, weight, TritonLinear().logits(there(x), weight))


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q5_1"])
def test_rows_need_not_have_whole_runs(name: str) -> None:
    weight, x = random_codes(FORMATS[name], 5, 96), normal(2, 96).bfloat16()
    assert_product(x, weight, TritonLinear().logits(there(x), weight))


@pytest.mark.parametrize("logits", [False, True])
def test_many_rows_are_multiplied_with_slices_of_columns(logits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded, "WIDENED_BYTES", 2 * 96 * 200)  # for 128 columns
    weight, x = random_codes(FORMATS["Q8_0"], 300, 96), normal(WIDENED_ROWS, 96).bfloat16()
    residual = normal(WIDENED_ROWS, 300, seed=2).bfloat16()
    linear, rows = TritonLinear(), there(x)
    if logits:
        assert_product(x, weight, linear.logits(rows, weight))
    else:
        assert_product(x, weight, linear(rows, weight, there(residual)), residual.double())
    # A row more than a tile has: its product is the same.
    few = linear.logits(rows[: WIDENED_ROWS - 1], weight)
    torch.testing.assert_close(linear.logits(rows, weight)[:-1], few, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "IQ4_XS"])
@pytest.mark.parametrize("rows", [0, 1, 70])
def test_products_of_few_and_many_rows_with_bias_and_residual(name: str, rows: int) -> None:
    """With k divided, and without."""
    weight, x = random_codes(FORMATS[name], 131, 1280), normal(rows, 1280).bfloat16()
    bias, residual = normal(131, seed=1), normal(rows, 131, seed=2).bfloat16()
    if not rows:
        assert TritonLinear()(there(x), weight).shape == (0, 131)
        return
    linear = TritonLinear()
    got = linear(there(x), linear.pack(weight, there(bias)), there(residual))
    assert got.dtype == torch.bfloat16
    assert_product(x, weight, got, bias.double() + residual.double())


def test_sections_are_multiplied_side_by_side() -> None:
    x, parts = (
        normal(3, 320).bfloat16(),
        [random_codes(FORMATS[name], n, 320) for name, n in (("Q4_K", 40), ("Q6_K", 24))],
    )
    floats = DenseWeight(there(normal(16, 320, seed=5).bfloat16()), None)
    bias = there(normal(80).bfloat16())
    for fixed in (False, True):
        linear = TritonLinear(fixed=fixed)
        whole = linear.pack(JoinedWeight((*parts, floats)), bias)
        assert isinstance(whole, JoinedWeight)
        each = [linear.pack(part, own) for part, own in zip((*parts, floats), bias.split([40, 24, 16]), strict=True)]
        want = torch.cat([linear(there(x), weight) for weight in each], 1)
        assert torch.equal(linear(there(x), whole), want)
        assert torch.equal(linear.gated(there(x), whole, "silu"), torch.nn.functional.silu(want[:, :40]) * want[:, 40:])
        assert torch.equal(linear(there(x), whole, want), want + want)
    assert whole.nbytes == sum(part.nbytes for part in parts) + floats.nbytes + bias.nbytes


@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q6_K", "Q2_K", "IQ4_NL", "MXFP4", "NF4"])
def test_an_embedding_is_looked_up(name: str) -> None:
    weight = random_codes(FORMATS[name], 19, 1120)
    tokens, values = torch.tensor([3, 18, 3, 0]), dense(weight).cpu()
    got = TritonLinear().rows(there(tokens), weight, 2.0, torch.float32).cpu()
    torch.testing.assert_close(got, 2 * values[tokens], rtol=1e-6, atol=1e-6)
    part = TritonLinear().rows(there(tokens), weight, 1.0, torch.bfloat16, first=3).cpu()
    want = values[torch.tensor([0, 15, 0, 0])].bfloat16() * torch.tensor([[1.0], [1], [1], [0]]).bfloat16()
    torch.testing.assert_close(part, want, rtol=2**-7, atol=0.0)
    assert TritonLinear().rows(there(tokens[:0]), weight, 1.0, torch.float32).shape == (0, 1120)


@pytest.mark.parametrize(("up", "down"), [("Q4_K", "Q6_K"), ("MXFP4", "MXFP4"), ("Q4_K+Q6_K", "Q5_0")])
def test_experts_are_those_of_the_values(up: str, down: str) -> None:
    count, hidden, width, tokens = 3, 64, 32, 20
    gate_up, back = (
        random_codes(FORMATS[up], count * 2 * width, hidden),
        random_codes(FORMATS[down], count * hidden, width),
    )
    experts, x = TritonExperts(), there(normal(tokens, hidden))
    routing = experts.route(there(normal(tokens, count, seed=1)), 2, normalize=True)
    got, want = (
        experts(x, routing, experts.pack(first, count, gated=True), experts.pack(second, count), "silu")
        for first, second in ((gate_up, back), (dense(gate_up), dense(back)))
    )
    assert (got - want).norm() <= 1e-5 * want.norm()


def test_int4_of_floats_has_the_layout_of_codes() -> None:
    packed = pack(there(normal(5, 200)), "int4", 64)
    assert isinstance(packed, CodedWeight) and packed.format == device_int4(64)
    assert packed.codes.shape == (256 // 2, 5) and packed.scales.shape == (256 // 64, 5)
