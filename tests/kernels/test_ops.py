"""Every provider of every op against the op's reference, and the references against other formulas."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from penstock.kernels import Needs, Op, Platform, Provider, detect_platform, select_kernels
from penstock.kernels.attention import ReferenceAttention
from penstock.kernels.elementwise import embedding, gelu_tanh_and_mul, qk_norm_rope, rms_norm, silu_and_mul
from penstock.kernels.linear import TorchLinear
from penstock.kernels.native.loader import lacks_for_amx
from penstock.kernels.native.session import Session
from penstock.kernels.registry import reference
from tests.kernels.op_cases import OPS, OpCase
from tests.kernels.op_inputs import attention_inputs

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PLATFORMS = [Platform("cpu", "AVX2"), Platform("cpu", "AVX512"), detect_platform()]
CASES = [
    pytest.param(op, provider, dtype, id=f"{op.name}-{provider.name}-{str(dtype)[6:]}")
    for op in OPS
    for provider in op.providers
    for dtype in DTYPES
    if any(provider.supports(platform, Needs(dtype)) for platform in PLATFORMS)
]


def tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def check(op: OpCase, function: Any, dtype: torch.dtype) -> None:
    expected = op.reference.make()
    for seed in range(3):
        for arguments in op.inputs(dtype, seed):
            for got, want in zip(
                tensors(op.run(function, arguments)), tensors(op.run(expected, arguments)), strict=True
            ):
                assert got.dtype == want.dtype and got.shape == want.shape
                assert torch.isfinite(want).all()
                largest = want.abs().max().item() if want.numel() else 0.0
                torch.testing.assert_close(got, want, rtol=0.0, atol=op.tolerance[dtype] * max(largest, 1.0))


@pytest.mark.parametrize(("op", "provider", "dtype"), CASES)
def test_provider_agrees_with_the_reference(op: OpCase, provider: Provider, dtype: torch.dtype) -> None:
    check(op, provider.make(), dtype)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_inputs_have_one_row_and_none(op: OpCase) -> None:
    rows = {
        argument.shape[0]
        for arguments in op.inputs(torch.float32, 0)
        for argument in arguments
        if isinstance(argument, torch.Tensor)
    }
    assert {0, 1} <= rows


def test_the_check_notices_a_wrong_provider() -> None:
    class Wrong(TorchLinear):
        def __call__(self, *arguments: Any, **options: Any) -> torch.Tensor:
            return super().__call__(*arguments, **options) + 0.01

    op = next(op for op in OPS if op.name == "linear")
    with pytest.raises(AssertionError):
        check(op, Wrong(), torch.float32)


def test_selection_prefers_a_supported_provider_and_falls_back() -> None:
    fast = Provider("fast", lambda: abs, lambda platform, needs: platform.capability == "AVX512")
    op = Op("op", reference(lambda: abs), (fast,))
    assert [op.select(platform, Needs(torch.float32)).name for platform in PLATFORMS[:2]] == ["torch", "fast"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_native_kernels_everything_is_computed_by_torch(dtype: torch.dtype) -> None:
    fingerprint = select_kernels(PLATFORMS[0], Needs(dtype)).fingerprint
    assert fingerprint == "linear=torch,rms_norm=torch,paged_attention=torch,experts=torch"


def test_amx_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = "amx_bf16 amx_tile avx512_bf16 avx512_fp16"
    for flags, lacks in ((whole, ""), (whole.removesuffix("avx512_fp16"), "AVX512-FP16"), ("avx512_bf16", "")):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu {flags} vme\n")
        assert lacks_for_amx(tmp_path / "cpuinfo") == lacks
    assert lacks_for_amx(tmp_path / "nothing") == ""
    monkeypatch.setattr("penstock.kernels.provider_selection.lacks_for_amx", lambda: "AVX512-FP16")
    kernels = select_kernels(PLATFORMS[0], Needs(torch.bfloat16))
    for isa, hint in (("amx", ""), ("avx512_bf16", " (those for AMX need AVX512-FP16, which this machine hides)")):
        native = replace(kernels, session=cast(Session, object()), fingerprint=f"linear=native,isa={isa}")
        assert native.summary == f"native kernels for {isa}{hint}"


def test_rms_norm_is_the_formula_in_fp64() -> None:
    x, residual, weight = (
        torch.randn(s, generator=torch.Generator().manual_seed(1)) for s in ((5, 64), (5, 64), (64,))
    )
    for offset in (0.0, 1.0):
        normed, total = rms_norm(x, residual, weight, 1e-6, offset)
        wide = (x + residual).double()
        expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * (weight.double() + offset)
        torch.testing.assert_close(normed, expected.float(), rtol=1e-6, atol=1e-6)
        assert torch.equal(total, x + residual)
    assert rms_norm(x, None, weight, 1e-6, 0.0)[1] is x


def test_rope_turns_pairs_of_halves_by_their_angle() -> None:
    generator = torch.Generator().manual_seed(2)
    qk, angles = torch.randn(3, 2, 8, generator=generator), torch.rand(3, 1, 4, generator=generator) * 6
    sin = torch.cat((-angles.sin(), angles.sin()), -1)
    cos = torch.cat((angles.cos(), angles.cos()), -1)
    turned = torch.complex(qk[..., :4], qk[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(qk_norm_rope(qk, None, cos, sin, 1e-6, 0.0), expected)
    weight = torch.rand(2, 8, generator=generator) + 0.5
    normed = torch.stack([F.rms_norm(qk[:, head], (8,), weight[head], 1e-6) for head in range(2)], 1)
    got = qk_norm_rope(qk, weight, cos, sin, 1e-6, 0.0)
    torch.testing.assert_close(got, qk_norm_rope(normed, None, cos, sin, 1e-6, 0.0))


def test_gate_comes_first() -> None:
    gate, up = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(3)).double()
    both = torch.cat((gate, up), -1)
    torch.testing.assert_close(silu_and_mul(both), gate * torch.sigmoid(gate) * up)
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(gelu_tanh_and_mul(both), 0.5 * gate * (1 + torch.tanh(inner)) * up)


def test_embedding_scale_is_rounded_to_the_weights_dtype() -> None:
    weight = torch.ones(2, 3, dtype=torch.bfloat16)
    scaled = embedding(torch.tensor([1]), weight, 1152**0.5)  # 33.94 is not a bf16 number
    assert scaled.tolist() == [[34.0] * 3]
    assert weight.tolist() == [[1.0] * 3] * 2


def test_reference_attention_is_dense_attention_with_a_mask() -> None:
    for query, keys, values, batch, scale, softcap, sinks in attention_inputs(torch.float32, 4):
        got = ReferenceAttention()(query, keys, values, batch, scale, softcap=softcap, sinks=sinks)
        groups = query.shape[1] // keys.shape[1]
        for i, context in enumerate(batch.context_lens.tolist()):
            start, end = batch.query_start[i : i + 2].tolist()
            slots = [(batch.block_tables[i, p // batch.block_size], p % batch.block_size) for p in range(context)]
            k, v = (
                torch.stack([pages[b, :, o] for b, o in slots], 1).repeat_interleave(groups, 0)
                for pages in (keys, values)
            )
            lag = torch.arange(context - (end - start), context)[:, None] - torch.arange(context)
            tokens, key_at = batch.window.tokens or context, torch.arange(context)
            if batch.window.chunked:
                seen = (lag + key_at) // tokens == key_at // tokens
            else:
                seen = lag < tokens
            visible = (lag >= 0) & seen
            scores = query[start:end].transpose(0, 1).double() @ k.double().transpose(1, 2) * scale
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            weights = scores.masked_fill(~visible, -torch.inf).exp()
            beside = 0.0 if sinks is None else sinks.double().exp()[:, None, None]
            want = (weights @ v.double() / (weights.sum(-1, keepdim=True) + beside)).float()
            torch.testing.assert_close(got[start:end], want.transpose(0, 1), rtol=1e-5, atol=1e-5)
