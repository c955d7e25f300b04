"""Safetensors files made by hand, right and wrong."""

import json
import struct
from pathlib import Path
from typing import Any


def raw(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """The bytes of a file with this header (JSON unless bytes) and data; `length` is what it announces."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def edit(folder: Path, change: Any, *, file: str = "model.safetensors") -> None:
    """Rewrite a checkpoint file with `change(tensors)` applied to its dictionary of tensors."""
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor.clone() for name, tensor in load_file(folder / file).items()}
    change(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})
