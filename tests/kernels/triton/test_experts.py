"""Mixtures of quantised experts: what products with each expert's own matrices give, and the same as dense ones."""

import pytest
import torch

from penstock.kernels.linear import DenseWeight
from penstock.kernels.triton.experts import TritonExperts
from penstock.kernels.triton.linear import TritonLinear
from penstock.kernels.triton.weights import CodedWeight, QuantizedWeight, Scheme, Weight
from tests.kernels.device_weights import dense, pack
from tests.kernels.op_cases import EXPERTS
from tests.kernels.triton.device import there

BF16 = ("fp8", 32, torch.bfloat16)
CASES: tuple[tuple[Scheme, int], ...] = (("int8", 32), ("fp8", 32), ("int4", 32), ("int4", 64))


def rows_of(weight: Weight, start: int, stop: int) -> Weight:
    """Of a stack."""
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.weight[start:stop], None)
    if isinstance(weight, QuantizedWeight):
        return QuantizedWeight(weight.values[start:stop], weight.scales[start:stop])
    assert isinstance(weight, CodedWeight)
    parts = (None if each is None else each[:, start:stop].contiguous() for each in (weight.codes, *weight.factors))
    return CodedWeight(*parts, weight.format, weight.k)  # type: ignore[arg-type]


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("rows", [1, 20])
def test_a_routers_logits_are_not_rounded_to_bf16(rows: int, fixed: bool) -> None:
    """It would choose between experts that are nearly as good."""
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, 64, generator=generator).bfloat16() for n in (rows, 8))
    linear = TritonLinear(fixed=fixed)
    logits = linear.logits(there(x), linear.pack(there(weight))).cpu()
    torch.testing.assert_close(logits, (x.double() @ weight.double().T).float(), rtol=0.0, atol=1e-4)


@pytest.mark.parametrize(("scheme", "group", "dtype"), [*((*case, torch.float32) for case in CASES), BF16])
def test_quantised_experts_are_sums_of_products_with_each(scheme: Scheme, group: int, dtype: torch.dtype) -> None:
    tried = 0
    for x, routing, count, gate_up, down, _, activation, first, shared, residual, weighed in EXPERTS.inputs(dtype, 1):
        if len(x) != 9 or x.shape[1] != 37:
            continue
        gate_up, down = (pack(there(weight), scheme, group) for weight in (gate_up, down))
        x, routing, shared, residual = there((x, routing, shared, residual))
        experts, linear = TritonExperts(), TritonLinear()
        stacks = experts.pack(gate_up, count, gated=True), experts.pack(down, count)
        options = {"first": first, "shared": shared, "residual": residual, "weigh_inputs": weighed}
        got = experts(x, routing, *stacks, activation, **options)
        want = torch.zeros(x.shape, device=x.device)
        for token, (chosen, weights) in enumerate(zip(routing.experts.tolist(), routing.weights.tolist(), strict=True)):
            for expert, weight in zip(chosen, weights, strict=True):
                if first <= expert < first + count:
                    own = [
                        rows_of(stack, (expert - first) * n, (expert - first + 1) * n)
                        for stack, n in ((gate_up, gate_up.shape[0] // count), (down, down.shape[0] // count))
                    ]
                    before, after = (weight, 1.0) if weighed else (1.0, weight)
                    mine = (x[token : token + 1].float() * before).to(dtype)
                    inner = linear.gated(mine, own[0], activation)
                    want[token] += linear(inner, own[1])[0].float() * after
        if shared is not None:
            want += shared.output.float() * (1.0 if shared.gate is None else shared.gate.sigmoid())
        if residual is not None:
            want += residual.float()
        bound = 2e-2 if dtype == torch.bfloat16 else 5e-3  # a value here and there is rounded the other way
        torch.testing.assert_close(got.float(), want, rtol=0.0, atol=bound * max(want.abs().max().item(), 1.0))
        tried += 1
    assert tried


@pytest.mark.parametrize(("scheme", "group"), CASES)
def test_many_tokens_of_quantised_experts(scheme: Scheme, group: int) -> None:
    """Several tiles an expert, in fp32: near the dense mixture of the same weights."""
    cases = [case for case in EXPERTS.inputs(torch.float32, 2) if len(case[0]) > 20]
    x, routing, count, gate_up, down, _, activation, first, shared, residual, _ = cases[0]
    packed = [pack(there(weight), scheme, group) for weight in (gate_up, down)]
    options = {"first": first, "shared": there(shared), "residual": there(residual)}
    experts = TritonExperts()
    got, want = (
        experts(there(x), there(routing), *(experts.pack(w, count) for w in weights), activation, **options)
        for weights in (packed, [dense(weight) for weight in packed])
    )
    assert (got - want).norm() <= (1e-5 if scheme == "int4" else 0.05) * want.norm()
