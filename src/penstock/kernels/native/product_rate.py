"""Measures how fast the native kernels multiply. Free of torch: a server measures it beside its engine."""

import ctypes
import time

import numpy as np

from penstock.config.weights import WeightFormat
from penstock.kernels.native.layout import Layout, native_format
from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.structs import F32, OPS, LinearOp, Matrix, RecordedOp
from penstock.kernels.native.team import ThreadTeam

SIDE = 1024  # of the weight
ROWS = 256
SECONDS = 0.15


def product_rate(fmt: WeightFormat, threads: int) -> float:
    """The operations per second of the best of several products with a weight of this format, by as many threads; a
    multiply-add is two. 0.0 without native kernels."""
    if not (found := instruction_sets()):
        return 0.0
    parts = Layout(SIDE, SIDE, fmt).empty(np.zeros)
    x, out = np.zeros((ROWS, SIDE), np.float32), np.zeros((ROWS, SIDE), np.float32)
    rows = ctypes.c_int64(ROWS)
    weight = Matrix(*(part if part is None else part.ctypes.data for part in parts.values()))
    weight.n = weight.k = SIDE
    weight.format = native_format(fmt)
    ops = (RecordedOp * 1)()
    code = next(code for code, (_, kind) in enumerate(OPS) if kind is LinearOp)
    ops[0].code = code
    op = LinearOp(
        ctypes.addressof(rows), x.ctypes.data, weight, None, None, out.ctypes.data, 0, F32, F32, scale=1.0, heads=1
    )
    setattr(ops[0].op, OPS[code][0], op)
    team = ThreadTeam(found[0], threads)
    try:
        team.run(ops, 1)
        best, end = float("inf"), time.perf_counter() + SECONDS
        while (began := time.perf_counter()) < end:
            team.run(ops, 1)
            best = min(best, time.perf_counter() - began)
    finally:
        team.close()
    return 2.0 * ROWS * SIDE * SIDE / best
