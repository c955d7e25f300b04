"""The interface to the ways in which checkpoints store quantised matrices."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.config.weights import WeightFormat
from penstock.families.checkpoint.stored import ReadPart, Rows, StoredTensor

SUPPORTED = "fp8, compressed-tensors with float weights of 8 bits, or weights in float32, bfloat16 or float16"


class Scheme(Protocol):
    """A way to store quantised matrices. To add one, write its class and a line in SCHEMES (see schemes.py)."""

    def stored(self, name: str, kind: str) -> WeightFormat | None:
        """Returns the format that holds a tensor's codes (quantised values) without loss. Returns None if the tensor
        has floats, or codes that no format of ours holds: these are read as floats. `kind` is that of the parameter
        (see spec.Parameter.kind)."""
        ...

    def join(self, tensors: Mapping[str, StoredTensor], wanted: Iterable[str]) -> dict[str, StoredTensor]:
        """Returns the model's tensors by name, at least those of `wanted`. The stored tensors of one matrix, such as
        its codes and scales, are joined into one tensor with a Decode step. Raises CheckpointError if they do not
        fit."""
        ...

    def decode(self, rows: Rows, others: tuple[StoredTensor, ...], part: ReadPart) -> Rows:
        """Returns the rows of a joined tensor as codes with their scales. `rows` are the stored bytes of its first
        tensor, and `others` are the tensors that were joined with that one."""
        ...


@dataclass(frozen=True)
class Decode:
    """Decodes the rows of a joined tensor while it is read."""

    scheme: Scheme
    others: tuple[StoredTensor, ...]

    def __call__(self, rows: Rows, part: ReadPart) -> Rows:
        return self.scheme.decode(rows, self.others, part)
