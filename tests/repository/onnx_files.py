"""Writes small ONNX files, without the package onnx: messages are encoded by hand."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

FLOAT, UINT8, INT32, INT64, STRING, FLOAT16 = 1, 2, 6, 7, 8, 10
Dim = int | str
Value = tuple[str, int, Sequence[Dim]]


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def part(field: int, data: bytes | str) -> bytes:
    data = data.encode() if isinstance(data, str) else data
    return varint(field << 3 | 2) + varint(len(data)) + data


def value_info(field: int, value: Value) -> bytes:
    name, kind, dims = value
    shape = b"".join(part(1, number(1, dim) if isinstance(dim, int) else part(2, dim)) for dim in dims)
    return part(field, part(1, name) + part(2, part(1, number(1, kind) + part(2, shape))))


def node(op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: int) -> bytes:
    made = b"".join(part(1, name) for name in inputs) + b"".join(part(2, name) for name in outputs) + part(4, op)
    for name, value in attributes.items():
        made += part(5, part(1, name) + number(3, value) + number(20, 2))
    return part(1, made)


def weight(name: str, array: Any) -> bytes:
    kind = {"f": FLOAT, "i": INT64}[array.dtype.kind]
    dims = b"".join(number(1, size) for size in array.shape)
    return part(5, dims + number(2, kind) + part(8, name) + part(9, array.tobytes()))


def external_weight(name: str, shape: Sequence[int], location: str) -> bytes:
    dims = b"".join(number(1, size) for size in shape)
    entry = part(13, part(1, "location") + part(2, location))
    return part(5, dims + number(2, FLOAT) + part(8, name) + entry + number(14, 1))


def model(
    nodes: Sequence[bytes], inputs: Sequence[Value], outputs: Sequence[Value], weights: Sequence[bytes] = ()
) -> bytes:
    graph = b"".join(nodes) + part(2, "g") + b"".join(weights)
    graph += b"".join(value_info(11, each) for each in inputs) + b"".join(value_info(12, each) for each in outputs)
    return number(1, 8) + part(7, graph) + part(8, part(1, "") + number(2, 17))


def add_sub(batch: Dim = "n") -> bytes:
    """OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1, of 4 numbers a row."""
    dims = (batch, 4)
    return model(
        [node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]), node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"])],
        [("INPUT0", FLOAT, dims), ("INPUT1", FLOAT, dims)],
        [("OUTPUT0", FLOAT, dims), ("OUTPUT1", FLOAT, dims)],
    )


def scale(factor: float, name: str = "x", out: str = "y", width: Dim = 4) -> bytes:
    """y = x * factor."""
    return model(
        [node("Mul", [name, "f"], [out])],
        [(name, FLOAT, ("n", width))],
        [(out, FLOAT, ("n", width))],
        [weight("f", np.array([factor], np.float32))],
    )


def identity(kind: int, dims: Sequence[Dim] = ("n", "m")) -> bytes:
    return model([node("Identity", ["x"], ["y"])], [("x", kind, dims)], [("y", kind, dims)])


def mixes_rows() -> bytes:
    """y = x + the sum of all rows."""
    return model(
        [node("ReduceSum", ["x", "axes"], ["s"], keepdims=1), node("Add", ["x", "s"], ["y"])],
        [("x", FLOAT, ("n", 4))],
        [("y", FLOAT, ("n", 4))],
        [weight("axes", np.array([0], np.int64))],
    )


def gather() -> bytes:
    """y = the row of a table at x: an index beyond it is an error of the run."""
    table = np.arange(8, dtype=np.float32).reshape(4, 2)
    return model(
        [node("Gather", ["t", "x"], ["y"])], [("x", INT64, ("n", 1))], [("y", FLOAT, ("n", 1, 2))], [weight("t", table)]
    )


def matmuls(size: int, seed: int = 0) -> bytes:
    """Two products with matrices of size x size."""
    random = np.random.default_rng(seed)
    weights = [random.standard_normal((size, size)).astype(np.float32) / size**0.5 for _ in range(2)]
    return model(
        [node("MatMul", ["x", "a"], ["h"]), node("MatMul", ["h", "b"], ["y"])],
        [("x", FLOAT, ("n", size))],
        [("y", FLOAT, ("n", size))],
        [weight("a", weights[0]), weight("b", weights[1])],
    )


def spins(count: int) -> bytes:
    """A loop of `count` rounds: it takes long."""
    body = part(1, part(1, "h") + part(2, "h2") + part(4, "Identity"))
    body += part(1, part(1, "c") + part(2, "c2") + part(4, "Identity")) + part(2, "b")
    for name, kind, dims in (("i", INT64, ()), ("c", 9, ()), ("h", FLOAT, ("n", 4))):
        body += value_info(11, (name, kind, dims))
    for name, kind, dims in (("c2", 9, ()), ("h2", FLOAT, ("n", 4))):
        body += value_info(12, (name, kind, dims))
    loop = part(1, "k") + part(1, "") + part(1, "x") + part(2, "y") + part(4, "Loop")
    loop += part(5, part(1, "body") + part(6, body) + number(20, 5))
    return model(
        [part(1, loop)], [("x", FLOAT, ("n", 4))], [("y", FLOAT, ("n", 4))], [weight("k", np.array(count, np.int64))]
    )


def put(root: Path, name: str, data: bytes, version: int = 1, settings: str | None = None) -> Path:
    """Writes a model into a repository. `settings` are of model.yaml, or of config.pbtxt if they begin with #pb."""
    folder = root / name / str(version)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.onnx").write_bytes(data)
    if settings is not None:
        (root / name / ("config.pbtxt" if settings.startswith("#pb") else "model.yaml")).write_text(settings)
    return folder


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)
