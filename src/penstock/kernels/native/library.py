"""The compiled library: its structs (see ops.h), and a team of threads that runs them."""

import ctypes
import logging
import os
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

LIBRARY = Path(os.environ.get("PENSTOCK_LIBRARY", Path(__file__).parent / "libpenstock.so"))  # another build, for tests
LOWER = "PENSTOCK_ISA"  # names an instruction set below the best, for tests; "none": no native kernels

EMBEDDING, NORM, LINEAR, ROTATION, CACHE, ATTENTION, SAMPLE, ROUTE, EXPERTS, FILL, ADVANCE, FINITE = range(12)
F32, BF16, I8 = range(3)
SCHEMES = ("f32", "bf16", "int8", "int4", "int16")
EPILOGUES = ("", "silu", "gelu_tanh")

logger = logging.getLogger(__name__)


class Matrix(ctypes.Structure):
    _fields_ = (
        ("lines", c_void_p),
        ("column_scales", c_void_p),
        ("column_sums", c_void_p),
        ("group_scales", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("scheme", c_int32),
        ("group", c_int32),
    )


class EmbeddingOp(ctypes.Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("ids", c_void_p),
        ("table", Matrix),
        ("out", c_void_p),
        ("scale", c_float),
        ("dtype", c_int32),
        ("first", c_int64),
    )


class NormOp(ctypes.Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("x", c_void_p),
        ("residual", c_void_p),
        ("weight", c_void_p),
        ("normed", c_void_p),
        ("sum", c_void_p),
        ("width", c_int64),
        ("eps", c_float),
        ("offset", c_float),
        ("dtype", c_int32),
    )


class LinearOp(ctypes.Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("x", c_void_p),
        ("weight", Matrix),
        ("bias", c_void_p),
        ("residual", c_void_p),
        ("out", c_void_p),
        ("epilogue", c_int32),
        ("dtype", c_int32),
        ("out_dtype", c_int32),
    )


class RouteOp(ctypes.Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("logits", c_void_p),
        ("experts", c_void_p),
        ("weights", c_void_p),
        ("count", c_int64),
        ("slots", c_int64),
        ("normalize", c_int32),
    )


class ExpertsOp(ctypes.Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("x", c_void_p),
        ("chosen", c_void_p),
        ("weights", c_void_p),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("aside", c_void_p),
        ("aside_gate", c_void_p),
        ("residual", c_void_p),
        ("out", c_void_p),
        ("tally", c_void_p),
        ("slots", c_int64),
        ("first", c_int64),
        ("held", c_int64),
        ("epilogue", c_int32),
        ("dtype", c_int32),
    )


class RotationOp(ctypes.Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("positions", c_void_p),
        ("frequencies", c_void_p),
        ("out", c_void_p),
        ("half", c_int64),
    )


class CacheOp(ctypes.Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("qkv", c_void_p),
        ("weight", c_void_p),
        ("rotation", c_void_p),
        ("blocks", c_void_p),
        ("offsets", c_void_p),
        ("query", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
        ("block_stride", c_int64),
        ("head_stride", c_int64),
        ("eps", c_float),
        ("offset", c_float),
        ("dtype", c_int32),
        ("page_dtype", c_int32),
    )


class AttentionOp(ctypes.Structure):
    _fields_ = (
        ("item_count", c_void_p),
        ("merge_count", c_void_p),
        ("items", c_void_p),
        ("merges", c_void_p),
        ("query_start", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("query", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("out", c_void_p),
        ("partials", c_void_p),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
        ("block_stride", c_int64),
        ("head_stride", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("dtype", c_int32),
        ("page_dtype", c_int32),
    )


class PackJob(ctypes.Structure):
    """See pack.h."""

    _fields_ = (
        ("rows", c_void_p),
        ("lines", c_void_p),
        ("column_scales", c_void_p),
        ("column_sums", c_void_p),
        ("group_scales", c_void_p),
        ("first", c_int64),
        ("count", c_int64),
        ("n", c_int64),
        ("k", c_int64),
        ("scheme", c_int32),
        ("group", c_int32),
        ("stored", c_int32),
        ("gated", c_int32),
    )


class LogitEdits(ctypes.Structure):
    _fields_ = (
        ("repetition", c_void_p),
        ("presence", c_void_p),
        ("frequency", c_void_p),
        ("bias_count", c_void_p),
        ("bias_ids", c_void_p),
        ("biases", c_void_p),
        ("ban_count", c_void_p),
        ("ban_ids", c_void_p),
        ("min_tokens", c_void_p),
        ("prompt", c_void_p),
        ("token_ids", c_void_p),
        ("most_biases", c_int64),
        ("most_bans", c_int64),
        ("most_tokens", c_int64),
    )


class PackedLogprobs(ctypes.Structure):
    _fields_ = (
        ("words", c_void_p),
        ("stride", c_int64),
    )


class SampleOp(ctypes.Structure):
    _fields_ = (
        ("count", c_void_p),
        ("rows", c_void_p),
        ("ahead", c_void_p),
        ("logits", c_void_p),
        ("vocab", c_int64),
        ("targets", c_void_p),
        ("edits", c_void_p),
        ("choosing", c_void_p),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("streams", c_void_p),
        ("outputs", c_void_p),
        ("logprobs", c_void_p),
        ("tokens", c_void_p),
        ("status", c_void_p),
        ("packed", c_void_p),
    )


class FillGroup(ctypes.Structure):
    _fields_ = (
        ("batch_tables", c_void_p),
        ("batch_stride", c_int64),
        ("tables", c_void_p),
        ("stride", c_int64),
        ("context_lens", c_void_p),
        ("blocks", c_void_p),
        ("offsets", c_void_p),
    )


class FillOp(ctypes.Structure):
    _fields_ = (
        ("sequences", c_void_p),
        ("units", c_void_p),
        ("units_stride", c_int64),
        ("batch_tokens", c_void_p),
        ("tokens_stride", c_int64),
        ("computed", c_void_p),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("groups", c_void_p),
        ("group_count", c_int64),
        ("block_size", c_int64),
    )


class AdvanceOp(ctypes.Structure):
    _fields_ = (
        ("sequences", c_void_p),
        ("units", c_void_p),
        ("units_stride", c_int64),
        ("tokens", c_void_p),
        ("batch_tokens", c_void_p),
        ("tokens_stride", c_int64),
        ("computed", c_void_p),
        ("outputs", c_void_p),
        ("accepted", c_void_p),
    )


class FiniteOp(ctypes.Structure):
    _fields_ = (("rows", c_void_p), ("x", c_void_p), ("finite", c_void_p), ("width", c_int64), ("dtype", c_int32))


class _Ops(ctypes.Union):
    _fields_ = (
        ("embedding", EmbeddingOp),
        ("norm", NormOp),
        ("linear", LinearOp),
        ("rotation", RotationOp),
        ("cache", CacheOp),
        ("attention", AttentionOp),
        ("sample", SampleOp),
        ("route", RouteOp),
        ("experts", ExpertsOp),
        ("fill", FillOp),
        ("advance", AdvanceOp),
        ("finite", FiniteOp),
    )


class Op(ctypes.Structure):
    _fields_ = (("code", c_int32), ("op", _Ops))


@cache
def _library() -> ctypes.CDLL | None:
    """None where nothing was built, or what was built is of other sources; says so once."""
    if not LIBRARY.exists():
        logger.warning(
            "the native kernels were not built, torch's are used and are several times slower: "
            "install a C++ compiler and reinstall penstock"
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
    library.penstock_stop.argtypes = (c_void_p,)
    library.penstock_pack.restype = c_int64
    library.penstock_pack.argtypes = (c_void_p,)
    if library.penstock_op_bytes() != ctypes.sizeof(Op):
        logger.warning("%s is of another version of penstock: reinstall it; torch's kernels are used", LIBRARY)
        return None
    return library


def built_from() -> str:
    """The digest of the sources that the library was built from; "" without a library."""
    library = _library()
    return library.penstock_digest().decode() if library else ""


@cache
def instruction_sets() -> tuple[str, ...]:
    """Those that were built and that this processor has, the best first; PENSTOCK_ISA takes the better ones away."""
    library = _library()
    found: list[str] = []
    while library and (name := library.penstock_isa(len(found))):
        found.append(name.decode())
    lower = os.environ.get(LOWER, "")
    if lower == "none":
        return ()
    if lower and found:
        if lower not in found:
            raise ValueError(f"{LOWER}={lower}: this build and processor have {', '.join(found)} (or none)")
        return tuple(found[found.index(lower) :])
    return tuple(found)


def pack_rows(job: PackJob) -> int:
    """Run a job; other Python threads go on meanwhile. Returns how many of its rows cannot be quantised."""
    library = _library()
    if library is None:
        raise OSError("the native kernels were not built")
    bad = int(library.penstock_pack(ctypes.byref(job)))
    if bad < 0:
        raise MemoryError("no memory to pack weights")
    return bad


class Engine:
    """A team of threads. One thread calls it."""

    def __init__(self, isa: str, threads: int, cpus: Sequence[int] = ()) -> None:
        """Pins the threads, the calling one first, to `cpus` where there are as many."""
        library = _library()
        self._library = library
        self._handle = library and library.penstock_start(
            isa.encode(), threads, (ctypes.c_int * len(cpus))(*cpus), len(cpus)
        )
        if not library or not self._handle:
            raise OSError(f"could not start {threads} threads with {isa} kernels")
        self.isa, self.threads = isa, threads

    def run(self, ops: Any, count: int) -> None:
        """Run so many ops in order, of an array or from a place in it on. Raises MemoryError where scratch memory was
        refused."""
        assert self._library is not None
        if self._library.penstock_run(self._handle, ops, count):
            raise MemoryError("no memory for the native kernels' scratch")

    def profile(self, ops: Any, count: int) -> list[float]:
        """Run so many ops in order; gives the seconds that each took. Raises as `run` does."""
        assert self._library is not None
        seconds = (c_double * count)()
        if self._library.penstock_profile(self._handle, ops, count, seconds):
            raise MemoryError("no memory for the native kernels' scratch")
        return list(seconds)

    def wake(self) -> None:
        """Have threads that sleep wait awake for what is run soon: waking takes them longer than a step's inputs."""
        assert self._library is not None
        self._library.penstock_wake(self._handle)

    def close(self) -> None:
        if self._handle and self._library:
            self._library.penstock_stop(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()
