"""Which device a command computes on: what was asked for, and what this machine has."""

from penstock.config import ConfigError, Hardware, detect_hardware
from penstock.config.gpu import detect_gpu, no_gpu, torch_has_cuda, with_gpu


def detect_device(asked: str | None) -> Hardware:
    """This machine as settings are resolved for: with "cuda" its GPU, with "cpu" its processor, with "auto" or None a
    GPU where there is one that our kernels are made for, and torch was built for CUDA.

    Raises ConfigError where a GPU was asked for and there is none, with what torch says, or it is too old.
    """
    here = detect_hardware()
    if asked == "cpu":
        return here
    gpu = detect_gpu() if torch_has_cuda() else None
    if gpu is not None and gpu.is_supported:
        return with_gpu(here, gpu)
    if asked == "cuda" and gpu is not None:
        raise ConfigError(
            f"--device is cuda, but {gpu.name} has compute capability {gpu.capability}, and 8.0 (A100, L4, H100) "
            "is the least; set --device cpu, or choose another GPU by CUDA_VISIBLE_DEVICES"
        )
    if asked == "cuda":
        raise ConfigError(no_gpu(_torch_says()))
    return here


def _torch_says() -> Exception:
    """Why there is no GPU. Imports torch, which takes seconds: only where all has failed anyway."""
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the latter of a torch without CUDA
        return error
    return RuntimeError(f"torch {torch.__version__} starts CUDA, but the driver names no device")
