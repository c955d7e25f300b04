"""The interface to the ways in which checkpoints store quantised matrices."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.config.weights import WeightFormat
from penstock.families.checkpoint.stored import ReadPart, Rows, StoredTensor

SUPPORTED = (
    "gptq, awq (gemm), auto-round, compressed-tensors, modelopt (FP8, NVFP4), bitsandbytes, fp8, or weights in "
    "float32, bfloat16 or float16"
)
# The ends of names of tensors that are not read: scales of keys and values, whose cache has scales of its own here, and
# of activations, which are quantised by what they are when a step runs.
UNREAD = (
    *(f".{which}_{what}" for which in "kvq" for what in ("scale", "zero_point")),
    *(f".input_{what}" for what in ("scale", "zero_point", "global_scale")),
    ".activation_scale",
    ".kv_scale",
    ".prob_scale",
)
Formats = Mapping[str, WeightFormat | None]  # of tensors, by name


class RowDecoder(Protocol):
    """Decodes the rows of tensors that were joined."""

    def decode(self, rows: Rows, others: tuple[StoredTensor, ...], part: ReadPart) -> Rows:
        """Returns the rows of a joined tensor as codes with their scales. `rows` are the stored bytes of its first
        tensor, and `others` are the tensors that were joined with that one."""


class Scheme(Protocol):
    """A way to store quantised matrices. To add one, write its class and a line in SCHEMES (see schemes.py)."""

    def stored(self, name: str, kind: str, columns: int) -> WeightFormat | None:
        """Returns the format that holds a tensor's codes (quantised values) without loss. Returns None if the tensor
        has floats, or codes that no format of ours holds: these are read as floats. `kind` is that of the parameter
        (see spec.Parameter.kind), `columns` its second dimension."""

    def join(self, tensors: Mapping[str, StoredTensor], wanted: Formats) -> dict[str, StoredTensor]:
        """Returns the model's tensors by name, at least those of `wanted`, which has what `stored` returned for each.
        The stored tensors of one matrix, such as its codes and scales, are joined into one tensor with a Decode step.
        Raises CheckpointError if they do not fit."""


@dataclass(frozen=True)
class Decode:
    """Decodes the rows of a joined tensor while it is read."""

    decoder: RowDecoder
    others: tuple[StoredTensor, ...]

    def __call__(self, rows: Rows, part: ReadPart) -> Rows:
        return self.decoder.decode(rows, self.others, part)


def read_tensors(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors without those that are not read (UNREAD)."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(UNREAD)}


def file_bytes(tensor: StoredTensor) -> int:
    """The bytes of a tensor in its file, with those of all tensors that were joined with it."""
    joined = sum(other.size for step in tensor.steps if isinstance(step, Decode) for other in step.others)
    return joined if tensor.read_by_step else joined + tensor.size
