"""Chooses the device of a command from --device and what this machine has."""

from penstock.config import ConfigError, Hardware, detect_hardware
from penstock.config.gpu import detect_gpu, no_gpu, torch_has_cuda, with_gpu


def detect_device(asked: str | None) -> Hardware:
    """The hardware that settings are resolved for.

    "cuda" gives the GPU, "cpu" the processor. "auto" and None give a GPU if the kernels support it and torch was built
    for CUDA, else the processor. Raises ConfigError if "cuda" finds no GPU or one that is too old.
    """
    here = detect_hardware()
    if asked == "cpu":
        return here
    gpu = detect_gpu() if torch_has_cuda() else None
    if gpu is not None and gpu.is_supported:
        return with_gpu(here, gpu)
    if asked == "cuda" and gpu is not None:
        raise ConfigError(
            f"--device is cuda, but {gpu.name} has compute capability {gpu.capability} and the kernels need "
            "8.0 (A100, L4, H100) or higher; set --device cpu, or choose another GPU by CUDA_VISIBLE_DEVICES"
        )
    if asked == "cuda":
        raise ConfigError(no_gpu(_torch_says()))
    return here


def _torch_says() -> Exception:
    """Torch's error about the missing GPU. Imports torch, which takes seconds, so call it only for an error message."""
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
        return error
    return RuntimeError(f"torch {torch.__version__} starts CUDA, but the driver names no device")
