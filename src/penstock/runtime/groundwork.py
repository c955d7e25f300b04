"""What can be done for loading a model before torch is there, whose import takes a second or more.

Here nothing may be imported that imports it.
"""

import threading
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.config import EngineConfig, detect_hardware, size_memory
from penstock.config.weights import weights_bytes
from penstock.families import load_spec, model_facts
from penstock.runtime.numa import interleave_memory

PAGE = 4096
STEP = 32 << 20  # bytes made resident between two looks at whether to go on: the interpreter is busy importing
ALIGNMENT_ROOM = 1 << 20  # weights begin on cache lines: for more of them than any model has


class Groundwork:
    """Memory is divided, as load_host_runner would; and that of the weights made resident, beside other work.

    A page costs a fault when it is first written, and on a virtual machine the host may have to find it too: up to
    three seconds a gigabyte. They are written to, and not asked for by MADV_POPULATE_WRITE, as that holds the lock of
    the address space, for which every import that maps a file would wait.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Of a whole model, on a CPU. Raises DoesNotFit before any memory is taken, UnsupportedModel and OSError."""
        facts = model_facts(load_spec(Path(config.model)))
        self.memory = size_memory(facts, config, detect_hardware().memory_available)
        size = weights_bytes(facts, config)
        # From NumPy, which asks for huge pages.
        self._weights: NDArray[np.uint8] | None = np.empty(size + ALIGNMENT_ROOM, np.uint8)
        self._enough = threading.Event()
        interleave_memory()  # the thread inherits it
        self._thread = threading.Thread(
            target=self._touch, args=(self._weights[:size],), name="first-touch", daemon=True
        )
        self._thread.start()

    def weights(self) -> NDArray[np.uint8]:
        """The memory, as far as it is resident by now; the caller's alone. To be called once."""
        self._enough.set()
        self._thread.join()
        weights, self._weights = self._weights, None
        if weights is None:
            raise RuntimeError("the memory for the weights was taken already")
        return weights

    def _touch(self, memory: NDArray[np.uint8]) -> None:
        for start in range(0, len(memory), STEP):
            if self._enough.is_set():
                return
            memory[start : start + STEP : PAGE] = 0
