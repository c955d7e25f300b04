"""Measures the peak rates of a GPU."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from gpu_figures.roofline import Peaks

COPY_BYTES = 4 << 30
SIZE = 8192  # rows and columns of the matrices
REPLAYS = 7


def seconds_of(runs: Sequence[Callable[[], object]], device: torch.device, replays: int = REPLAYS) -> float:
    """Seconds of one run, on average over `runs`. Each has its own inputs, so that no input is in a cache.

    On a GPU the runs are captured and replayed, so that host time does not count. The median of the replays is taken.
    """
    for run in runs:  # warm-up: kernels are compiled and libraries allocate memory
        run()
    if device.type != "cuda":
        began = time.perf_counter()
        for run in runs:
            run()
        return (time.perf_counter() - began) / len(runs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    graph.replay()
    times = []
    for _ in range(replays):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(float(first.elapsed_time(last)) / 1e3 / len(runs))
    return median(times)


def measure(device: torch.device, size: int = SIZE, copy_bytes: int = COPY_BYTES) -> Peaks:
    """Measures a large copy and products of random matrices. Products of zeros would be faster than real ones."""
    bandwidth = 2 * copy_bytes / _copy_seconds(copy_bytes, device)
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    flops = 2.0 * size**3
    bf16 = flops / seconds_of([lambda: left @ right] * 4, device)
    fp8 = 0.0
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        a, b, one = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn), torch.ones(1, device=device)
        run = lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)  # noqa: E731
        fp8 = flops / seconds_of([run] * 4, device)
    return Peaks(bandwidth, bf16, fp8)


def _copy_seconds(size: int, device: torch.device) -> float:
    source = torch.randint(0, 127, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return seconds_of([lambda: target.copy_(source)], device)
