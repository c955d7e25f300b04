"""Reads what a model's headers say: its format, its sizes and the types of its tensors. Reads no weights."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

from penstock.config.weights import GGUF_FORMATS, WeightFormat
from penstock.families import ModelSpec, load_spec
from penstock.families.checkpoint.scheme import file_bytes
from penstock.families.hf_config import HFConfig, UnsupportedModel
from penstock.families.rope_config import context_length
from penstock.gguf import GgufFile, is_gguf, read_gguf
from penstock.gguf.json_file import read_json_object
from penstock.weights.checkpoint import stored_tensors
from penstock.weights.files import model_bytes


@dataclass(frozen=True)
class TypeRow:
    """The tensors of one type."""

    type: str
    tensors: int
    weights: int
    bytes: int

    @property
    def bits(self) -> float:
        """Bits per weight in the file."""
        return 8 * self.bytes / self.weights


class LocalModelFacts:
    """The facts of a model in a folder or a GGUF file. Properties raise CheckpointError, GgufError or ValueError if
    the files are broken."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def gguf(self) -> GgufFile | None:
        """The header, if the model is a GGUF file."""
        return read_gguf(self.path) if is_gguf(self.path) else None

    @cached_property
    def config(self) -> dict[str, object]:
        """config.json, of the text model if it has several parts. Empty for a GGUF file."""
        if self.gguf is not None:
            return {}
        config = read_json_object(self.path / "config.json", max_bytes=4 << 20)
        text = config.get("text_config")
        return {**config, **text} if isinstance(text, dict) else config

    @cached_property
    def types(self) -> list[TypeRow]:
        """The types of tensors in the files, the largest first."""
        rows: dict[str, list[int]] = {}
        for _, name, shape, size in self._tensors:
            row = rows.setdefault(name, [0, 0, 0])
            for i, count in enumerate((1, prod(shape), size)):
                row[i] += count
        return sorted((TypeRow(name, *row) for name, row in rows.items()), key=lambda row: -row.bytes)

    @cached_property
    def formats(self) -> Mapping[str, WeightFormat]:
        """The formats that hold quantised matrices in a CPU's memory, by the types of their tensors."""
        if self.gguf is not None:
            return GGUF_FORMATS
        parameters = () if self._quantized is None else self._quantized.parameters
        return {fmt.name: fmt for parameter in parameters for fmt in parameter.stored if fmt is not None}

    @cached_property
    def _quantized(self) -> ModelSpec | None:
        """The spec of a folder whose matrices are quantised, if they can be served."""
        with suppress(UnsupportedModel, ValueError):
            spec = load_spec(self.path)
            return spec if spec.scheme is not None else None
        return None

    @cached_property
    def _tensors(self) -> list[tuple[Path, str, tuple[int, ...], int]]:
        """(file, type, shape, bytes) of each tensor."""
        if self.gguf is not None:
            return [(one.path, one.type.name, one.shape, one.size) for one in self.gguf.tensors.values()]
        tensors = stored_tensors(self.path, self._quantized).values()
        return [(one.path, one.dtype, one.shape, file_bytes(one)) for one in tensors]

    @property
    def size(self) -> int:
        return model_bytes(self.path)

    @property
    def format(self) -> str:
        """'GGUF Q4_K_M' or 'safetensors BF16'."""
        largest = self.types[0].type if self.types else "without tensors"
        if self.gguf is None:
            return f"safetensors {largest}"
        return f"GGUF {self.gguf.file_type or largest}"

    @property
    def parameters(self) -> int:
        return sum(row.weights for row in self.types)

    @property
    def context(self) -> int | None:
        """The most tokens that the model was made for. sentence-transformers' files may name fewer than config.json."""
        if (self.path / "modules.json").is_file():
            with suppress(UnsupportedModel, ValueError):
                return load_spec(self.path).max_position
        if self.gguf is None:
            value = self.config.get("max_position_embeddings")
            if isinstance(value, int) and not str(self.config.get("model_type")).startswith("gemma3"):
                with suppress(UnsupportedModel):
                    value = context_length(HFConfig(self.config), value)
        else:
            value = self.gguf.metadata.get(f"{self.gguf.metadata.get('general.architecture')}.context_length")
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def architecture(self) -> str:
        if self.gguf is not None:
            return str(self.gguf.metadata.get("general.architecture"))
        names = self.config.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else str(self.config.get("model_type"))
