"""This machine's GPUs, from the NVIDIA driver, and whether torch can use them. No torch: its import takes seconds."""

import ctypes
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from penstock.config.machine.hardware import Hardware, has_capability

DRIVER = "libcuda.so.1"
LEAST_CAPABILITY = (8, 0)  # of our kernels: they need tensor cores that multiply bf16
_NAME_BYTES = 128
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """The first of the GPUs that CUDA_VISIBLE_DEVICES lets this process use."""

    name: str
    memory: int  # bytes in all, other processes' included
    capability: str  # "9.0"
    count: int = 1  # of those that this process may use

    @property
    def is_supported(self) -> bool:
        return has_capability(self.capability, LEAST_CAPABILITY)


def detect_gpu(driver: Any = None) -> Gpu | None:
    """The first GPU, or None without a driver or a GPU. Makes no CUDA context, which would take the GPU's memory.

    `driver` is the driver's library; None: this machine's.
    """
    if driver is None:
        try:
            driver = ctypes.CDLL(DRIVER)
        except OSError:
            return None
    count, device = ctypes.c_int(0), ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None
    name, memory = ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_size_t(0)
    version = [ctypes.c_int(0), ctypes.c_int(0)]
    failed = (
        driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetName(name, _NAME_BYTES, device)
        or driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        or driver.cuDeviceGetAttribute(ctypes.byref(version[0]), _MAJOR, device)
        or driver.cuDeviceGetAttribute(ctypes.byref(version[1]), _MINOR, device)
    )
    if failed:
        return None
    capability = f"{version[0].value}.{version[1].value}"
    return Gpu(name=name.value.decode(), memory=memory.value, capability=capability, count=count.value)


def torch_has_cuda(package: Path | None = None) -> bool:
    """Whether the torch in the folder `package` has CUDA's library; None: the installed torch."""
    if package is None:
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            return False
        package = Path(spec.origin).parent
    return (package / "lib" / "libtorch_cuda.so").exists()


def no_gpu(error: Exception) -> str:
    """The error message when torch cannot start CUDA and raises `error`."""
    reason = " ".join(str(error).split(". ")[0].split()).rstrip(".")
    return (
        f"--device is cuda, but torch finds no GPU: {reason}; set --device cpu, or install an NVIDIA driver "
        "(nvidia-smi must list the GPU, and CUDA_VISIBLE_DEVICES must not hide it) and a torch that was built for CUDA"
    )


def too_few_gpus(ranks: int, gpus: int) -> str:
    """The error message when a machine has more ranks than GPUs."""
    return (
        f"{ranks} ranks of this machine need a GPU each, and it has {gpus}: set a smaller --tensor-parallel-size or "
        "--pipeline-parallel-size, let CUDA_VISIBLE_DEVICES name more GPUs, or place ranks on several machines with "
        "--distributed-executor ray"
    )


def with_gpu(here: Hardware, gpu: Gpu) -> Hardware:
    """This machine with a GPU as its device: the memory is the GPU's."""
    return replace(
        here,
        memory_total=gpu.memory,
        memory_available=gpu.memory,
        device="cuda",
        name=gpu.name,
        gpus=gpu.count,
        capability=gpu.capability,
        shared=False,
    )
