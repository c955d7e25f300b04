"""Divides tensors that hold the matrices of several experts."""

from collections.abc import Iterable, Mapping

from penstock.families.checkpoint.stored import CheckpointError, StoredTensor
from penstock.families.experts import MAX_EXPERTS


def stacks_in(wanted: Iterable[str]) -> set[str]:
    """The tensors of which matrices `name[i]` are wanted."""
    return {name.rpartition("[")[0] for name in wanted if name.endswith("]")}


def divided(tensors: Mapping[str, StoredTensor], wanted: Iterable[str]) -> dict[str, StoredTensor]:
    """Returns the tensors. A tensor is divided into its matrices if `wanted` names one of these. Raises
    CheckpointError."""
    found = dict(tensors)
    for name in stacks_in(wanted):
        if name in found:
            stack = found.pop(name)
            found |= numbered(name, matrices_of(stack, len(stack.shape) - 1))
    return found


def matrices_of(stack: StoredTensor, dimensions: int) -> list[StoredTensor]:
    """The parts of a tensor, which have so many dimensions. Raises CheckpointError."""
    if dimensions < 1 or len(stack.shape) != dimensions + 1 or not 0 < stack.shape[0] <= MAX_EXPERTS:
        raise CheckpointError(
            f"{stack.path}: tensor {stack.name!r} has the shape {list(stack.shape)}; expected {dimensions + 1} "
            f"dimensions, of which the first is that of 1 to {MAX_EXPERTS} experts"
        )
    return stack.entries()


def numbered(name: str, matrices: Iterable[StoredTensor]) -> dict[str, StoredTensor]:
    """The matrices of a tensor, by their names."""
    return {f"{name}[{i}]": matrix for i, matrix in enumerate(matrices)}
