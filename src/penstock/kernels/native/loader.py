"""Loads the compiled library and finds the instruction sets it has for this processor."""

import ctypes
import logging
import os
import platform
from ctypes import c_double, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

from penstock.kernels.native.build import CPP, digest
from penstock.kernels.native.structs import PackJob, RecordedOp

LIBRARY = Path(os.environ.get("PENSTOCK_LIBRARY", Path(__file__).parent / "libpenstock.so"))  # tests use other builds
LOWER = "PENSTOCK_ISA"  # for tests and benchmarks: an instruction set below the best; "none": no native kernels

logger = logging.getLogger(__name__)


@cache
def native_library() -> ctypes.CDLL | None:
    """The loaded library, or None, with one warning, when it was not built or was built from another version."""
    if not LIBRARY.exists():
        remedy = (
            "install a C++ compiler and reinstall penstock"
            if platform.machine() == "x86_64"
            else f"there are none for {platform.machine()}"
        )
        logger.warning(
            "the native kernels were not built, so torch's are used, which are several times slower: %s", remedy
        )
        return None
    library = ctypes.CDLL(str(LIBRARY))
    library.penstock_isa.restype = ctypes.c_char_p
    library.penstock_digest.restype = ctypes.c_char_p
    library.penstock_op_bytes.restype = c_int64
    library.penstock_start.restype = c_void_p
    library.penstock_start.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.c_int)
    library.penstock_run.argtypes = (c_void_p, c_void_p, c_int64)
    library.penstock_profile.argtypes = (c_void_p, c_void_p, c_int64, ctypes.POINTER(c_double))
    library.penstock_wake.argtypes = (c_void_p,)
    library.penstock_rest.argtypes = (c_void_p,)
    library.penstock_stop.argtypes = (c_void_p,)
    library.penstock_lease_bytes.restype = c_int64
    library.penstock_lease_open.restype = c_void_p
    library.penstock_lease_open.argtypes = (c_void_p, ctypes.c_int, c_double)
    library.penstock_lease_take.argtypes = (c_void_p, c_int64)
    library.penstock_lease_wait.argtypes = (c_void_p,)
    library.penstock_lease_give.argtypes = (c_void_p,)
    library.penstock_pack.restype = c_int64
    library.penstock_pack.argtypes = (c_void_p,)
    library.penstock_dequantize.restype = c_int64
    library.penstock_dequantize.argtypes = (c_int32, c_void_p, c_int64, c_int64, c_int64, c_void_p)
    stale = CPP.is_dir() and library.penstock_digest().decode() != digest()
    if stale or library.penstock_op_bytes() != ctypes.sizeof(RecordedOp):
        logger.warning(
            "%s was built from other sources than this version's, so torch's kernels are used, which are several "
            "times slower: reinstall penstock (in a clone: make install)",
            LIBRARY,
        )
        return None
    return library


@cache
def processor_sets() -> tuple[str, ...]:
    """The instruction sets that were built and that this processor has, the best first."""
    library = native_library()
    found: list[str] = []
    while library and (name := library.penstock_isa(len(found))):
        found.append(name.decode())
    return tuple(found)


def lacks_for_amx(cpuinfo: str | Path = "/proc/cpuinfo") -> str:
    """The instructions that the kernels for AMX need besides it, and that a processor with AMX does not show, as behind
    some hypervisors; else ""."""
    try:
        lines = Path(cpuinfo).read_text().splitlines()
    except OSError:
        return ""
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return "AVX512-FP16" if "amx_bf16" in flags and "avx512_fp16" not in flags else ""


@cache
def instruction_sets() -> tuple[str, ...]:
    """The instruction sets that may be used, the best first: those of the processor, from PENSTOCK_ISA's on."""
    found, lower = processor_sets(), os.environ.get(LOWER, "")
    if lower == "none":
        return ()
    if not lower or not found:
        return found
    if lower not in found:
        raise ValueError(f"{LOWER}={lower}: this build and processor have {', '.join(found)} (or none)")
    return found[found.index(lower) :]


def pack_rows(job: PackJob) -> int:
    """Pack a job's rows without Python's lock. Returns how many of them cannot be quantised."""
    library = native_library()
    if library is None:
        raise OSError("the native kernels were not built")
    bad = int(library.penstock_pack(ctypes.byref(job)))
    if bad == -2:
        raise ValueError(f"a row of {job.row_stride} bytes is not {job.weight.k} values of its type")
    if bad < 0:
        raise MemoryError("no memory to pack weights")
    return bad
