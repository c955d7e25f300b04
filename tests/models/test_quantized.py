"""A quantised model is the model of its dequantised weights, with activations rounded to a byte; and costs little."""

import importlib.util
import math
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from penstock.config.weights import GROUP_OF_X, cpu_format
from penstock.families import ModelSpec, load_spec
from penstock.kernels import Kernels, Needs, Platform, detect_platform, select_packing
from penstock.kernels.linear import DenseWeight, TorchLinear
from penstock.kernels.moe import TorchExperts
from penstock.kernels.native.linear import NativeLinear
from penstock.kernels.native.pack import pack
from penstock.kernels.native.packer import NativePacking
from penstock.kernels.native.packing import PackedWeight
from penstock.kernels.native.session import native_session
from penstock.weights.load import load_parameters
from penstock.weights.packaged import embedded_model
from tests.models.logits import Checkpoint, kernels_on, logits_of

WINDOW = 320  # tokens; of each held-out module one
# By how much perplexity may grow, for weights and pages.
LIMITS = (
    ("none", torch.bfloat16, 0.0005),  # where bf16 is multiplied as integers
    ("int8", torch.bfloat16, 0.001),
    ("none", torch.int8, 0.002),
    ("int4", torch.bfloat16, 0.009),
)

pytestmark = pytest.mark.skipif(not detect_platform().isa, reason="no native kernels for this machine")


def quantised(folder: Path, spec: ModelSpec, dtype: torch.dtype, quantization: str) -> tuple[dict[str, Any], Kernels]:
    packing = select_packing(detect_platform(), Needs(dtype), quantization)
    parameters = load_parameters(folder, spec, dtype, packing=packing, progress=False)
    return parameters, kernels_on(detect_platform(), spec, dtype)


# -- fidelity -----------------------------------------------------------------------------------------------------


def unpack(weight: PackedWeight) -> Tensor:
    """The values of a packed weight [n, k] in fp32."""
    at = torch.arange(weight.n)
    if weight.gated:
        half = weight.n // 2
        within = at % half
        at = within // 8 * 16 + at // half * 8 + within % 8
    return NativeLinear(native_session()).rows(at, weight, 1.0, torch.float32)


class RoundedLinear(TorchLinear):
    """Multiplies dense weights with x rounded as the native kernels round it: a byte a value, a scale for GROUP_OF_X
    values; with AMX both as bf16. But for routers, which are not quantised: whose logits are not of the vocabulary."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab

    def __call__(self, x: Tensor, weight: DenseWeight, residual: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        if detect_platform().isa == "amx":
            narrow = DenseWeight(weight.weight.bfloat16().float(), weight.bias)
            return super().__call__(x.bfloat16().float(), narrow, residual, scale=scale)
        groups = torch.nn.functional.pad(x, (0, -x.shape[-1] % GROUP_OF_X)).unflatten(-1, (-1, GROUP_OF_X))
        unit = groups.abs().amax(-1, keepdim=True) / 127
        rounded = torch.where(unit > 0, (groups * (1 / unit)).round() * unit, 0.0).flatten(-2)[..., : x.shape[-1]]
        return super().__call__(rounded.contiguous(), weight, residual, scale=scale)

    def logits(self, x: Tensor, weight: DenseWeight, **_: float) -> Tensor:
        return self(x, weight) if len(weight.weight) == self._vocab else super().__call__(x, weight)


def rounding(kernels: Kernels, spec: ModelSpec) -> Kernels:
    linear = RoundedLinear(spec.vocab_size)
    return replace(kernels, linear=linear, experts=TorchExperts(linear))


def dense_parameters(folder: Path, spec: ModelSpec, quantization: str) -> dict[str, Tensor]:
    """In fp32, with what quantising and packing leave of them."""
    parameters = load_parameters(folder, spec, torch.float32, progress=False)
    for p in spec.parameters:
        if p.kind not in ("vector", "router"):
            settings = ("float32", quantization, 32, detect_platform().isa)
            fmt = cpu_format(p.kind, (), *settings, sensitive=p.sensitive)
            each = parameters[p.name].chunk(p.experts)
            parameters[p.name] = torch.cat([unpack(pack(w, None, fmt, gated=p.kind == "gated")) for w in each])
    return parameters


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("variant", ["llama_bias", "qwen3", "gemma3", "mistral_window", "qwen2_moe", "nemotron_h_moe"])
def test_logits_are_those_of_the_dequantised_weights(
    variant: str, quantization: str, tiny_checkpoint: Checkpoint
) -> None:
    """In fp32. Rounding activations moves logits by some distance; ours lie as far from the dense model's, and where
    the rounding is imitated, next to these: what is left is a value here and there that rounds the other way."""
    folder = tiny_checkpoint(variant)
    spec = load_spec(folder)
    tokens = torch.randint(spec.vocab_size, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    torch_kernels = kernels_on(Platform("cpu", "AVX2"), spec)
    weights = dense_parameters(folder, spec, quantization)
    dense, rounded, ours = (
        logits_of(spec, parameters, kernels, [tokens])[0]
        for parameters, kernels in (
            (weights, torch_kernels),
            (weights, rounding(torch_kernels, spec)),
            quantised(folder, spec, torch.float32, quantization),
        )
    )
    allowed = (rounded - dense).norm().item()
    assert 0 < allowed < 0.2 * dense.norm().item()
    assert (ours - dense).norm().item() <= 1.1 * allowed
    assert (ours - rounded).norm().item() <= 0.6 * allowed


# -- quality ------------------------------------------------------------------------------------------------------


def held_out_windows(spec: ModelSpec, tokenizer: Tokenizer) -> list[list[int]]:
    """From the middle of every module that the embedded model has never seen."""
    path = Path(__file__).parents[2] / "scripts" / "default_model" / "corpus.py"
    loader = importlib.util.spec_from_file_location("penstock_corpus", path)
    assert loader and loader.loader
    corpus = importlib.util.module_from_spec(loader)
    sys.modules[loader.name] = corpus  # where its dataclasses look for their module
    loader.loader.exec_module(corpus)
    sources = corpus.held_out_sources(Path(sysconfig.get_path("stdlib")))
    windows = []
    for text in sources.values():
        ids = tokenizer.encode(text).ids
        middle = max(len(ids) // 2 - WINDOW // 2, 0)
        windows.append(ids[middle : middle + WINDOW])
    return windows


def perplexity(
    folder: Path, spec: ModelSpec, windows: list[list[int]], parameters: dict[str, Any], page_dtype: torch.dtype
) -> float:
    kernels = kernels_on(detect_platform(), spec, torch.bfloat16)
    total, count = 0.0, 0
    for window in windows:
        (logits,) = logits_of(spec, parameters, kernels, [window], chunk=WINDOW, dtype=page_dtype)
        total += torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(window[1:]), reduction="sum").item()
        count += len(window) - 1
    return math.exp(total / count)


def test_perplexity_of_held_out_modules() -> None:
    folder = embedded_model()
    spec = load_spec(folder)
    windows = held_out_windows(spec, Tokenizer.from_file(str(folder / "tokenizer.json")))
    assert len(windows) == 12 and min(map(len, windows)) >= 256
    as_floats = NativePacking("bfloat16", "none", 32, "amx")  # bf16 as it is, which every instruction set multiplies
    dense = load_parameters(folder, spec, torch.bfloat16, packing=as_floats, progress=False)
    exact = perplexity(folder, spec, windows, dense, torch.bfloat16)
    for quantization, page_dtype, limit in LIMITS:
        parameters, _ = quantised(folder, spec, torch.bfloat16, quantization)
        cost = perplexity(folder, spec, windows, parameters, page_dtype) / exact - 1
        print(f"weights {quantization}, pages {page_dtype}: perplexity {exact:.3f} grows by {cost:.3%}")
        assert cost <= limit
