"""The ops of a model: each with its reference, and with its providers, the best first.

This module is the only one that imports both the definitions (elementwise.py, linear.py, moe.py, attention.py) and the
providers. Triton, which not every machine has, is imported when a provider is made.
"""

from functools import partial

import torch

from penstock.kernels.attention import (
    PagedAttention,
    ReferenceAttention,
    attention_inputs,
    run_attention,
    run_store,
    store_inputs,
)
from penstock.kernels.elementwise import RmsNorm, layer_norm, layer_norm_inputs, rms_norm, rms_norm_inputs
from penstock.kernels.latent import (
    ReferenceLatentAttention,
    latent_inputs,
    run_latent,
    run_store_latents,
    store_latents_inputs,
)
from penstock.kernels.linear import (
    Linear,
    TorchLinear,
    activated_inputs,
    by_head_inputs,
    embedding_inputs,
    gated_inputs,
    linear_inputs,
    logits_inputs,
    run_activated,
    run_by_head,
    run_embedding,
    run_gated,
    run_linear,
    run_logits,
)
from penstock.kernels.moe import (
    Experts,
    TorchExperts,
    biased_experts_inputs,
    experts_inputs,
    route_inputs,
    run_experts,
    run_route,
    ungated_experts_inputs,
)
from penstock.kernels.native.attention import NativeAttention, NativeLatentAttention
from penstock.kernels.native.linear import NativeLinear
from penstock.kernels.native.moe import NativeExperts
from penstock.kernels.native.norm import NativeNorm
from penstock.kernels.native.recurrence import NativeRecurrence
from penstock.kernels.native.session import native_session
from penstock.kernels.native_limits import has_whole_lines
from penstock.kernels.recurrence import (
    product,
    recurrence,
    recurrence_inputs,
    run_recurrence,
    sigmoid_gate,
    sigmoid_gate_inputs,
)
from penstock.kernels.registry import (
    EXACT,
    ROUNDING,
    Needs,
    Op,
    Platform,
    Provider,
    has_fixed_triton,
    has_native,
    has_triton,
    reference,
)


def _triton_norm() -> RmsNorm:
    from penstock.kernels.triton.norm import TritonNorm

    return TritonNorm()


def _triton_linear(*, fixed: bool = False) -> Linear:
    from penstock.kernels.triton.linear import TritonLinear

    return TritonLinear(fixed=fixed)


def _triton_experts(*, fixed: bool = False) -> Experts:
    from penstock.kernels.triton.experts import TritonExperts

    return TritonExperts(fixed=fixed)


def _triton_attention(*, fixed: bool = False) -> PagedAttention:
    from penstock.kernels.triton.attention import TritonAttention

    return TritonAttention(fixed=fixed)


def _has_native_attention(platform: Platform, needs: Needs) -> bool:
    return has_native(platform, needs) and has_whole_lines(needs.block_size, needs.head_dims)


# One provider computes all ops of a group, each by another of its methods.
_NORM = (
    Provider("native", lambda: NativeNorm(native_session()), has_native),
    Provider("triton", _triton_norm, has_triton),
)
_LINEAR = (
    Provider("native", lambda: NativeLinear(native_session()), has_native),
    Provider("triton_fixed", partial(_triton_linear, fixed=True), has_fixed_triton),
    Provider("triton", _triton_linear, has_triton),
)
_EXPERTS = (
    Provider("native", lambda: NativeExperts(native_session()), has_native),
    Provider("triton_fixed", partial(_triton_experts, fixed=True), has_fixed_triton),
    Provider("triton", _triton_experts, has_triton),
)
_ATTENTION = (
    Provider("native", lambda: NativeAttention(native_session()), _has_native_attention),
    Provider("triton_fixed", partial(_triton_attention, fixed=True), has_fixed_triton),
    Provider("triton", _triton_attention, has_triton),
)

_RECURRENCE = (Provider("native", lambda: NativeRecurrence(native_session()), has_native),)

# Not on a GPU yet, where models that need them are refused.
_LATENT = (Provider("native", lambda: NativeLatentAttention(native_session()), _has_native_attention),)

_TORCH_LINEAR = reference(TorchLinear)
_TORCH_EXPERTS = reference(lambda: TorchExperts(TorchLinear()))
_TORCH_ATTENTION = reference(ReferenceAttention)
_TORCH_LATENT = reference(ReferenceLatentAttention)

# Two products, one after the other, and a rounding between them.
_TWICE = {dtype: 2 * tolerance for dtype, tolerance in ROUNDING.items()}
_SEVERAL_ROUNDINGS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}

RMS_NORM = Op("rms_norm", reference(lambda: rms_norm), ROUNDING, rms_norm_inputs, _NORM)
LAYER_NORM = Op(
    "layer_norm",
    reference(lambda: layer_norm),
    ROUNDING,
    layer_norm_inputs,
    (Provider("native", lambda: NativeNorm(native_session()).centered, has_native),),
)
LINEAR = Op("linear", _TORCH_LINEAR, ROUNDING, linear_inputs, _LINEAR, run_linear)
GATED_LINEAR = Op("gated_linear", _TORCH_LINEAR, ROUNDING, gated_inputs, _LINEAR, run_gated)
ACTIVATED_LINEAR = Op("activated_linear", _TORCH_LINEAR, ROUNDING, activated_inputs, _LINEAR, run_activated)
LINEAR_BY_HEAD = Op("linear_by_head", _TORCH_LINEAR, ROUNDING, by_head_inputs, _LINEAR[:1], run_by_head)
LOGITS = Op("logits", _TORCH_LINEAR, ROUNDING, logits_inputs, _LINEAR, run_logits)
EMBEDDING = Op("embedding", _TORCH_LINEAR, EXACT, embedding_inputs, _LINEAR, run_embedding)
ROUTE = Op("route", _TORCH_EXPERTS, ROUNDING, route_inputs, _EXPERTS, run_route)
EXPERTS = Op("experts", _TORCH_EXPERTS, _TWICE, experts_inputs, _EXPERTS, run_experts)
BIASED_EXPERTS = Op("biased_experts", _TORCH_EXPERTS, _TWICE, biased_experts_inputs, _EXPERTS, run_experts)
# Models with this op do not run on a GPU yet.
UNGATED_EXPERTS = Op("ungated_experts", _TORCH_EXPERTS, _TWICE, ungated_experts_inputs, _EXPERTS[:1], run_experts)
STORE_KV = Op("store_kv", _TORCH_ATTENTION, _SEVERAL_ROUNDINGS, store_inputs, _ATTENTION, run_store)
PAGED_ATTENTION = Op(
    "paged_attention", _TORCH_ATTENTION, _SEVERAL_ROUNDINGS, attention_inputs, _ATTENTION, run_attention
)
BIDIRECTIONAL_ATTENTION = Op(
    "bidirectional_attention",
    _TORCH_ATTENTION,
    _SEVERAL_ROUNDINGS,
    partial(attention_inputs, causal=False),
    _ATTENTION[:1],
    run_attention,
)
STORE_LATENTS = Op("store_latents", _TORCH_LATENT, _SEVERAL_ROUNDINGS, store_latents_inputs, _LATENT, run_store_latents)
LATENT_ATTENTION = Op("latent_attention", _TORCH_LATENT, _SEVERAL_ROUNDINGS, latent_inputs, _LATENT, run_latent)
RECURRENCE = Op(
    "recurrence", reference(lambda: recurrence), _SEVERAL_ROUNDINGS, recurrence_inputs, _RECURRENCE, run_recurrence
)
SIGMOID_GATE = Op(
    "sigmoid_gate",
    reference(lambda: sigmoid_gate),
    ROUNDING,
    sigmoid_gate_inputs,
    (Provider("native", lambda: NativeRecurrence(native_session()).sigmoid_gate, has_native),),
)
PRODUCT = Op(
    "product",
    reference(lambda: product),
    ROUNDING,
    sigmoid_gate_inputs,
    (Provider("native", lambda: NativeRecurrence(native_session()).product, has_native),),
)

OPS: tuple[Op, ...] = (
    *(EMBEDDING, RMS_NORM, LAYER_NORM, LINEAR, GATED_LINEAR, ACTIVATED_LINEAR, LINEAR_BY_HEAD, LOGITS),
    *(STORE_LATENTS, LATENT_ATTENTION),
    *(
        ROUTE,
        EXPERTS,
        BIASED_EXPERTS,
        UNGATED_EXPERTS,
        STORE_KV,
        PAGED_ATTENTION,
        BIDIRECTIONAL_ATTENTION,
        RECURRENCE,
        SIGMOID_GATE,
        PRODUCT,
    ),
)
