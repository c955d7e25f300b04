"""A tensor as a file of a checkpoint stores it, in any format."""

from dataclasses import dataclass, replace
from pathlib import Path


class CheckpointError(ValueError):
    """The checkpoint is broken or is not of this model; the message names the file or the tensors."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: `size` bytes from `offset` of `path`, row-major. With `exponents`, rows are made of these
    bytes and of another tensor's: `size` is then that of the rows. With `scales`, values are multiplied by these.

    With `rotary_dim`, rows are in llama.cpp's order for rope: row (head, i, s) here is row (head, s, i) of the
    parameter, for i below rotary_dim / 2 and s below 2.
    """

    name: str  # in the file
    path: Path
    dtype: str  # as the format names it: F32, BF16, Q4_K, ...
    shape: tuple[int, ...]
    offset: int
    size: int
    rotary_dim: int = 0
    shift: float = 0.0  # to add to the values, which are F32: the file has Gemma's norms with 1 added
    logarithm: bool = False  # values are log(-x) of the file's, which are F32: it has -exp(A_log) of layers with states
    exponents: "StoredTensor | None" = None  # of a pair of tensors that are one of MXFP4: see stacks.py
    scales: "Scales | None" = None  # of codes of FP8: see fp8.py

    @property
    def rows(self) -> int:
        """Entries along dimension 0. A scalar is one."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry along dimension 0, which must not be empty."""
        return self.size // self.rows

    def entries(self) -> "list[StoredTensor]":
        """Each entry along dimension 0, which must not be empty."""
        size = self.row_bytes
        return [replace(self, shape=self.shape[1:], offset=self.offset + i * size, size=size) for i in range(self.rows)]


@dataclass(frozen=True)
class Scales:
    """A tensor with a scale for each block of so many rows and columns of another tensor, row-major."""

    tensor: StoredTensor
    rows: int
    columns: int
