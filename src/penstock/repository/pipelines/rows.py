"""Takes tensors apart by rows or columns, and puts the parts together again."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.messages import RequestRejected
from penstock.messages.arrays import pack_strings, read_array, tensor_of
from penstock.messages.tensors import Tensor, strings


def values(tensor: Tensor, *, has_rows: bool) -> list[list[Any]]:
    """Returns the elements of each row; without rows, those of the tensor as one row."""
    array = _array(tensor)
    rows: list[list[Any]] = array.reshape(len(array), -1).tolist() if has_rows else [array.reshape(-1).tolist()]
    return rows


def chosen_rows(tensor: Tensor, places: Sequence[int]) -> Tensor:
    """Returns the rows at these places."""
    return tensor_of(tensor.name, tensor.datatype, _array(tensor)[list(places)])


def scattered(name: str, parts: Sequence[tuple[Sequence[int], Tensor]]) -> Tensor:
    """Returns a tensor whose rows are those of the parts: each part's rows go to its places. Raises RequestRejected if
    the parts have rows of different shapes."""
    shapes = {part.shape[1:] for _, part in parts}
    if len(shapes) > 1:
        shown = " and ".join(map(str, sorted(map(list, shapes))))
        raise RequestRejected(f"the branches of a switch give {name!r} rows of shapes {shown}; send one row a request")
    arrays = [_array(part) for _, part in parts]
    made = np.empty((sum(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
    for (places, _), array in zip(parts, arrays, strict=True):
        made[list(places)] = array
    return tensor_of(name, parts[0][1].datatype, made)


def divided(tensor: Tensor, sizes: Mapping[str, int]) -> list[Tensor]:
    """Returns parts of the last dimension. Raises RequestRejected if the sizes do not add up to it."""
    if not tensor.shape or tensor.shape[-1] != sum(sizes.values()):
        raise RequestRejected(
            f"tensor {tensor.name!r} has the shape {list(tensor.shape)}; its parts need {sum(sizes.values())} columns"
        )
    parts = np.split(_array(tensor), np.cumsum(list(sizes.values()))[:-1], axis=-1)
    return [tensor_of(name, tensor.datatype, part) for name, part in zip(sizes, parts, strict=True)]


def joined(name: str, tensors: Sequence[Tensor]) -> Tensor:
    """Returns tensors beside each other along the last dimension. Raises RequestRejected if the others differ."""
    try:
        return tensor_of(name, tensors[0].datatype, np.concatenate([_array(tensor) for tensor in tensors], axis=-1))
    except ValueError:
        shapes = ", ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in tensors)
        raise RequestRejected(f"tensors for {name!r} cannot be merged, because of their shapes: {shapes}") from None


def whole_text(pieces: Sequence[Tensor]) -> Tensor:
    """Returns one text for the pieces of a stream. Tensors of other types come in one piece."""
    first = pieces[0]
    if len(pieces) == 1 or first.datatype != "BYTES":
        return pieces[-1]
    text = b"".join(part for piece in pieces for part in strings(piece.data, piece.name))
    return Tensor(first.name, "BYTES", first.shape, pack_strings([text]))


def _array(tensor: Tensor) -> Any:
    return read_array(tensor.data, tensor.datatype, tensor.shape)
