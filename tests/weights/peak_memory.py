"""Prints by how many MiB anonymous memory grew at most while an fp32 tensor of `rows` x 4096 was loaded in bf16, and
how many it takes. With a third argument it is packed by the native kernels, quantised as that says."""

import json
import struct
import sys
import threading
from pathlib import Path

import torch

import penstock.kernels as kernels
from penstock.families.spec import ModelSpec, Parameter, TensorSource
from penstock.weights.load import load_parameters

COLUMNS = 4096


def anonymous_mib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) >> 10


def write_sparse(path: Path, rows: int) -> None:
    size = rows * COLUMNS * 4
    header = json.dumps({"w": {"dtype": "F32", "shape": [rows, COLUMNS], "data_offsets": [0, size]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with path.open("r+b") as file:
        file.truncate(8 + len(header) + size)


def main(folder: Path, rows: int, quantization: str | None) -> None:
    write_sparse(folder / "model.safetensors", rows)
    parameter = Parameter("w", (rows, COLUMNS), (TensorSource("w", 0, rows),))
    spec = ModelSpec("none", 1, 1, (), (), 1, 1.0, False, parameters=(parameter,))
    torch.zeros(512, 512) @ torch.zeros(512, 512)  # what the first operation allocates does not count
    packing = None
    if quantization is not None:
        packing = kernels.select_packing(kernels.detect_platform(), kernels.Needs(torch.bfloat16), quantization)
    before, peak, done = anonymous_mib(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, anonymous_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        parameters = load_parameters(folder, spec, torch.bfloat16, packing=packing)
    finally:
        done.set()
        watcher.join()
    print(max(peak, anonymous_mib()) - before, parameters["w"].nbytes >> 20)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
