"""Products with weights: dense ones of more than a few rows by torch (cuBLAS on a GPU), others by Triton kernels."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.elementwise import embedding
from penstock.kernels.linear import SMALL_WEIGHT, UNGATED, DenseWeight, scaled_logits
from penstock.kernels.triton.coded import coded_linear, coded_rows
from penstock.kernels.triton.dense import dense_linear
from penstock.kernels.triton.eight_bits import eight_bit_linear
from penstock.kernels.triton.gate import gate, quantized_gate
from penstock.kernels.triton.quantized import QuantizedRows, quantize_rows
from penstock.kernels.triton.weights import CodedWeight, JoinedWeight, QuantizedWeight, Weight

OWN_ROWS = 16  # so few rows are multiplied with dense weights by our kernel: it is launched early (see overlap.py)

Rows = Tensor | QuantizedRows


class TritonLinear:
    """Provides Linear (see kernels/linear.py) for dense weights and for those of weights.py.

    Rows for an 8-bit weight may be quantised already: by the norm before it, or by `gated`, for a weight of the same
    scheme.

    With `fixed`, the bits of a row do not depend on the number of rows: products are divided in one way, and torch's
    library, which chooses by that number, is not used.
    """

    def __init__(self, *, fixed: bool = False) -> None:
        self._fixed = fixed

    def pack(self, weight: Tensor | Weight, bias: Tensor | None = None, *, gated: bool = False) -> Weight:
        if isinstance(weight, Tensor):
            return DenseWeight(weight, bias)
        if bias is None:
            return weight
        if isinstance(weight, JoinedWeight):
            biases = bias.split([section.shape[0] for section in weight.sections])
            sections = zip(weight.sections, biases, strict=True)
            return JoinedWeight(tuple(replace(section, bias=own) for section, own in sections))
        return replace(weight, bias=bias)

    def __call__(self, x: Rows, weight: Weight, residual: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        if scale == 1.0:
            return self._multiply(x, weight, residual, None)
        product = self._multiply(x, weight, None, None).mul_(scale)
        return product if residual is None else product.add_(residual)

    def activated(self, x: Rows, weight: Weight, activation: str) -> Tensor:
        return UNGATED[activation](self._multiply(x, weight, None, None))

    def gated(self, x: Rows, weight: Weight, activation: str) -> Rows:
        product = self._multiply(x, weight, None, None)
        if isinstance(weight, QuantizedWeight):
            return quantized_gate(product, activation, weight.values.dtype)
        return gate(product, activation)

    def logits(self, x: Rows, weight: Weight, *, scale: float = 1.0, softcap: float = 0.0) -> Tensor:
        return scaled_logits(self._logits(x, weight), scale, softcap)

    def _logits(self, x: Rows, weight: Weight) -> Tensor:
        """A small weight, such as a router's, gives fp32 at once: rounding to x's dtype could choose another expert."""
        if isinstance(weight, DenseWeight) and isinstance(x, Tensor) and weight.weight.numel() <= SMALL_WEIGHT:
            return dense_linear(x, weight, None, torch.float32)
        return self._multiply(x, weight, None, torch.float32)

    def rows(
        self, token_ids: Tensor, weight: Weight, scale: float, dtype: torch.dtype, *, first: int | None = None
    ) -> Tensor:
        if isinstance(weight, DenseWeight):
            return embedding(token_ids, weight.weight, scale, first)
        if isinstance(weight, JoinedWeight):
            raise ValueError("an embedding has one format")
        if isinstance(weight, CodedWeight):
            found = coded_rows(token_ids, weight, dtype, first or 0)
        else:
            found = _quantized_rows(token_ids - (first or 0), weight, dtype)
        return found if scale == 1.0 else found.mul_(torch.tensor(scale, dtype=dtype))

    def _multiply(self, x: Rows, weight: Weight, residual: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        """x weight^T in the dtype, by default that of the activations."""
        if isinstance(weight, QuantizedWeight):
            rows = quantize_rows(x, weight.values.dtype) if isinstance(x, Tensor) else x
            return eight_bit_linear(rows, weight, residual, dtype or x.dtype, fixed=self._fixed)
        if isinstance(x, QuantizedRows):
            raise ValueError("quantised rows are multiplied with weights of eight bits alone")
        if isinstance(weight, JoinedWeight):
            return self._sections(x, weight, residual, dtype or x.dtype)
        if isinstance(weight, CodedWeight):
            return coded_linear(x, weight, residual, dtype or x.dtype, fixed=self._fixed)
        if self._fixed or _are_few(x, weight.weight):
            return dense_linear(x, weight, residual, dtype or x.dtype, fixed=self._fixed)
        product = F.linear(x, weight.weight, weight.bias)
        if residual is not None:
            product.add_(residual)
        return product if dtype is None else product.to(dtype)

    def _sections(self, x: Tensor, weight: JoinedWeight, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Writes the product of each section into its columns of the output."""
        sizes = [section.shape[0] for section in weight.sections]
        out = torch.empty(len(x), sum(sizes), dtype=dtype, device=x.device)
        for section, columns in zip(weight.sections, out.split(sizes, 1), strict=True):
            if isinstance(section, CodedWeight):
                coded_linear(x, section, None, dtype, fixed=self._fixed, out=columns)
            else:
                columns.copy_(self._multiply(x, section, None, dtype))
        return out if residual is None else out.add_(residual)


def _are_few(x: Tensor, weight: Tensor) -> bool:
    plain = x.dim() == 2 and x.stride(1) == 1 and weight.is_contiguous()
    return plain and len(x) <= OWN_ROWS and x.itemsize == 2


def _quantized_rows(own: Tensor, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Returns rows by their number, and zeros for numbers that are not in the weight."""
    elsewhere = (own < 0) | (own >= len(weight.values))
    own = own.masked_fill(elsewhere, 0)
    # As bytes, since torch gathers few 8-bit types.
    values = weight.values.view(torch.uint8).index_select(0, own).view(weight.values.dtype)
    scales = weight.scales.index_select(0, own).masked_fill(elsewhere, 0.0)
    return (values.float() * scales[:, None]).to(dtype)
