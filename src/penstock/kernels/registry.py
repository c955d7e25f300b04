"""An op: one meaning, given in plain torch, and any number of providers that compute it faster somewhere.

The platform is looked at once, when a model's kernels are selected; a model only ever sees the functions chosen. To add
a provider, append it to its op's `providers`: the parametrised test then holds it against the reference.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.kernels.native.loader import instruction_sets


@dataclass(frozen=True)
class Platform:
    """What providers may ask of the machine."""

    device: str  # "cpu" or "cuda"
    capability: str  # torch's name of the instruction set: "AVX2", "AVX512", ...; of a GPU its number: "9.0"
    isa: str = ""  # the instruction set of the native kernels; "": there are none for this machine


@dataclass(frozen=True)
class Needs:
    """What a model asks of its kernels."""

    dtype: torch.dtype
    block_size: int = 16
    head_dims: tuple[int, ...] = (64,)
    deterministic: bool = False  # that bits do not depend on what else is in a batch; on a CPU they never do
    attention: str = "auto"  # whose attention, where there are several: "triton" or "flashinfer"; auto: the first


def detect_platform(device: str = "cpu") -> Platform:
    """The machine this process runs on."""
    if device == "cuda":
        return Platform(device, ".".join(map(str, torch.cuda.get_device_capability())))
    isa = next(iter(instruction_sets()), "")
    return Platform(device, torch.backends.cpu.get_cpu_capability(), isa)


@dataclass(frozen=True)
class Provider:
    """One implementation. `make` is called once per model and gives the function, with whatever scratch it owns."""

    name: str
    make: Callable[[], Any]
    supports: Callable[[Platform, Needs], bool]


def has_native(platform: Platform, needs: Needs) -> bool:
    """Whether there are native kernels for a model's dtype."""
    return bool(platform.isa) and needs.dtype in (torch.float32, torch.bfloat16)


def has_triton(platform: Platform, needs: Needs) -> bool:
    """Whether there are Triton kernels for a model's dtype. Their makers import triton, and nothing before does."""
    return platform.device == "cuda" and needs.dtype in (torch.float32, torch.bfloat16, torch.float16)


def has_fixed_triton(platform: Platform, needs: Needs) -> bool:
    """Whether these are to be the ones that cut up work alike whatever is in a batch."""
    return needs.deterministic and has_triton(platform, needs)


def normals(dtype: torch.dtype, seed: int) -> Callable[..., torch.Tensor]:
    """For input generators: a function from a shape to normal numbers, the next ones at each call."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator).to(dtype)


def reference(make: Callable[[], Any]) -> Provider:
    """Plain torch, which runs everywhere."""
    return Provider("torch", make, lambda platform, needs: True)


def call(function: Any, arguments: tuple[Any, ...]) -> Any:
    """How most ops are run on generated inputs."""
    return function(*arguments)


@dataclass(frozen=True)
class Op:
    """`reference` defines the result; a provider's may differ by `tolerance[dtype]`, relative to the largest value.

    `inputs` draws argument tuples of a dtype from a seed: odd sizes, one row, none. `run` applies a provider's
    function to one of them and gives the tensors to compare.
    """

    name: str
    reference: Provider
    tolerance: Mapping[torch.dtype, float]
    inputs: Callable[[torch.dtype, int], Iterator[tuple[Any, ...]]]
    providers: tuple[Provider, ...] = ()  # the best first
    run: Callable[[Any, tuple[Any, ...]], Any] = call

    def select(self, platform: Platform, needs: Needs) -> Provider:
        """The first provider that supports the platform, else the reference."""
        return next((p for p in self.providers if p.supports(platform, needs)), self.reference)


EXACT: Mapping[torch.dtype, float] = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0}
ROUNDING: Mapping[torch.dtype, float] = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
