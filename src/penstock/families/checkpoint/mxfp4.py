"""Checkpoints whose experts are MXFP4, as gpt-oss' are: `*_blocks` has 16 bytes for 32 values of a row, and `*_scales`
an exponent for each 32. Together they are MXFP4 as a GGUF file has it, but for the order of bytes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from penstock.config.weights import GGUF_FORMATS, WeightFormat
from penstock.families.checkpoint.scheme import SUPPORTED, Decode, Formats
from penstock.families.checkpoint.stacks import matrices_of, numbered, stacks_in
from penstock.families.checkpoint.stored import CheckpointError, ReadPart, Rows, StoredTensor
from penstock.families.hf_config import HFConfig

MXFP4 = "MXFP4"
ARCHITECTURES = ("GptOssForCausalLM",)  # that have stacks of experts in MXFP4
NIBBLES = 16  # bytes of a block
VALUES = 2 * NIBBLES


@dataclass(frozen=True)
class Mxfp4:
    """Reads matrices of MXFP4 in stacks of experts. Other tensors are floats."""

    @classmethod
    def of(cls, config: HFConfig, quantization: HFConfig) -> "Mxfp4":
        """Returns the scheme. Raises UnsupportedModel for a family whose experts are no such stacks."""
        if not {*(config.texts("architectures") or ())} & {*ARCHITECTURES}:
            raise config.unsupported(
                "quantization_config", quantization.get("quant_method"), f"{SUPPORTED}; mxfp4 in gpt-oss"
            )
        return cls()

    def stored(self, name: str, kind: str, columns: int) -> WeightFormat | None:
        return GGUF_FORMATS[MXFP4] if name.endswith("]") and kind != "vector" else None

    def join(self, tensors: Mapping[str, StoredTensor], wanted: Formats) -> dict[str, StoredTensor]:
        found = dict(tensors)
        for name in stacks_in(wanted):
            ends = f"{name}_blocks", f"{name}_scales"
            if all(end in found for end in ends):
                found |= numbered(name, self._pairs(*(found.pop(end) for end in ends)))
        return found

    def decode(self, rows: Rows, others: tuple[StoredTensor, ...], part: ReadPart) -> Rows:
        """Returns blocks of an exponent and 16 bytes: values 0 to 15 in their low halves, 16 to 31 in the high ones. In
        the file neighbours share a byte."""
        import numpy as np  # not at the top: see stored.py

        (exponents,) = others
        first, blocks, half = part.columns[0] // VALUES, len(part.columns) // VALUES, NIBBLES // 2
        pairs = rows.values.reshape(-1, blocks, NIBBLES)
        even, odd = pairs & 15, pairs >> 4
        out = np.empty((len(pairs), blocks, NIBBLES + 1), np.uint8)
        out[:, :, 0] = part.read(exponents, part.rows, first, blocks)
        out[:, :, 1::2] = even[:, :, :half] | even[:, :, half:] << 4
        out[:, :, 2::2] = odd[:, :, :half] | odd[:, :, half:] << 4
        return Rows(out.reshape(len(pairs), -1))

    def _pairs(self, blocks: StoredTensor, scales: StoredTensor) -> Iterator[StoredTensor]:
        if {blocks.dtype, scales.dtype} != {"U8"} or blocks.shape != (*scales.shape, NIBBLES):
            raise CheckpointError(
                f"{blocks.path}: {blocks.name!r}, {blocks.dtype} {list(blocks.shape)}, and {scales.name!r}, "
                f"{scales.dtype} {list(scales.shape)}, are no MXFP4; expected U8, with {NIBBLES} bytes of blocks for "
                "each scale"
            )
        for matrix, exponents in zip(matrices_of(blocks, 3), matrices_of(scales, 2), strict=True):
            rows, in_row, _ = matrix.shape
            coded = replace(matrix, dtype=MXFP4, shape=(rows, in_row * VALUES), block=(VALUES, NIBBLES))
            yield coded.then(Decode(self, (exponents,)))
