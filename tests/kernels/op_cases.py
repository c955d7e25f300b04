"""Every op with what a test of its providers needs. Some are other methods of the providers of an op of the product."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from penstock.kernels import Op, ops
from tests.kernels import op_inputs

EXACT: Mapping[torch.dtype, float] = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0}
ROUNDING: Mapping[torch.dtype, float] = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# Two products, one after the other, and a rounding between them.
TWICE = {dtype: 2 * tolerance for dtype, tolerance in ROUNDING.items()}
SEVERAL_ROUNDINGS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass(frozen=True, kw_only=True)
class OpCase(Op):
    """A provider's result may differ from the reference's by `tolerance[dtype]`, relative to the largest value.

    `inputs` draws argument tuples of a dtype from a seed: odd sizes, one row, none. `run` applies a provider's
    function to one tuple and returns the tensors to compare.
    """

    tolerance: Mapping[torch.dtype, float]
    inputs: Callable[[torch.dtype, int], Iterator[tuple[Any, ...]]]
    run: Callable[[Any, tuple[Any, ...]], Any]


def case_of(
    name: str,
    op: Op,
    tolerance: Mapping[torch.dtype, float],
    inputs: Callable[[torch.dtype, int], Iterator[tuple[Any, ...]]],
    run: Callable[[Any, tuple[Any, ...]], Any] = op_inputs.call,
    *,
    native_only: bool = False,
) -> OpCase:
    """An op whose providers are those of `op`, or the native one alone."""
    providers = op.providers[:1] if native_only else op.providers
    return OpCase(name, op.reference, providers, tolerance=tolerance, inputs=inputs, run=run)


RMS_NORM = case_of("rms_norm", ops.RMS_NORM, ROUNDING, op_inputs.rms_norm_inputs)
LAYER_NORM = case_of("layer_norm", ops.LAYER_NORM, ROUNDING, op_inputs.layer_norm_inputs)
LINEAR = case_of("linear", ops.LINEAR, ROUNDING, op_inputs.linear_inputs, op_inputs.run_linear)
GATED_LINEAR = case_of("gated_linear", ops.LINEAR, ROUNDING, op_inputs.gated_inputs, op_inputs.run_gated)
ACTIVATED_LINEAR = case_of(
    "activated_linear", ops.LINEAR, ROUNDING, op_inputs.activated_inputs, op_inputs.run_activated
)
LINEAR_BY_HEAD = case_of(
    "linear_by_head", ops.LINEAR_BY_HEAD, ROUNDING, op_inputs.by_head_inputs, op_inputs.run_by_head
)
LOGITS = case_of("logits", ops.LINEAR, ROUNDING, op_inputs.logits_inputs, op_inputs.run_logits)
EMBEDDING = case_of("embedding", ops.LINEAR, EXACT, op_inputs.embedding_inputs, op_inputs.run_embedding)
ROUTE = case_of("route", ops.EXPERTS, ROUNDING, op_inputs.route_inputs, op_inputs.run_route)
EXPERTS = case_of("experts", ops.EXPERTS, TWICE, op_inputs.experts_inputs, op_inputs.run_experts)
BIASED_EXPERTS = case_of("biased_experts", ops.EXPERTS, TWICE, op_inputs.biased_experts_inputs, op_inputs.run_experts)
UNGATED_EXPERTS = case_of(
    "ungated_experts",
    ops.EXPERTS,
    TWICE,
    op_inputs.ungated_experts_inputs,
    op_inputs.run_experts,
    native_only=True,  # models with it do not run on a GPU yet
)
STORE_KV = case_of("store_kv", ops.PAGED_ATTENTION, SEVERAL_ROUNDINGS, op_inputs.store_inputs, op_inputs.run_store)
PAGED_ATTENTION = case_of(
    "paged_attention", ops.PAGED_ATTENTION, SEVERAL_ROUNDINGS, op_inputs.attention_inputs, op_inputs.run_attention
)
BIDIRECTIONAL_ATTENTION = case_of(
    "bidirectional_attention",
    ops.PAGED_ATTENTION,
    SEVERAL_ROUNDINGS,
    partial(op_inputs.attention_inputs, causal=False),
    op_inputs.run_attention,
    native_only=True,
)
STORE_LATENTS = case_of(
    "store_latents",
    ops.LATENT_ATTENTION,
    SEVERAL_ROUNDINGS,
    op_inputs.store_latents_inputs,
    op_inputs.run_store_latents,
)
LATENT_ATTENTION = case_of(
    "latent_attention", ops.LATENT_ATTENTION, SEVERAL_ROUNDINGS, op_inputs.latent_inputs, op_inputs.run_latent
)
RECURRENCE = case_of(
    "recurrence", ops.RECURRENCE, SEVERAL_ROUNDINGS, op_inputs.recurrence_inputs, op_inputs.run_recurrence
)
SIGMOID_GATE = case_of("sigmoid_gate", ops.SIGMOID_GATE, ROUNDING, op_inputs.sigmoid_gate_inputs)
PRODUCT = case_of("product", ops.PRODUCT, ROUNDING, op_inputs.sigmoid_gate_inputs)

OPS = tuple(each for each in list(globals().values()) if isinstance(each, OpCase))
