"""RMSNorm and LayerNorm of x + residual, by the native kernels."""

from torch import Tensor

from penstock.kernels.native.linear import DTYPES
from penstock.kernels.native.session import Session
from penstock.kernels.native.structs import NormOp


class NativeNorm:
    """Provides rms_norm, and by `centered` layer_norm (see kernels/elementwise.py)."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __call__(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        return self._norm(x, residual, weight, None, eps, offset, scale, centered=False)

    def centered(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self._norm(x, residual, weight, bias, eps, 0.0, 1.0, centered=True)

    def _norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        offset: float,
        scale: float,
        *,
        centered: bool,
    ) -> tuple[Tensor, Tensor]:
        session, width = self._session, x.shape[-1]
        normed = session.empty(x, width, dtype=x.dtype)
        total = x if residual is None else session.empty(x, width, dtype=x.dtype)
        op = NormOp(
            session.rows(x),
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            normed.data_ptr(),
            total.data_ptr(),
            width,
            eps,
            offset,
            scale,
            centered,
            DTYPES[x.dtype],
        )
        session.run(op, weight, bias)
        return normed, total
