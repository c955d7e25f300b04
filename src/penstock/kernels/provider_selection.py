"""Chooses the provider of each op for a model on a machine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.kernels.attention import AttentionBatch, PagedAttention
from penstock.kernels.elementwise import LayerNorm, RmsNorm
from penstock.kernels.latent import LatentAttention
from penstock.kernels.linear import Linear
from penstock.kernels.moe import Experts
from penstock.kernels.native.loader import lacks_for_amx
from penstock.kernels.native.session import Session, native_session
from penstock.kernels.native_limits import unsupported_int8_pages
from penstock.kernels.ops import (
    EXPERTS,
    LATENT_ATTENTION,
    LAYER_NORM,
    LINEAR,
    LINEAR_BY_HEAD,
    PAGED_ATTENTION,
    PRODUCT,
    RECURRENCE,
    RMS_NORM,
    SIGMOID_GATE,
)
from penstock.kernels.packers import (
    CannotQuantize,
    CodePacker,
    DensePacker,
    Packer,
    Packing,
    ScaledPacker,
    select_packing,
)
from penstock.kernels.recurrence import Recurrence, RecurrenceWeights
from penstock.kernels.registry import Needs, Op, Platform, Provider, detect_platform
from penstock.kernels.routing import Routing, Scoring, SharedExpertOutput


@dataclass(frozen=True)
class Kernels:
    """The functions that a model calls. Signatures and meaning are those of the protocols and of the references."""

    linear: Linear
    linear_by_head: Callable[[Tensor, Any, int], Tensor]
    rms_norm: RmsNorm
    layer_norm: LayerNorm  # of the provider of rms_norm, or in torch
    attention: PagedAttention
    latent_attention: LatentAttention
    experts: Experts
    recurrence: Recurrence
    sigmoid_gate: Callable[[Tensor, Tensor], Tensor]
    product: Callable[[Tensor, Tensor], Tensor]
    fingerprint: str  # which provider computes which op: results of equal fingerprints can be compared bit for bit
    session: Session | None = None  # records the ops; None unless all providers are native

    @property
    def summary(self) -> str:
        """The providers, for people: "native kernels for avx512". It says so if AMX is there and cannot be used."""
        *_, isa = self.fingerprint.partition("isa=")
        if self.session is None:
            return f"kernels {self.fingerprint}"
        lacks = lacks_for_amx() if isa == "avx512_bf16" else ""
        return f"native kernels for {isa}" + (
            f" (those for AMX need {lacks}, which this machine hides)" if lacks else ""
        )

    def norm_before(self, weight: Any) -> RmsNorm:
        """`rms_norm` for rows that only products with `weight` read: they may come quantised, as these read them."""
        before = getattr(self.rms_norm, "before", None)
        return self.rms_norm if before is None else before(weight)


def select_kernels(platform: Platform, needs: Needs) -> Kernels:
    """Select the best provider of every op for a model's needs."""
    chosen = {op.name: op.select(platform, needs) for op in (LINEAR, RMS_NORM, PAGED_ATTENTION, EXPERTS)}
    fingerprint = ",".join(f"{name}={provider.name}" for name, provider in chosen.items())
    if platform.isa:
        fingerprint += f",isa={platform.isa}"
    linear, rms_norm, attention, experts = (provider.make() for provider in chosen.values())
    others = (LINEAR_BY_HEAD, LAYER_NORM, LATENT_ATTENTION, RECURRENCE, SIGMOID_GATE, PRODUCT)
    by_head, layer_norm, latent, states, gate, product = (op.select(platform, needs).make() for op in others)
    native = all(provider.name == "native" for provider in chosen.values())
    session = native_session() if native else None
    vectors = rms_norm, layer_norm
    return Kernels(
        linear, by_head.by_head, *vectors, attention, latent, experts, states, gate, product, fingerprint, session
    )


def check_kv_dtype(platform: Platform, needs: Needs, kv_dtype: str) -> None:
    """Raise CannotQuantize if no attention on this platform reads pages of the dtype (torch's name of it)."""
    if kv_dtype == "float8_e4m3fn":
        _check_fp8_pages(platform, needs)
    if kv_dtype == "int8" and PAGED_ATTENTION.select(platform, needs).name != "native":
        raise CannotQuantize(unsupported_int8_pages(needs.block_size, needs.head_dims))


def _check_fp8_pages(platform: Platform, needs: Needs) -> None:
    provider = PAGED_ATTENTION.select(platform, needs).name
    if provider not in ("triton", "triton_fixed"):
        raise CannotQuantize(
            f"--kv-cache-dtype fp8 needs the attention of our GPU kernels, but on this {platform.device} device it is "
            f"{provider}; leave it at auto"
        )
    if odd := [dim for dim in needs.head_dims if dim % 4]:  # 4-byte scales lie behind each head's bytes
        raise CannotQuantize(
            f"--kv-cache-dtype fp8 needs head sizes that are multiples of 4, not {odd[0]}; leave it at auto"
        )


__all__ = [
    "AttentionBatch",
    "CannotQuantize",
    "CodePacker",
    "DensePacker",
    "Experts",
    "Kernels",
    "Linear",
    "Needs",
    "Op",
    "Packer",
    "Packing",
    "PagedAttention",
    "Platform",
    "Provider",
    "RecurrenceWeights",
    "Routing",
    "ScaledPacker",
    "Scoring",
    "SharedExpertOutput",
    "check_kv_dtype",
    "detect_platform",
    "select_kernels",
    "select_packing",
]
