"""Ops and their providers. Plain torch defines an op; providers compute the same faster on some machines.

Providers are chosen once, when a model is loaded, and the model sees only the functions chosen. To add a provider,
append it to its op's providers in ops.py: tests then compare it with the reference.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from penstock.kernels.native.loader import instruction_sets


@dataclass(frozen=True)
class Platform:
    """The machine, as far as providers depend on it."""

    device: str  # "cpu" or "cuda"
    capability: str  # a CPU's instruction set as torch names it ("AVX2"), or a GPU's compute capability ("9.0")
    isa: str = ""  # the instruction set of the native kernels; "" without native kernels for this machine


@dataclass(frozen=True)
class Needs:
    """Properties of a model that its kernels must support."""

    dtype: torch.dtype
    block_size: int = 16
    head_dims: tuple[int, ...] = (64,)
    deterministic: bool = False  # bits must not depend on the rest of the batch; native kernels always meet this


def detect_platform(device: str = "cpu") -> Platform:
    """The machine this process runs on."""
    if device == "cuda":
        return Platform(device, ".".join(map(str, torch.cuda.get_device_capability())))
    isa = next(iter(instruction_sets()), "")
    return Platform(device, torch.backends.cpu.get_cpu_capability(), isa)


@dataclass(frozen=True)
class Provider:
    """One implementation. `make` is called once per model and returns the function, which may own scratch memory."""

    name: str
    make: Callable[[], Any]
    supports: Callable[[Platform, Needs], bool]


def has_native(platform: Platform, needs: Needs) -> bool:
    """True if there are native kernels for the platform and a model's dtype."""
    return bool(platform.isa) and needs.dtype in (torch.float32, torch.bfloat16)


def has_triton(platform: Platform, needs: Needs) -> bool:
    """True if there are Triton kernels for a model's dtype. Their makers import triton, and nothing before does."""
    return platform.device == "cuda" and needs.dtype in (torch.float32, torch.bfloat16, torch.float16)


def has_fixed_triton(platform: Platform, needs: Needs) -> bool:
    """True if Triton kernels are needed that divide work in the same way for every batch."""
    return needs.deterministic and has_triton(platform, needs)


def reference(make: Callable[[], Any]) -> Provider:
    """The provider in plain torch, which runs everywhere."""
    return Provider("torch", make, lambda platform, needs: True)


@dataclass(frozen=True)
class Op:
    """`reference` defines the result. A provider computes the same but for rounding."""

    name: str
    reference: Provider
    providers: tuple[Provider, ...] = ()  # the best first

    def select(self, platform: Platform, needs: Needs) -> Provider:
        """The first provider that supports the platform, else the reference."""
        return next((p for p in self.providers if p.supports(platform, needs)), self.reference)
