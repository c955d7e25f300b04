"""Products with packed weights, and embedding rows, by the native kernels."""

import torch
from torch import Tensor

from penstock.config.weights import BF16 as BF16_FORMAT
from penstock.config.weights import F32 as F32_FORMAT
from penstock.config.weights import WeightFormat
from penstock.kernels.native.pack import pack, with_bias
from penstock.kernels.native.packing import PackedWeight, SectionedWeight
from penstock.kernels.native.session import Session
from penstock.kernels.native.structs import BF16, F32, EmbeddingOp, GatherOp, LinearOp, epilogue

DTYPES = {torch.float32: F32, torch.bfloat16: BF16}
Weight = PackedWeight | SectionedWeight
UNQUANTIZED: dict[torch.dtype, WeightFormat] = {torch.float32: F32_FORMAT, torch.bfloat16: BF16_FORMAT}


class NativeLinear:
    """Provides Linear (see kernels/linear.py)."""

    def __init__(self, session: Session, dense: WeightFormat | None = None) -> None:
        """Dense weights are packed in the format `dense`, or as they are."""
        self._session = session
        self._dense = dense

    def pack(self, weight: Tensor | Weight, bias: Tensor | None = None, *, gated: bool = False) -> Weight:
        if isinstance(weight, SectionedWeight):
            if bias is None:
                return weight
            biases = bias.split([section.n for section in weight.sections])
            return SectionedWeight(tuple(map(with_bias, weight.sections, biases)))
        if isinstance(weight, PackedWeight):
            return weight if bias is None else with_bias(weight, bias)
        return pack(weight, bias, self._dense or UNQUANTIZED[weight.dtype], gated=gated)

    def __call__(self, x: Tensor, weight: Weight, residual: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        return self._multiply(x, weight, residual, 0, weight.n, x.dtype, scale)

    def gated(self, x: Tensor, weight: PackedWeight, activation: str) -> Tensor:
        return self._multiply(x, weight, None, epilogue(activation, gated=True), weight.n // 2, x.dtype)

    def activated(self, x: Tensor, weight: Weight, activation: str) -> Tensor:
        return self._multiply(x, weight, None, epilogue(activation, gated=False), weight.n, x.dtype)

    def by_head(self, x: Tensor, weight: PackedWeight, heads: int) -> Tensor:
        return self._multiply(x, weight, None, 0, weight.n, x.dtype, heads=heads)

    def logits(self, x: Tensor, weight: Weight, *, scale: float = 1.0, softcap: float = 0.0) -> Tensor:
        return self._multiply(x, weight, None, 0, weight.n, torch.float32, scale, softcap)

    def rows(
        self, token_ids: Tensor, weight: PackedWeight, scale: float, dtype: torch.dtype, *, first: int | None = None
    ) -> Tensor:
        out = self._session.empty(token_ids, weight.k, dtype=dtype)
        rounded = torch.tensor(scale, dtype=dtype).item()
        fields = (token_ids.data_ptr(), weight.matrix, out.data_ptr(), rounded, DTYPES[dtype], first or 0)
        self._session.run(EmbeddingOp(self._session.rows(token_ids), *fields), weight)
        return out

    def _multiply(
        self,
        x: Tensor,
        weight: Weight,
        residual: Tensor | None,
        activation: int,
        width: int,
        out_dtype: torch.dtype,
        scale: float = 1.0,
        softcap: float = 0.0,
        heads: int = 1,
    ) -> Tensor:
        out = self._session.empty(x, width, dtype=out_dtype)
        column = 0
        for section in weight.sections:
            own = x if section.order is None else self._gathered(x, section)
            op = LinearOp(
                self._session.rows(own),
                own.data_ptr(),
                section.matrix,
                None if section.bias is None else section.bias.data_ptr(),
                None if residual is None else residual.data_ptr() + column * residual.itemsize,
                out.data_ptr() + column * out.itemsize,
                activation,
                DTYPES[x.dtype],
                DTYPES[out_dtype],
                scale,
                softcap,
                heads,
                width,
            )
            self._session.run(op, section)
            column += section.n
        return out

    def _gathered(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """The columns of x [rows, k] in the order of the weight's."""
        assert weight.order is not None
        out = self._session.empty(x, weight.k, dtype=x.dtype)
        fields = (x.data_ptr(), weight.order.data_ptr(), out.data_ptr(), weight.k, DTYPES[x.dtype])
        self._session.run(GatherOp(self._session.rows(x), *fields), weight)
        return out
