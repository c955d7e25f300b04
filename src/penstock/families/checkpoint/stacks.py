"""Divides tensors that hold the matrices of several experts, and joins the two tensors of a matrix of MXFP4.

gpt-oss' checkpoints hold MXFP4 as `*_blocks`, 16 bytes for 32 values of a row, and `*_scales`, an exponent for each 32.
Together they are MXFP4 as a GGUF file holds it, but for the order of bytes, which reads change (see reads.py).
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from penstock.families.checkpoint.stored import CheckpointError, StoredTensor
from penstock.families.experts import MAX_EXPERTS
from penstock.gguf import TYPES

_MXFP4 = TYPES["MXFP4"]
NIBBLES = _MXFP4.block_bytes - 1  # bytes of a block in a tensor of blocks
_PAIR = ("_blocks", "_scales")


def divided(tensors: Mapping[str, StoredTensor], wanted: Iterable[str]) -> dict[str, StoredTensor]:
    """Returns the tensors. A tensor is divided into its matrices if `wanted` names one of these, `name[i]`. Raises
    CheckpointError."""
    found = dict(tensors)
    for name in {each.rpartition("[")[0] for each in wanted if each.endswith("]")}:
        parts = [name + end for end in _PAIR]
        if name in found:
            stack = found.pop(name)
            matrices = _matrices(stack, len(stack.shape) - 1)
        elif all(part in found for part in parts):
            matrices = _pairs(*(found.pop(part) for part in parts))
        else:
            continue
        found |= {f"{name}[{i}]": matrix for i, matrix in enumerate(matrices)}
    return found


def _matrices(stack: StoredTensor, dimensions: int) -> list[StoredTensor]:
    """The parts of a tensor, which have so many dimensions."""
    if dimensions < 1 or len(stack.shape) != dimensions + 1 or not 0 < stack.shape[0] <= MAX_EXPERTS:
        raise CheckpointError(
            f"{stack.path}: tensor {stack.name!r} has the shape {list(stack.shape)}; expected {dimensions + 1} "
            f"dimensions, of which the first is that of 1 to {MAX_EXPERTS} experts"
        )
    return stack.entries()


def _pairs(blocks: StoredTensor, scales: StoredTensor) -> list[StoredTensor]:
    if {blocks.dtype, scales.dtype} != {"U8"} or blocks.shape != (*scales.shape, NIBBLES):
        raise CheckpointError(
            f"{blocks.path}: {blocks.name!r}, {blocks.dtype} {list(blocks.shape)}, and {scales.name!r}, {scales.dtype} "
            f"{list(scales.shape)}, are no MXFP4; expected U8, with {NIBBLES} bytes of blocks for each scale"
        )
    each = zip(_matrices(blocks, 3), _matrices(scales, 2), strict=True)
    return [
        replace(
            matrix,
            dtype=_MXFP4.name,
            shape=(matrix.shape[0], matrix.shape[1] * _MXFP4.block_values),
            size=matrix.size // NIBBLES * _MXFP4.block_bytes,
            exponents=exponents,
        )
        for matrix, exponents in each
    ]
