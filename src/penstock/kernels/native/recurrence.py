"""Layers with a state, and the gate of an attention's output, by the native kernels."""

from ctypes import addressof, c_int64

from torch import Tensor

from penstock.kernels.native.linear import DTYPES
from penstock.kernels.native.session import Session
from penstock.kernels.native.structs import GateOp, RecurrenceOp
from penstock.kernels.recurrence import RecurrenceWeights


class NativeRecurrence:
    """Provides recurrence (see kernels/recurrence.py)."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __call__(
        self, inputs: Tensor, rates: Tensor, units: Tensor, states: Tensor, weights: RecurrenceWeights
    ) -> Tensor:
        """`units` is a view of its transpose, whose lines are dense."""
        out = self._session.empty(inputs, weights.value_width, dtype=inputs.dtype)
        own = c_int64(len(units))  # a recording has a cell with the number of sequences instead
        op = RecurrenceOp(
            self._session.rows(inputs),
            self._session.cell(units) or addressof(own),
            units.data_ptr(),
            units.stride(1),
            inputs.data_ptr(),
            rates.data_ptr(),
            states.data_ptr(),
            states.stride(0),
            weights.conv.data_ptr(),
            None if weights.conv_bias is None else weights.conv_bias.data_ptr(),
            weights.decay.data_ptr(),
            weights.step_bias.data_ptr(),
            None if weights.skip is None else weights.skip.data_ptr(),
            weights.norm.data_ptr(),
            out.data_ptr(),
            weights.key_heads,
            weights.heads,
            weights.key_dim,
            weights.value_width // weights.heads,
            len(weights.conv),
            weights.norm_width,
            len(weights.norm),
            weights.eps,
            DTYPES[inputs.dtype],
            weights.tiled,
        )
        self._session.run(op, weights, states, own)
        return out

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return self._gate(x, gate, plain=False)

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        return self._gate(x, y, plain=True)

    def _gate(self, x: Tensor, gate: Tensor, *, plain: bool) -> Tensor:
        out, width = self._session.empty(x, x.shape[1], dtype=x.dtype), x.shape[1]
        where = (x.data_ptr(), gate.data_ptr(), out.data_ptr())
        self._session.run(GateOp(self._session.rows(x), *where, width, plain, DTYPES[x.dtype]))
        return out
