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
    if target.backend != "cuda" or target.arch < 90:
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


@triton.jit
def await_inputs(OVERLAP: tl.constexpr, EARLY: tl.constexpr = True):
    """Waits for all kernels that were launched before. Every program calls this before it reads or writes memory: so a
    kernel ends after all kernels before it.

    With EARLY the next kernel may be launched from here on, else at the end of this one. A product of which each
    multiprocessor has several programs is not EARLY: if another follows, most of its programs are placed while this one
    runs, and the last ones on the few multiprocessors that end first."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
