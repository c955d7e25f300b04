"""Chooses the device that a command runs on: the GPU or the processor."""

from msgspec.structs import replace

from penstock.config import ConfigError, Hardware, detect_hardware
from penstock.config.machine.gpu import detect_gpu, no_gpu, torch_has_cuda, with_gpu
from penstock.prepare.promises import promised


def detect_device(asked: str | None) -> Hardware:
    """Returns the hardware that settings are resolved for. `asked` is the value of --device.

    "cuda" selects the GPU, and "cpu" the processor. "auto" and None select the GPU if the kernels support it and torch
    was built for CUDA, else the processor. Raises ConfigError for "cuda" if no GPU can be used or the GPU is too old.
    """
    here = detect_hardware()
    others = promised()
    here = replace(here, memory_available=max(here.memory_available - others, 0), promised=others)
    if asked == "cpu":
        return here
    gpu = detect_gpu() if torch_has_cuda() else None
    if gpu is not None and gpu.is_supported:
        return with_gpu(here, gpu)
    if asked == "cuda" and gpu is not None:
        raise ConfigError(
            f"--device is cuda, but {gpu.name} has compute capability {gpu.capability} and the kernels need "
            "8.0 (A100, L4, H100) or higher; set --device cpu, or choose another GPU with CUDA_VISIBLE_DEVICES"
        )
    if asked == "cuda":
        raise ConfigError(no_gpu(_cuda_error()))
    return here


def _cuda_error() -> Exception:
    """Returns the reason why torch cannot use a GPU. Importing torch takes seconds, so this runs only before an error
    message."""
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
        return error
    return RuntimeError(f"torch {torch.__version__} can start CUDA, but the NVIDIA driver reports no usable GPU")
