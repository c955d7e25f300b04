"""Writes small archives of torch.export by hand, as torch.export writes them."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FLOAT, STRIDED = 7, 7


def meta(sizes: tuple[int | str, ...]) -> dict[str, Any]:
    """The facts of a tensor. A size that is a text is an expression."""

    def size(value: int | str) -> dict[str, Any]:
        return {"as_int": value} if isinstance(value, int) else {"as_expr": {"expr_str": value, "hint": None}}

    strides = [4, 1] if len(sizes) == 2 else [1] * len(sizes)
    return {
        "dtype": FLOAT,
        "sizes": [size(value) for value in sizes],
        "requires_grad": False,
        "device": {"type": "cpu", "index": None},
        "strides": [size(value) for value in strides],
        "storage_offset": {"as_int": 0},
        "layout": STRIDED,
    }


def tensor(name: str) -> dict[str, Any]:
    return {"as_tensor": {"name": name}}


def node(target: str, *inputs: dict[str, Any], outputs: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    """A call of an operator of ATen, or of another function if the target has a dot."""
    return {
        "target": target if "torch." in target or "_operator" in target else f"torch.ops.aten.{target}",
        "inputs": [{"name": f"a{place}", "arg": each, "kind": 1} for place, each in enumerate(inputs)],
        "outputs": list(outputs),
        "metadata": {},
    }


def scale_program(batch: int | str = "Symbol('s0', positive=True, integer=True)") -> dict[str, Any]:
    """y = x * f, of 4 numbers a row."""
    return {
        "graph_module": {
            "graph": {
                "inputs": [tensor("b_f"), tensor("x")],
                "outputs": [tensor("mul")],
                "nodes": [node("mul.Tensor", tensor("x"), tensor("b_f"), outputs=(tensor("mul"),))],
                "tensor_values": {"b_f": meta((4,)), "x": meta((batch, 4)), "mul": meta((batch, 4))},
                "sym_int_values": {},
            },
            "signature": {
                "input_specs": [
                    {"buffer": {"arg": {"name": "b_f"}, "buffer_name": "f", "persistent": True}},
                    {"user_input": {"arg": tensor("x")}},
                ],
                "output_specs": [{"user_output": {"arg": tensor("mul")}}],
            },
        },
        "schema_version": {"major": 8, "minor": 20},
    }


def write(
    path: Path,
    program: Mapping[str, Any] | bytes,
    factors: tuple[float, ...] = (2, 2, 2, 2),
    *,
    compression: int = zipfile.ZIP_STORED,
    more: Mapping[str, bytes] | None = None,
    **payload: Any,
) -> Path:
    """Writes an archive. `payload` replaces fields of the stored tensor's entry, `more` adds files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entry = {"path_name": "weight_0", "is_param": False, "use_pickle": False, "tensor_meta": meta((4,)), **payload}
    files = {
        "archive_format": b"pt2",
        "models/model.json": program if isinstance(program, bytes) else json.dumps(program).encode(),
        "data/weights/model_weights_config.json": json.dumps({"config": {"f": entry}}).encode(),
        "data/weights/weight_0": np.array(factors, np.float32).tobytes(),
        "data/constants/model_constants_config.json": b'{"config": {}}',
        "data/sample_inputs/model.pt": b"a pickle that nobody reads",
        **(more or {}),
    }
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in files.items():
            archive.writestr(f"model/{name}", data)
    return path
