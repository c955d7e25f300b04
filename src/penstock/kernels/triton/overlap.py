"""Programmatic dependent launch: on Hopper and later, a kernel is launched while the one before it still runs, and
waits by itself for the end of that one. This saves the time of a launch between two kernels, also in a CUDA graph."""

from functools import cache
from typing import Any

import triton
import triton.language as tl
from triton.runtime.driver import driver


@cache
def overlap() -> dict[str, bool]:
    """Returns the options of a launch of a kernel that calls `await_inputs`."""
    if triton.knobs.runtime.interpret:
        return {"OVERLAP": False}
    target: Any = driver.active.get_current_target()
    able = target.backend == "cuda" and target.arch >= 90
    return {"OVERLAP": able, "launch_pdl": able}


@triton.jit
def await_inputs(OVERLAP: tl.constexpr):
    """Waits for all kernels that were launched before. Every program calls this before it reads or writes memory: so a
    kernel ends after all kernels before it. From here on the next kernel may be launched."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
