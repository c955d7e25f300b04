"""GPTQ, and the choice by the error of outputs."""

import pytest
import torch

from penstock.quantize.formats.blocks import Blocks
from penstock.quantize.formats.grid import CodeFormat
from penstock.quantize.formats.integers import Integers
from penstock.quantize.job import METHODS
from penstock.quantize.moments import Moments
from penstock.quantize.rounding import Method, gptq, quantize, rounded
from penstock.quantize.scaling import awq_scales
from penstock.quantize.workers import Workers

WORKERS = Workers(2)
METHOD_NAMES: list[Method] = ["rtn", "mse", "gptq", "gptq-ordered"]
FORMATS: list[CodeFormat] = [
    Integers(4, 32, False, torch.bfloat16),
    Integers(4, 128, True, torch.bfloat16),
    Integers(3, 0, False, torch.float16),
    Integers(4, 96, False, torch.float32),
    Blocks("Q4_0"),
    Blocks("Q4_K"),
    Blocks("Q6_K"),
]


def inputs(tokens: int, columns: int, seed: int) -> torch.Tensor:
    """Inputs whose columns depend on each other, and of which some are large."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, columns // 4, generator=generator) @ torch.randn(
        columns // 4, columns, generator=torch.Generator().manual_seed(99)
    )
    x = mixed / columns**0.5 + 0.3 * torch.randn(tokens, columns, generator=generator)
    x[:, ::37] *= 6
    return x


def moments(columns: int) -> Moments:
    found = Moments(columns, split=True)
    found.add(inputs(2000, columns, 1), held_out=False, workers=WORKERS)
    found.add(inputs(500, columns, 2), held_out=True, workers=WORKERS)
    return found


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_gptq_lessens_the_error_of_new_inputs(fmt: CodeFormat, ordered: bool) -> None:
    columns = 768
    weights, found = torch.randn(64, columns, generator=torch.Generator().manual_seed(3)) * 0.05, moments(columns)
    best = gptq(weights, fmt, found, ordered=ordered)
    plain = rounded(weights, fmt, found.importance, search=True)
    assert best.grid.scale.shape == plain.grid.scale.shape
    assert best.codes.min() >= best.grid.low and best.codes.max() <= best.grid.high
    fresh = inputs(700, columns, 4)
    errors = [float(((weight.values - weights) @ fresh.T).square().sum()) for weight in (best, plain)]
    assert errors[0] < 0.85 * errors[1]


def test_gptq_of_independent_inputs_is_rounding() -> None:
    weights = torch.randn(16, 128, generator=torch.Generator().manual_seed(3))
    found = Moments(128)
    found.fit.copy_(torch.eye(128))
    found.tokens = 128
    fmt = Integers(4, 32, False, torch.bfloat16)
    plain = rounded(weights, fmt, found.importance, search=True)
    for ordered in (False, True):
        best = gptq(weights, fmt, found, ordered=ordered)
        assert torch.equal(best.codes, plain.codes) and torch.equal(best.values, plain.values)


def test_inputs_that_are_always_zero_do_no_harm() -> None:
    weights = torch.randn(8, 64, generator=torch.Generator().manual_seed(5))
    found, x = Moments(64), inputs(300, 64, 6)
    x[:, 8:16] = 0
    found.add(x, held_out=False, workers=WORKERS)
    weight = gptq(weights, Integers(4, 32, False, torch.bfloat16), found, ordered=True)
    assert torch.isfinite(weight.values).all()
    assert (weight.values - weights).abs().max() < 2


def test_weights_make_up_for_inputs_that_earlier_rounding_changed() -> None:
    weights = torch.randn(32, 128, generator=torch.Generator().manual_seed(5))
    change = torch.eye(128) + 0.02 * torch.randn(128, 128, generator=torch.Generator().manual_seed(6))
    found, fresh = Moments(128), inputs(500, 128, 2)
    found.add(inputs(2000, 128, 1), inputs(2000, 128, 1) @ change, held_out=False, workers=WORKERS)
    corrected, wanted = found.corrected(weights), fresh @ change @ weights.T
    errors = [float((fresh @ each.T - wanted).square().sum()) for each in (corrected, weights)]
    assert errors[0] < 0.1 * errors[1]
    same = Moments(128)
    same.add(fresh, fresh, held_out=False, workers=WORKERS)
    assert torch.equal(same.corrected(weights), weights)


def test_the_method_with_the_least_error_is_taken() -> None:
    weights, found = torch.randn(32, 128, generator=torch.Generator().manual_seed(7)), moments(128)
    fmt = Integers(4, 32, False, torch.bfloat16)
    each = {method: quantize(weights, fmt, [method], found, WORKERS) for method in METHOD_NAMES}
    best = quantize(weights, fmt, METHOD_NAMES, found, WORKERS)
    assert best.error == min(choice.error for choice in each.values()) == each[best.method].error
    assert each["rtn"].error > each["gptq"].error
    # The error is that of the outputs of inputs held out, over their mean square.
    held = inputs(500, 128, 2)
    expected = ((weights - each["mse"].weight.values) @ held.T).square().sum() / (weights @ held.T).square().sum()
    assert each["mse"].error == pytest.approx(float(expected), rel=1e-3)


def test_rounding_to_nearest_searches_no_grid() -> None:
    weights, fmt = torch.randn(8, 64, generator=torch.Generator().manual_seed(3)), Integers(4, 32, False, torch.float32)
    nearest, searched = (quantize(weights, fmt, METHODS[name][0], None, WORKERS) for name in ("rtn", "mse"))
    assert (nearest.method, searched.method) == ("rtn", "mse")
    assert torch.equal(nearest.weight.values, rounded(weights, fmt, None, search=False).values)
    assert (searched.weight.values - weights).square().sum() < (nearest.weight.values - weights).square().sum()


def test_weights_that_are_not_finite_are_refused() -> None:
    weights = torch.zeros(4, 32)
    weights[1, 2] = torch.nan
    with pytest.raises(ValueError, match="weights that are not finite"):
        quantize(weights, Integers(4, 32, False, torch.bfloat16), ["mse"], None, WORKERS)


def test_awq_scales_lessen_the_error_where_a_column_dominates() -> None:
    weights, fmt = (
        torch.randn(48, 128, generator=torch.Generator().manual_seed(8)),
        Integers(4, 128, False, torch.float32),
    )
    found = moments(128)
    scales = awq_scales([(weights, fmt)], found, WORKERS)
    assert scales is not None and scales[37] > scales[36]
    scaled = rounded(weights * scales, fmt, found.importance / scales**2, search=True).values / scales
    plain = rounded(weights, fmt, found.importance, search=True).values
    assert found.error(weights - scaled) < found.error(weights - plain)
