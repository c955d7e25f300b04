"""Loads a runner of a whole model on the device that the configuration names."""

from penstock.config import EngineConfig
from penstock.runtime.loading.preload import Preload
from penstock.runtime.runner import ModelRunner


def load_runner(config: EngineConfig, preload: Preload | None = None, *, progress: bool = True) -> ModelRunner:
    """Loads a whole model. Raises what `load_cpu_runner` and `load_gpu_runner` raise."""
    if config.device == "cuda":
        from penstock.runtime.loading.gpu import load_gpu_runner  # imported here: a CPU runner does not need it

        return load_gpu_runner(config, progress=progress)
    from penstock.runtime.loading.cpu import load_cpu_runner

    return load_cpu_runner(config, preload=preload, progress=progress)
