"""The bandwidth of this machine's memory, measured in a moment, without torch."""

import os
import threading
import time
from statistics import median

import numpy as np

SLICE = 32 << 20  # bytes that each thread reads: more than its share of any cache
THREADS = 16  # more would take memory and seldom read faster
SECONDS = 0.15


def read_bandwidth() -> int:
    """Returns the bytes per second that all of this process's cores read together: the median of several rounds."""
    count = min(len(os.sched_getaffinity(0)), THREADS)
    slices = [np.zeros(SLICE // 8, np.uint64) for _ in range(count)]
    for piece in slices:
        piece.fill(1)  # else all pages are the kernel's one page of zeros
    rounds: list[list[float]] = [[] for _ in slices]
    threads = [threading.Thread(target=_read, args=pair) for pair in zip(slices, rounds, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return int(sum(SLICE / median(seconds) for seconds in rounds))


def _read(piece: "np.ndarray[tuple[int], np.dtype[np.uint64]]", seconds: list[float]) -> None:
    end = time.perf_counter() + SECONDS
    while not seconds or time.perf_counter() < end:
        began = time.perf_counter()
        np.bitwise_or.reduce(piece)
        seconds.append(time.perf_counter() - began)
