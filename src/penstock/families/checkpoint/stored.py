"""A tensor as a file of a checkpoint stores it, in any format, and what is done to its rows while they are read."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.config.weights import WeightFormat

if TYPE_CHECKING:  # steps import NumPy when they run: `penstock plan` starts without it
    import numpy as np
    from numpy.typing import NDArray


class CheckpointError(ValueError):
    """The checkpoint is broken or is not of this model; the message names the file or the tensors."""


@dataclass(frozen=True)
class Rows:
    """Rows that were read: [rows, columns] as the steps of their tensor made them, at first the file's bytes."""

    values: "NDArray[Any]"
    # fp32 for each row [rows, 1] or for each value: codes of FP8 are multiplied by them. With `format` for each group.
    scales: "NDArray[np.float32] | None" = None
    # If not None, `values` are codes of this format, one a byte, and groups have fp32 scales and minima [rows, groups].
    format: WeightFormat | None = None
    mins: "NDArray[np.float32] | None" = None
    order: "NDArray[np.int32] | None" = None  # with an ordered format, the column of the tensor that each one is


@dataclass(frozen=True)
class ReadPart:
    """The part of a tensor that is read at once."""

    rows: range
    columns: range
    # Reads some rows of another tensor: (tensor, rows, the first byte of each, bytes of each) to uint8 [rows, bytes].
    read: "Callable[[StoredTensor, range, int, int], NDArray[np.uint8]]"


class RowStep(Protocol):
    """Changes rows between their file and their packer. Several threads call it at once."""

    def __call__(self, rows: Rows, part: ReadPart) -> Rows: ...


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: `size` bytes from `offset` of `path`, row-major. `steps` turn its bytes into rows of `dtype`,
    in this order. Without steps the bytes are such rows."""

    name: str  # in the file
    path: Path
    dtype: str  # as the format names it: F32, BF16, Q4_K, ...
    shape: tuple[int, ...]
    offset: int
    size: int
    block: tuple[int, int]  # values of a row that cannot be divided, and their bytes in the file
    steps: tuple[RowStep, ...] = ()
    # The first step reads the bytes, which do not lie row by row in the file. `offset` then means nothing.
    read_by_step: bool = False

    @property
    def rows(self) -> int:
        """Entries along dimension 0. A scalar is one."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry along dimension 0, which must not be empty."""
        return self.size // self.rows

    def bytes_of(self, columns: int) -> int:
        """Returns the bytes of the first columns of a row. Raises CheckpointError if they end within a block."""
        values, size = self.block
        if columns % values:
            raise CheckpointError(
                f"{self.path}: {self.name} is {self.dtype}, whose blocks of {values} values cannot be divided at "
                f"column {columns}: use fewer ranks (--tensor-parallel-size)"
            )
        return columns // values * size

    def entries(self) -> "list[StoredTensor]":
        """Each entry along dimension 0, which must not be empty."""
        size = self.row_bytes
        return [replace(self, shape=self.shape[1:], offset=self.offset + i * size, size=size) for i in range(self.rows)]

    def then(self, *steps: RowStep) -> "StoredTensor":
        """Returns the tensor with further steps."""
        return replace(self, steps=(*self.steps, *steps))


@dataclass(frozen=True)
class Shift:
    """Adds a number to F32 values: llama.cpp writes Gemma's norms with 1 added."""

    by: float
    what = "norms with 1 added"  # has it, for errors

    def __call__(self, rows: Rows, part: ReadPart) -> Rows:
        return Rows(rows.values.view("f4") + self.by)


@dataclass(frozen=True)
class Logarithm:
    """Computes log(-x) of F32 values: llama.cpp writes -exp(A_log) of layers with states."""

    what = "decays of states"

    def __call__(self, rows: Rows, part: ReadPart) -> Rows:
        import numpy as np  # not at the top: see there

        return Rows(np.log(-rows.values.view("f4").astype("f8")).astype("f4"))  # its bits are those of any machine


F32_ONLY = (Shift, Logarithm)  # steps that need values of F32
