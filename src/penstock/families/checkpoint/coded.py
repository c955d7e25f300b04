"""Checkpoints whose matrices are codes in tensors of their own, beside their scales: which modules are quantised, and
how. The layouts of such codes are in gptq.py, awq.py, compressed.py, fp4.py and bitsandbytes.py."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from penstock.config.weights import WeightFormat
from penstock.families.checkpoint.codes import broken, first_bytes
from penstock.families.checkpoint.fp8 import Fp8
from penstock.families.checkpoint.scheme import Formats, RowDecoder, read_tensors
from penstock.families.checkpoint.stored import StoredTensor
from penstock.families.hf_config import HFConfig

HEADS = ("lm_head", "embed_out", "score", "output")  # linear modules outside of the layers
MAX_NAMES = 10_000  # in a list of modules
MAX_BIAS_BYTES = 1 << 20
_MAX_PATTERN = 1000  # characters
_MAX_REPEATS = 4  # the time of a match grows with a name's length to this power
_ESCAPED = re.compile(r"\\.")
_REPEAT = re.compile(r"[*+]|,\}")
_REPEATED_GROUP = re.compile(r"\)(?:[*+]|\{)")
_IN_A_LAYER = re.compile(r"\.\d+\.")


class MatrixLayout(RowDecoder, Protocol):
    """How the codes of a matrix [n, k] and what belongs to them are stored."""

    def format(self, columns: int) -> WeightFormat | None:
        """The format that holds the codes of rows of so many columns: see Scheme.stored."""

    def take(self, name: str, found: dict[str, StoredTensor]) -> StoredTensor | None:
        """Removes the tensors of the matrix `name` from `found` and returns them as one, or None if it is stored in
        another way. Raises CheckpointError if they do not fit."""


@dataclass(frozen=True)
class Coded:
    """A scheme with a layout for each module. `layout_of` maps a module's name, such as model.layers.0.mlp.up_proj, to
    its layout, or to None if it is in floats. `fp8` joins matrices of FP8 with their scales."""

    layout_of: Callable[[str], MatrixLayout | None] = field(repr=False, compare=False)
    fp8: Fp8 | None = None

    def stored(self, name: str, kind: str, columns: int) -> WeightFormat | None:
        layout = None if kind in ("vector", "router") else self.layout_of(name.removesuffix(".weight"))
        fmt = None if layout is None else layout.format(columns)
        # The op of a mixture, and the one that multiplies by heads, do not put x in an order.
        unordered = ".experts." in name or name.endswith("kv_b_proj.weight")
        return None if fmt is not None and fmt.ordered and unordered else fmt

    def join(self, tensors: Mapping[str, StoredTensor], wanted: Formats) -> dict[str, StoredTensor]:
        found = read_tensors(tensors)
        for name, fmt in wanted.items():
            layout = self.layout_of(name.removesuffix(".weight"))
            joined = None if layout is None else layout.take(name, found)
            if joined is not None:
                found[name] = joined
                _drop_zero_bias(name.removesuffix("weight") + "bias", found, wanted)
            elif fmt is not None and name in found:
                raise broken(
                    found[name],
                    f"is {found[name].dtype} without codes, but config.json says that it is quantised ({fmt.name})",
                )
        return found if self.fp8 is None else self.fp8.join(found, wanted)


def _drop_zero_bias(name: str, found: dict[str, StoredTensor], wanted: Formats) -> None:
    """Removes a bias of zeros that the model does not have: older versions of AutoGPTQ add them."""
    bias = found.get(name)
    if (
        bias is not None
        and name not in wanted
        and bias.size <= MAX_BIAS_BYTES
        and not any(first_bytes(bias, bias.size))
    ):
        del found[name]


def in_layers(module: str) -> bool:
    """Whether a module belongs to a layer."""
    return _IN_A_LAYER.search(module) is not None


def is_head(module: str) -> bool:
    """Whether a module is a linear one outside of the layers."""
    return module.rpartition(".")[2] in HEADS and not in_layers(module)


def group_size(fields: HFConfig, multiple: int) -> int:
    """The values of a row that share a scale; 0: all of them do. Raises UnsupportedModel."""
    size = fields.integer("group_size", -1, least=-1)
    if size == 0 or (size > 0 and size % multiple):
        raise fields.unsupported("group_size", size, f"multiples of {multiple}, or -1 for whole rows")
    return max(size, 0)


def half_scales(config: HFConfig) -> bool:
    """Whether scales are fp16, as they have the dtype of a model's other weights."""
    text = config.section("text_config") or config
    named = [each.get(name) for each in (config, text) for name in ("dtype", "torch_dtype")]
    return "float16" in named


def module_names(fields: HFConfig, name: str) -> list[str]:
    """A list of modules or patterns. Raises UnsupportedModel."""
    texts = fields.texts(name) or []
    if len(texts) > MAX_NAMES:
        raise fields.unsupported(name, f"with {len(texts)} entries", f"at most {MAX_NAMES}")
    return texts


def pattern(fields: HFConfig, text: str) -> re.Pattern[str]:
    """The regular expression of module names in a configuration, after its prefix. Raises UnsupportedModel for one that
    is wrong, and for one whose match could take very long."""
    bare = text.removeprefix("re:") if text.startswith("re:") else text[2 * text.startswith(("+:", "-:")) :]
    plain = _ESCAPED.sub("", bare)
    if len(bare) > _MAX_PATTERN or len(_REPEAT.findall(plain)) > _MAX_REPEATS or _REPEATED_GROUP.search(plain):
        limits = f"at most {_MAX_PATTERN} characters and {_MAX_REPEATS} unbounded repeats, and no repeated group"
        raise fields.unsupported("pattern", text, f"patterns with {limits}")
    try:
        return re.compile(bare)
    except re.error as error:
        raise fields.unsupported("pattern", text, f"regular expressions ({error})") from None
