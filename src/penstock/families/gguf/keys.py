"""The metadata of a GGUF file, read key by key."""

import struct
from collections.abc import Mapping
from typing import Any

from penstock.families.hf_config import MAX_INTEGER, HFConfig
from penstock.families.llama_like import MAX_LAYERS
from penstock.gguf import GgufFile

WHERE = "metadata"
MAX_HEAD_DIM = 4096
LATENT = frozenset({"deepseek2"})  # architectures with latent attention
SIGMOID = 2  # of expert_gating_func


class GgufKeys:
    """The metadata of a file. Keys of the architecture are named without it: `block_count`.

    A value for each layer counts as one value if all are equal. A float32 is read as the decimal number that it was
    written for: 1e-5, not 9.99999975e-06.
    """

    def __init__(self, file: GgufFile) -> None:
        self._read: set[str] = set()
        self.all = HFConfig({key: plain(value) for key, value in file.metadata.items()}, WHERE)
        self.architecture = self.all.text("general.architecture")
        self.metadata = file.metadata
        self.tensors = file.tensors

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = MAX_INTEGER) -> int:
        if default is None:
            return self.all.integer(self._key(name), least=least, most=most)
        return self.all.integer(self._key(name), default, least=least, most=most)

    def number(self, name: str, default: float) -> float:
        return self.all.number(self._key(name), default)

    def flag(self, name: str, default: bool = False) -> bool:
        return self.all.flag(self._key(name), default)

    def get(self, name: str) -> Any:
        return self.all.get(self._key(name))

    def refuse(self, name: str, why: str, *harmless: object) -> None:
        """Raise UnsupportedModel if the key is set to a value that is not among the harmless ones."""
        value = self.get(name)
        if value is not None and value not in harmless:
            raise self.all.unsupported(self.key(name), value, f"none: {why}")

    def refuse_unread(self, name: str, why: str, *harmless: object) -> None:
        """`refuse`, unless the key was read already."""
        if name not in self._read:
            self.refuse(name, why, *harmless)

    @property
    def head_dim(self) -> int:
        """The size of a head, with latent attention of its rotated part. Raises UnsupportedModel unless keys and values
        have the same."""
        if self.architecture in LATENT:
            return self.integer("rope.dimension_count", most=MAX_HEAD_DIM)
        hidden, heads = self.integer("embedding_length"), self.integer("attention.head_count")
        size = self.integer("attention.key_length", max(hidden // heads, 1), most=MAX_HEAD_DIM)
        if (other := self.integer("attention.value_length", size)) != size:
            raise self.all.unsupported(self.key("attention.value_length"), other, f"{size}, the size of a head")
        return size

    @property
    def layers(self) -> int:
        return self.integer("block_count", most=MAX_LAYERS)

    def each(self, name: str, default: int | None = None) -> list[int]:
        """The values of a key that has one for each layer, or one for all."""
        value, layers = self.get(name), self.layers
        if isinstance(value, list) and len(value) == layers and all(type(one) is int and one >= 0 for one in value):
            return value
        return [self.integer(name, default, least=0)] * layers

    def kinds(self, tensors: Mapping[str, str], other: str, count: int) -> list[str]:
        """The kind of each of `count` layers, by a tensor that layers of this kind have; `other` without any."""
        return [
            next((kind for tensor, kind in tensors.items() if f"blk.{i}.{tensor}" in self.tensors), other)
            for i in range(count)
        ]

    def has(self, tensor: str) -> bool:
        """Whether the first layer has a tensor."""
        return f"blk.0.{tensor}" in self.tensors

    def _key(self, name: str) -> str:
        self._read.add(name)
        return self.key(name)


def plain(value: Any) -> Any:
    if isinstance(value, float):
        return shortest(value)
    if isinstance(value, list) and 0 < len(value) <= MAX_LAYERS and all(item == value[0] for item in value):
        return value[0] if type(value[0]) is int else value
    return value


def shortest(value: float) -> float:
    """The decimal number with the fewest digits that rounds to this float32; any other value as it is."""
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        return value
    if struct.unpack("<f", packed)[0] != value:
        return value
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == packed:
            return short
    return value
