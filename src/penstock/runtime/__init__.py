"""The runtime: executes plans on this machine, with a persistent batch, paged KV and a sampler."""

from penstock.runtime.device_runner import DeviceRunner
from penstock.runtime.load import load_host_runner, load_runner
from penstock.runtime.runner import ModelRunner

__all__ = ["DeviceRunner", "ModelRunner", "load_host_runner", "load_runner"]
