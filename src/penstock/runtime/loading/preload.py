"""Starts loading before torch is imported, which takes a second or more.

This module must not import anything that imports torch.
"""

from pathlib import Path

from penstock.config import EngineConfig, detect_hardware, size_memory
from penstock.config.memory import reserved_blocks
from penstock.families import load_spec, model_facts
from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.packer import DTYPES, NativePacking
from penstock.runtime.loading.numa import interleave_memory
from penstock.weights.matrices import MatrixReader


class Preload:
    """Sizes memory as load_cpu_runner would and, if native kernels will be used, starts to read the weights.

    Native threads read and pack the weights, on the processors that the import of torch leaves idle.
    """

    def __init__(self, config: EngineConfig) -> None:
        """For a whole model on a CPU. Raises DoesNotFit before any memory is allocated, CheckpointError,
        UnsupportedModel or OSError."""
        folder = Path(config.model)
        self.spec = spec = load_spec(folder)
        found = instruction_sets()
        facts = model_facts(spec).for_kernels(next(iter(found), ""))
        self.memory = size_memory(facts, config, detect_hardware().memory_available)
        self.num_blocks = reserved_blocks(facts, config, self.memory)
        self.matrices: MatrixReader | None = None
        if found and config.dtype in DTYPES and spec.packed:
            interleave_memory()  # before the reading threads start: they inherit the policy
            packing = NativePacking(config.dtype, config.quantization, config.quantization_group, found[0])
            self.matrices = MatrixReader(folder, spec, packing, hurry=not config.replaces)
