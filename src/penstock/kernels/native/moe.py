"""A mixture of experts by the native kernels: routing, and products with the chosen experts' matrices."""

import torch
from torch import Tensor

from penstock.kernels.native.linear import DTYPES, UNQUANTIZED
from penstock.kernels.native.pack import pack, with_bias
from penstock.kernels.native.packing import PackedWeight
from penstock.kernels.native.session import Session
from penstock.kernels.native.structs import ExpertsOp, RouteOp, epilogue
from penstock.kernels.routing import SOFTMAX, Routing, Scoring, SharedExpertOutput


class NativeExperts:
    """Provides Experts (see kernels/moe.py)."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def pack(
        self, weight: Tensor | PackedWeight, count: int, bias: Tensor | None = None, *, gated: bool = False
    ) -> PackedWeight:
        if not isinstance(weight, PackedWeight):
            return pack(weight, bias, UNQUANTIZED[weight.dtype], gated=gated, count=count)
        return weight if bias is None else with_bias(weight, bias)

    def route(
        self,
        logits: Tensor,
        slots: int,
        *,
        normalize: bool,
        scoring: Scoring = SOFTMAX,
        bias: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Routing:
        routing = Routing(
            self._session.empty(logits, slots, dtype=torch.int64),
            self._session.empty(logits, slots, dtype=torch.float32),
        )
        op = RouteOp(
            self._session.rows(logits),
            logits.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if scales is None else scales.data_ptr(),
            *(tensor.data_ptr() for tensor in routing),
            logits.shape[1],
            slots,
            scoring.groups,
            scoring.kept_groups,
            scoring.scale,
            normalize,
            scoring.sigmoid,
            scoring.by_pairs,
        )
        self._session.run(op, bias, scales)
        return routing

    def __call__(
        self,
        x: Tensor,
        routing: Routing,
        gate_up: PackedWeight,
        down: PackedWeight,
        activation: str,
        *,
        first: int = 0,
        shared: SharedExpertOutput | None = None,
        residual: Tensor | None = None,
        weigh_inputs: bool = False,
    ) -> Tensor:
        out = self._session.empty(x, down.n, dtype=x.dtype)
        tally = torch.zeros(2, dtype=torch.int64)
        gate = None if shared is None else shared.gate
        op = ExpertsOp(
            self._session.rows(x),
            x.data_ptr(),
            routing.experts.data_ptr(),
            routing.weights.data_ptr(),
            gate_up.matrix,
            down.matrix,
            None if gate_up.bias is None else gate_up.bias.data_ptr(),
            None if down.bias is None else down.bias.data_ptr(),
            None if shared is None else shared.output.data_ptr(),
            None if gate is None else gate.data_ptr(),
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
            tally.data_ptr(),
            routing.experts.shape[1],
            first,
            gate_up.count,
            epilogue(activation, gated=gate_up.gated),
            weigh_inputs,
            DTYPES[x.dtype],
        )
        self._session.run(op, gate_up, down, tally)
        return out
