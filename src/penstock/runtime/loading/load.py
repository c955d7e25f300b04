"""Loads a runner of a whole model on the device that the configuration names."""

from pathlib import Path

from penstock.config import EngineConfig, detect_hardware, size_memory
from penstock.families import load_spec, model_facts
from penstock.runtime.encoder_runner import EncoderRunner
from penstock.runtime.loading.preload import Preload
from penstock.runtime.runner import ModelRunner


def load_runner(
    config: EngineConfig, preload: Preload | None = None, *, progress: bool = True
) -> ModelRunner | EncoderRunner:
    """Loads a whole model. Raises what `load_cpu_runner` and `load_gpu_runner` raise."""
    spec = load_spec(Path(config.model)) if preload is None else preload.spec
    if spec.encoder is not None:
        from penstock.runtime.loading.encoder import load_encoder

        if preload is not None:
            memory = preload.memory
        else:
            memory = size_memory(model_facts(spec), config, detect_hardware().memory_available)
        return load_encoder(config, spec, memory.rows, progress=progress)
    if config.device == "cuda":
        from penstock.runtime.loading.gpu import load_gpu_runner  # imported here: a CPU runner does not need it

        return load_gpu_runner(config, progress=progress)
    from penstock.runtime.loading.cpu import load_cpu_runner

    return load_cpu_runner(config, preload=preload, progress=progress)
