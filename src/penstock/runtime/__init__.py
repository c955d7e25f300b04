"""The runtime: executes plans on this machine, with a persistent batch, paged KV and a sampler.

What is named here is imported when it is first asked for: a process that has groundwork to do need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.runtime.device_runner import DeviceRunner
    from penstock.runtime.load import load_host_runner, load_runner
    from penstock.runtime.load_device import load_gpu_runner
    from penstock.runtime.runner import ModelRunner

__all__ = ["DeviceRunner", "ModelRunner", "load_gpu_runner", "load_host_runner", "load_runner"]


def __getattr__(name: str) -> Any:
    places = {
        "DeviceRunner": "device_runner",
        "ModelRunner": "runner",
        "load_gpu_runner": "load_device",
        "load_host_runner": "load",
        "load_runner": "load",
    }
    if name not in places:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{places[name]}"), name)
