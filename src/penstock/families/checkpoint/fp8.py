"""Checkpoints whose matrices are FP8 (E4M3), with scales in tensors of their own: a value is a code times its scale."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.config.weights import WeightFormat
from penstock.families.checkpoint.codes import FLOAT_BYTES, floats
from penstock.families.checkpoint.scheme import Decode, Formats, read_tensors
from penstock.families.checkpoint.stored import CheckpointError, ReadPart, Rows, StoredTensor
from penstock.families.hf_config import HFConfig

FP8 = "F8_E4M3"

_SCALES = ("_scale_inv", "_scale")  # what follows the weight's name


@dataclass(frozen=True)
class Fp8:
    """Reads matrices of FP8. `rows` and `columns` of a matrix share a scale; 0: those of a row or of the tensor do, as
    the shape of the scales says.

    No format of a CPU holds such codes: those of a group are integers, or 16 values in a table. There they are read as
    floats, which are rounded to bfloat16, or quantised as the settings say. On a GPU, --quantization fp8 keeps codes
    whose rows have one scale each; others are quantised anew.
    """

    rows: int = 0
    columns: int = 0

    @classmethod
    def of(cls, config: HFConfig, quantization: HFConfig) -> "Fp8":
        """Returns the scheme of a quantization_config of the method fp8. Raises UnsupportedModel."""
        quantization.one_of("fmt", "e4m3")
        return cls.of_block(quantization, "weight_block_size")

    @classmethod
    def of_block(cls, fields: HFConfig, name: str) -> "Fp8":
        """Returns the scheme whose blocks have the size that a field has: a list of rows and columns, or nothing."""
        if fields.get(name) is None:
            return cls()
        sizes = fields.integers(name)
        if len(sizes) != 2 or min(sizes) < 1:
            raise fields.unsupported(name, sizes, "rows and columns, such as [128, 128]")
        return cls(*sizes)

    def stored(self, name: str, kind: str, columns: int) -> WeightFormat | None:
        return None

    def join(self, tensors: Mapping[str, StoredTensor], wanted: Formats) -> dict[str, StoredTensor]:
        found = read_tensors(tensors)
        for name, tensor in tensors.items():
            if tensor.dtype != FP8:
                continue
            scales = next((found.pop(name + end) for end in _SCALES if name + end in found), None)
            if scales is None:
                raise CheckpointError(
                    f"{tensor.path}: {name!r} is FP8, but there is no {name + _SCALES[0]!r}, its scales"
                )
            found[name] = self._joined(tensor, scales)
        return found

    def decode(self, rows: Rows, others: tuple[StoredTensor, ...], part: ReadPart) -> Rows:
        import numpy as np  # not at the top: see stored.py

        (scales,) = others
        blocks = range(part.rows[0] // self.rows, part.rows[-1] // self.rows + 1)
        factors = floats(part.read(scales, blocks, 0, scales.row_bytes), scales.dtype)
        # `take` does not hold Python's lock, as indexing does.
        rows_of = np.arange(part.rows.start, part.rows.stop, part.rows.step) // self.rows - blocks[0]
        factors = factors.take(rows_of, 0)
        if scales.shape[1] > 1:
            columns = np.arange(part.columns.start, part.columns.stop, part.columns.step)
            factors = factors.take(columns // self.columns, 1)
        return Rows(rows.values, factors)

    def _joined(self, tensor: StoredTensor, scales: StoredTensor) -> StoredTensor:
        """Raises CheckpointError unless there is a scale for each block, for each row, or one for all."""
        rows, columns = (*tensor.shape, 1)[:2]
        block = (self.rows, self.columns) if self.rows else (1, columns)
        if scales.shape in ((), (1,), (1, 1)):
            block = rows, columns
        expected = -(-rows // block[0]), -(-columns // block[1])
        count = expected[0] * expected[1]
        fits = len(tensor.shape) == 2 and scales.dtype in FLOAT_BYTES
        if not fits or scales.size != count * FLOAT_BYTES[scales.dtype]:
            raise CheckpointError(
                f"{scales.path}: {scales.name!r}, {scales.dtype} {list(scales.shape)}, are no scales of "
                f"{tensor.name!r} {list(tensor.shape)}; expected {list(expected)} in {', '.join(FLOAT_BYTES)}"
            )
        return tensor.then(Decode(Fp8(*block), (replace(scales, shape=expected),)))
