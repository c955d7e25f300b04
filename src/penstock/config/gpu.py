"""What the NVIDIA driver says of this machine's GPUs, and whether torch can use them. No torch: it takes seconds."""

import ctypes
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from penstock.config.hardware import Hardware, has_capability

DRIVER = "libcuda.so.1"
LEAST_CAPABILITY = (8, 0)  # that our kernels are made for: tensor cores that multiply bf16
_NAME_BYTES = 128
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """The first GPU that this process may use: CUDA_VISIBLE_DEVICES says which these are."""

    name: str
    memory: int  # bytes in all, others' included
    capability: str  # "9.0"
    count: int = 1  # of those that this process may use

    @property
    def able(self) -> bool:
        """Whether our kernels run on it."""
        return has_capability(self.capability, LEAST_CAPABILITY)


def detect_gpu(driver: Any = None) -> Gpu | None:
    """None where there is no driver, or no GPU to use. Makes no CUDA context, so that nothing of a GPU is taken.

    `driver` is the driver's library; None: that of this machine.
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
    """Whether the torch that is installed was built for CUDA, by what lies in its folder; `package` for another one."""
    if package is None:
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            return False
        package = Path(spec.origin).parent
    return (package / "lib" / "libtorch_cuda.so").exists()


def no_gpu(error: Exception) -> str:
    """Why there is nothing to compute on, by what torch raised when it was to start CUDA, and what to do."""
    said = " ".join(str(error).split(". ")[0].split()).rstrip(".")
    return (
        f"--device is cuda, but torch finds no GPU: {said}; set --device cpu, or see to an NVIDIA driver (nvidia-smi "
        "must list the GPU, and CUDA_VISIBLE_DEVICES not hide it) and a torch that was built for CUDA"
    )


def too_few_gpus(ranks: int, gpus: int) -> str:
    """What is wrong where more ranks are to be on a machine than it has GPUs, and what to do."""
    return (
        f"{ranks} ranks of this machine need a GPU each, and it has {gpus}: set a smaller --tensor-parallel-size or "
        "--pipeline-parallel-size, let CUDA_VISIBLE_DEVICES name more GPUs, or place ranks on several machines with "
        "--distributed-executor ray"
    )


def with_gpu(here: Hardware, gpu: Gpu) -> Hardware:
    """This machine, computing on a GPU: the memory that counts is the GPU's."""
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
