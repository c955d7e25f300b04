"""The ops of a model: each with its reference, and with its providers, the best first.

This module is the only one that imports both the definitions (elementwise.py, linear.py, moe.py, attention.py) and the
providers. Triton, which not every machine has, is imported when a provider is made.
"""

from functools import partial

from penstock.kernels.attention import PagedAttention, ReferenceAttention
from penstock.kernels.elementwise import RmsNorm, layer_norm, rms_norm
from penstock.kernels.latent import ReferenceLatentAttention
from penstock.kernels.linear import Linear, TorchLinear
from penstock.kernels.moe import Experts, TorchExperts
from penstock.kernels.native.attention import NativeAttention, NativeLatentAttention
from penstock.kernels.native.linear import NativeLinear
from penstock.kernels.native.moe import NativeExperts
from penstock.kernels.native.norm import NativeNorm
from penstock.kernels.native.recurrence import NativeRecurrence
from penstock.kernels.native.session import native_session
from penstock.kernels.native_limits import has_whole_lines
from penstock.kernels.recurrence import product, recurrence, sigmoid_gate
from penstock.kernels.registry import Needs, Op, Platform, Provider, has_fixed_triton, has_native, has_triton, reference


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


LINEAR = Op(
    "linear",
    reference(TorchLinear),
    (
        Provider("native", lambda: NativeLinear(native_session()), has_native),
        Provider("triton_fixed", partial(_triton_linear, fixed=True), has_fixed_triton),
        Provider("triton", _triton_linear, has_triton),
    ),
)
EXPERTS = Op(
    "experts",
    reference(lambda: TorchExperts(TorchLinear())),
    (
        Provider("native", lambda: NativeExperts(native_session()), has_native),
        Provider("triton_fixed", partial(_triton_experts, fixed=True), has_fixed_triton),
        Provider("triton", _triton_experts, has_triton),
    ),
)
PAGED_ATTENTION = Op(
    "paged_attention",
    reference(ReferenceAttention),
    (
        Provider("native", lambda: NativeAttention(native_session()), _has_native_attention),
        Provider("triton_fixed", partial(_triton_attention, fixed=True), has_fixed_triton),
        Provider("triton", _triton_attention, has_triton),
    ),
)
RMS_NORM = Op(
    "rms_norm",
    reference(lambda: rms_norm),
    (
        Provider("native", lambda: NativeNorm(native_session()), has_native),
        Provider("triton", _triton_norm, has_triton),
    ),
)
LAYER_NORM = Op(
    "layer_norm",
    reference(lambda: layer_norm),
    (Provider("native", lambda: NativeNorm(native_session()).centered, has_native),),
)

# Models that need these do not run on a GPU yet.
LINEAR_BY_HEAD = Op("linear_by_head", LINEAR.reference, LINEAR.providers[:1])
LATENT_ATTENTION = Op(
    "latent_attention",
    reference(ReferenceLatentAttention),
    (Provider("native", lambda: NativeLatentAttention(native_session()), _has_native_attention),),
)
RECURRENCE = Op(
    "recurrence",
    reference(lambda: recurrence),
    (Provider("native", lambda: NativeRecurrence(native_session()), has_native),),
)
SIGMOID_GATE = Op(
    "sigmoid_gate",
    reference(lambda: sigmoid_gate),
    (Provider("native", lambda: NativeRecurrence(native_session()).sigmoid_gate, has_native),),
)
PRODUCT = Op(
    "product",
    reference(lambda: product),
    (Provider("native", lambda: NativeRecurrence(native_session()).product, has_native),),
)
