"""Installs PyTorch's build for CPUs into this environment if the machine has no NVIDIA GPU.

    python scripts/install_torch.py INDEX

INDEX is a package index that has the build. Without this step pip takes the build for CUDA from PyPI, with gigabytes of
libraries that a CPU never uses. If the index cannot be reached, or is "", pip chooses as before. Uses only the standard
library, as it runs before anything is installed.
"""

import contextlib
import importlib.util
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

PROBE_SECONDS = 3.0
CPU_SIZE, CUDA_SIZE = "about 0.2 GB", "about 3 GB"  # downloads of torch 2.13 with its libraries


def has_nvidia_gpu(devices: Path = Path("/dev")) -> bool:
    """True if the driver has a device, or `nvidia-smi` lists one, as in WSL."""
    if any(devices.glob("nvidia[0-9]*")):
        return True
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU 0" in listed.stdout


def answers(index: str, timeout: float = PROBE_SECONDS) -> bool:
    """True if the index sends its page for torch in time. A thread asks, as looking up the name has no time limit."""
    found: list[int] = []

    def ask() -> None:
        with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(page, timeout=timeout) as response:
            found.append(response.status)

    page = index.rstrip("/") + "/torch/"
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout)
    return found == [200]


def install(index: str, *, gpu: bool, run: Callable[[Sequence[str]], int] = subprocess.call) -> str:
    """Installs the build if it is the right one. Returns a line that says which build the environment gets, and its
    size. Dependencies come later, from the index that the user has configured."""
    if gpu:
        return f"PyTorch: the build for CUDA, for the NVIDIA GPU of this machine, {CUDA_SIZE}"
    as_before = f"pip chooses the build of PyTorch: for CUDA, it is {CUDA_SIZE}"
    if not index:
        return f"TORCH_INDEX is empty: {as_before}"
    if not answers(index):
        return f"{index} did not answer within {PROBE_SECONDS:.0f} s (TORCH_INDEX names another): {as_before}"
    print(f"no NVIDIA GPU was found: PyTorch's build for CPUs comes from {index}, {CPU_SIZE}", flush=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "on"]
    status = run([*pip, "-c", "constraints.txt", "--no-deps", "--index-url", index, "torch"])
    return f"{index} has no build for this machine: {as_before}" if status else "PyTorch: the build for CPUs"


if __name__ == "__main__":
    if importlib.util.find_spec("torch") is None and sys.platform == "linux":
        print(install(sys.argv[1], gpu=has_nvidia_gpu()), flush=True)
