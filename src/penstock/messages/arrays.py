"""Tensors as NumPy arrays. A module of its own, because most processes need no NumPy for messages."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.messages.tensors import LENGTH_BYTES, Bytes, Tensor, strings

# NumPy's types, by datatype. BYTES and BF16 have none; arrays have the bits of BF16.
DTYPES: Mapping[str, Any] = {
    **{name.upper(): np.dtype(name) for name in ("bool", "int8", "int16", "uint8", "uint16")},
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
BF16_BITS = np.dtype("<u2")
_DATATYPES = {dtype: name for name, dtype in DTYPES.items()}


def read_array(data: Bytes, datatype: str, shape: Sequence[int]) -> Any:
    """Returns a tensor as an array; its data is not copied, except strings. Raises UnicodeDecodeError."""
    if datatype == "BYTES":
        texts = [str(part, "utf-8") for part in strings(data, "BYTES")]
        return np.array(texts, dtype=object).reshape(shape)
    return np.frombuffer(data, DTYPES.get(datatype, BF16_BITS)).reshape(shape)


def write_array(array: Any) -> tuple[str, Any]:
    """Returns an array's datatype, and its data as a tensor has it. Raises ValueError for a type without datatype."""
    if array.dtype == object:
        return "BYTES", pack_strings([text if isinstance(text, bytes) else str(text).encode() for text in array.flat])
    name = _DATATYPES.get(array.dtype)
    if name is None:
        raise ValueError(f"an output has the type {array.dtype}, which KServe's protocol does not have")
    return name, np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def pack_strings(parts: Sequence[bytes]) -> bytes:
    """Returns the bytes of a BYTES tensor."""
    return b"".join(b"%b%b" % (len(part).to_bytes(LENGTH_BYTES, "little"), part) for part in parts)


def tensor_of(name: str, datatype: str, array: Any) -> Tensor:
    """Returns a tensor with an array's content."""
    return Tensor(name, datatype, array.shape, bytes(write_array(array)[1]))
