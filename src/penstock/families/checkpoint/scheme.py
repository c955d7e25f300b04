"""How a checkpoint stores the matrices that it quantises."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.config.weights import WeightFormat
from penstock.families.checkpoint.stored import ReadPart, Rows, StoredTensor

SUPPORTED = "fp8, compressed-tensors with float weights of 8 bits, or weights in float32, bfloat16 or float16"


class Scheme(Protocol):
    """A way to store quantised matrices. To add one, write its class and a line in SCHEMES (see schemes.py)."""

    def stored(self, name: str, kind: str) -> WeightFormat | None:
        """Returns the format that holds a tensor's codes without loss. None if it has floats, or if no format holds its
        codes: then it is read as floats. `kind` is that of the tensor's parameter (see spec.Parameter.kind)."""
        ...

    def join(self, tensors: Mapping[str, StoredTensor], wanted: Iterable[str]) -> dict[str, StoredTensor]:
        """Returns the tensors that a model has, by the names `wanted` and others. The tensors of one matrix, such as
        its codes and scales, are joined as one, with a Decode step. Raises CheckpointError if they do not fit."""
        ...

    def decode(self, rows: Rows, others: tuple[StoredTensor, ...], part: ReadPart) -> Rows:
        """Returns the codes of the rows of a joined tensor. `rows` are the bytes of the tensor that was joined with the
        `others`."""
        ...


@dataclass(frozen=True)
class Decode:
    """The step of a tensor that a scheme has joined with others."""

    scheme: Scheme
    others: tuple[StoredTensor, ...]

    def __call__(self, rows: Rows, part: ReadPart) -> Rows:
        return self.scheme.decode(rows, self.others, part)
