"""Measures a decode step of a layer with a state against its roofline: the state is read and written once.

python benchmarks/states.py --json benchmarks/results/avx512_bf16/states.json
"""

import math
import os
import statistics
import time
from ctypes import c_int64

import torch
from results import parser, write

from penstock.engine.processors import running_on
from penstock.kernels.batch_arrays import BATCH_ROW, CONTEXT, FIRST, LENGTH, UNIT_LINES
from penstock.kernels.native.recurrence import NativeRecurrence
from penstock.kernels.native.session import Program, Session, native_session
from penstock.kernels.recurrence import RecurrenceWeights
from penstock.runtime.pages import allocate

# key heads, value heads, key dim, value dim, taps, whether it is Mamba 2: layers of real models
SHAPES = {
    "Qwen3-Next, Qwen 3.5": (16, 32, 128, 128, 4, False),
    "Granite 4.0 H Tiny": (1, 48, 128, 64, 4, True),
}
LAYERS = 32  # states that are used in turn: together they are larger than any cache
POSITION = 100  # tokens before


def layers(shape: str, rows: int, session: Session) -> tuple[Program, int]:
    """A program of a decode step of `rows` sequences in each of the layers, and the bytes that a layer must read and
    write."""
    key_heads, heads, key_dim, value_dim, taps, mamba = SHAPES[shape]
    width = heads * value_dim
    channels = 2 * key_heads * key_dim + width
    weights = RecurrenceWeights(
        conv=torch.randn(taps, channels),
        conv_bias=torch.randn(channels) if mamba else None,
        decay=-torch.rand(heads),
        step_bias=torch.randn(heads),
        skip=torch.ones(heads) if mamba else None,
        norm=torch.ones(width if mamba else value_dim),
        key_heads=key_heads,
        key_dim=key_dim,
        norm_width=width if mamba else value_dim,
        eps=1e-6,
    )
    states = ones(LAYERS, rows, weights.matrices + (taps - 1) * channels)
    inputs = torch.randn(rows, channels + width).bfloat16()
    rates = torch.randn(rows, heads if mamba else 2 * heads)
    units = torch.zeros(UNIT_LINES, rows, dtype=torch.int32)
    units[FIRST] = units[BATCH_ROW] = torch.arange(rows)
    units[LENGTH], units[CONTEXT] = 1, POSITION
    function, count = NativeRecurrence(session), c_int64(rows)
    with session.record() as program:
        for tensor in (inputs, rates, units):
            program.input(tensor, count)
        for each in states:
            function(inputs, rates, units.T, each, weights)
    return program, 2 * states[0].nbytes


def ones(*shape: int) -> torch.Tensor:
    """In memory like that of states."""
    return allocate(math.prod(shape) * 4, torch.device("cpu")).view(torch.float32).view(shape).fill_(1.0)


def streamed(data: torch.Tensor) -> float:
    """The median seconds in which the simplest loop there is reads and writes a row of `data`."""
    times = []
    for row in data:
        began = time.perf_counter()
        row.mul_(1.0)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure(session: Session, shape: str, rows: int, rounds: int) -> dict:
    """The time of a step in a layer, and its ratio to the loop's, which takes turns with it."""
    program, size = layers(shape, rows, session)
    data = ones(LAYERS, size // 8)
    found = [(statistics.median(program.profile()), streamed(data)) for _ in range(rounds)]
    ours, least = (statistics.median(each) for each in zip(*found, strict=True))
    return {
        "threads": torch.get_num_threads(),
        "layer": shape,
        "sequences": rows,
        "bytes": size,
        "us": round(ours * 1e6, 1),
        "gb_s": round(size / least / 1e9, 2),
        "times_roofline": round(statistics.median(one / other for one, other in found), 2),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 32])
    options.add_argument("--rounds", type=int, default=15)
    given = options.parse_args()
    cpus, figures = sorted(os.sched_getaffinity(0)), []
    for threads in given.threads:
        torch.set_num_threads(threads)
        ones(1 << 22).mul_(1.0)  # torch's threads start before the session pins this one, whose processors they inherit
        session = native_session(threads=threads)
        with running_on(set(cpus[-threads:])):
            figures += [measure(session, shape, rows, given.rounds) for shape in SHAPES for rows in given.rows]
    write({"layers": LAYERS, "figures": figures}, given.json)


if __name__ == "__main__":
    main()
