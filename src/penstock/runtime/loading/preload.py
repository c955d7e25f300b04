"""Loading that begins before torch is imported, which takes a second or more.

Nothing may be imported here that imports torch.
"""

from pathlib import Path

from penstock.config import EngineConfig, detect_hardware, size_memory
from penstock.families import load_spec, model_facts
from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.packer import DTYPES, NativePacking
from penstock.runtime.loading.numa import interleave_memory
from penstock.weights.matrices import MatrixReader


class Preload:
    """Sizes memory as load_cpu_runner would and, where native kernels will use them, starts to read the weights.

    Native threads read and pack them; they take what the import leaves of the processors.
    """

    def __init__(self, config: EngineConfig) -> None:
        """For a whole model on a CPU. Raises DoesNotFit before any memory is taken, CheckpointError, UnsupportedModel
        and OSError."""
        folder = Path(config.model)
        spec = load_spec(folder)
        self.memory = size_memory(model_facts(spec), config, detect_hardware().memory_available)
        self.matrices: MatrixReader | None = None
        if (found := instruction_sets()) and config.dtype in DTYPES:
            interleave_memory()  # the threads inherit it
            packing = NativePacking(config.dtype, config.quantization, config.quantization_group, found[0])
            self.matrices = MatrixReader(folder, spec, packing)
