"""What is made of a model: a checkpoint folder in safetensors, or a GGUF file. Each is written in a folder of its own
beside its final place, and renamed when it is complete."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from penstock.families.checkpoint.folder import SINGLE
from penstock.families.checkpoint.stored import StoredTensor
from penstock.gguf import TYPES, GgufFile
from penstock.gguf.json_file import read_json_object
from penstock.quantize.formats.blocks import Blocks
from penstock.quantize.formats.gguf_mix import file_metadata, mixed_type
from penstock.quantize.formats.grid import CodeFormat, Quantized
from penstock.quantize.formats.target import CheckpointTarget, floats
from penstock.quantize.formats.tensor_file import OutputTensor, TensorFile, gguf_layout, safetensors_layout

_TEXTS = (".json", ".txt", ".jinja", ".model", ".tiktoken")  # files of a checkpoint that are copied
_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
GGUF_NAME = "model.gguf"


class FolderDestination:
    """Makes a checkpoint folder. `matrices` are the shapes of the tensors to quantise, `ignored` the modules of the
    matrices that stay floats."""

    outer: Path | None = None  # the model whose embedding and head are those of what is made; None: the original

    def __init__(
        self,
        model: Path,
        tensors: Mapping[str, StoredTensor],
        target: CheckpointTarget,
        matrices: Mapping[str, tuple[int, ...]],
        ignored: Sequence[str],
    ) -> None:
        """Raises CannotQuantizeTo for a matrix that the format cannot hold."""
        for name, shape in matrices.items():
            target.check(name, shape)
        self._model, self._tensors, self._target, self._matrices = model, tensors, target, matrices
        self._ignored = ignored
        self._entries: dict[str, OutputTensor] = {}
        for name, tensor in tensors.items():
            if name in matrices:
                self._entries |= target.entries(name, matrices[name])
            else:
                self._entries[name] = OutputTensor(tensor.dtype, tensor.shape, tensor.size)
        self._file: TensorFile | None = None

    @property
    def size(self) -> int:
        """The bytes of all tensors."""
        return sum(entry.size for entry in self._entries.values())

    def format_of(self, name: str) -> CodeFormat | None:
        """Returns the format of a tensor, or None if it is copied."""
        return self._target.fmt if name in self._matrices else None

    def open(self, folder: Path, *, copies: bool) -> None:
        """Opens the file in `folder`, which may have parts of it. With `copies` writes what is copied, too."""
        self._file = TensorFile(folder / SINGLE, self._entries, safetensors_layout(self._entries))
        for name, tensor in self._tensors.items():
            if copies and name not in self._matrices:
                self._file.copy(name, tensor)

    def put(self, name: str, weight: Quantized) -> None:
        """Writes a quantised tensor, rows in the order of the original's."""
        assert self._file is not None, "open comes first"
        for part, data in self._target.encode(name, weight).items():
            self._file.put(part, data)

    def put_rows(self, name: str, weight: Quantized, first: int) -> None:
        raise NotImplementedError("the embedding and the head of a folder stay floats")

    def stored_floats(self, name: str, values: Tensor) -> Tensor | None:
        """Returns the nearest values that the file can hold in place of a vector, or None if its type there is none of
        floats. `write_floats` writes them."""
        dtype = _FLOATS.get(self._tensors[name].dtype)
        return None if dtype is None else values.to(dtype).float()

    def write_floats(self, name: str, values: Tensor) -> None:
        assert self._file is not None, "open comes first"
        self._file.put(name, floats(values, _FLOATS[self._tensors[name].dtype]))

    def finish(self, folder: Path) -> None:
        """Completes what is in `folder`."""
        assert self._file is not None, "open comes first"
        self._file.close()
        for path in sorted(self._model.iterdir()):
            if path.is_file() and path.suffix in _TEXTS and not path.name.endswith((".index.json", "config.json")):
                shutil.copyfile(path, folder / path.name)
        for path in self._model.glob("*config.json"):
            config = read_json_object(path)
            if path.name == "config.json":
                config["quantization_config"] = self._target.config(self._ignored)
            (folder / path.name).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")

    def move(self, folder: Path, out: Path) -> None:
        """Moves what is made to its place. Nothing else may be in `folder`."""
        os.rename(folder, out)


class GgufDestination:
    """Makes a GGUF file of another one. `names` maps the names of the spec's sources to the parts of the file's tensors
    that they are."""

    def __init__(self, file: GgufFile, kind: str, names: Mapping[str, StoredTensor], kept: Sequence[str]) -> None:
        self._file, self._kind, self._names = file, kind, names
        copied = {names[name].name for name in kept}
        self._types = {
            name: None if name in copied else mixed_type(kind, tensor, file) for name, tensor in file.tensors.items()
        }
        self._entries: dict[str, OutputTensor] = {}
        for name, tensor in file.tensors.items():
            wanted = self._types[name]
            rows = tensor.size // tensor.type.row_bytes(tensor.shape[-1])
            size = tensor.size if wanted is None else rows * TYPES[wanted].row_bytes(tensor.shape[-1])
            self._entries[name] = OutputTensor(wanted or tensor.type.name, tensor.shape, size)
        self._out: TensorFile | None = None
        self.outer: Path | None = None

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self._entries.values())

    def format_of(self, name: str) -> CodeFormat | None:
        kind = self._types[self._names[name].name]
        return None if kind is None else Blocks(kind)

    def open(self, folder: Path, *, copies: bool) -> None:
        layout = gguf_layout(file_metadata(self._file.path, self._kind), self._entries)
        self.outer = folder / GGUF_NAME
        self._out = TensorFile(self.outer, self._entries, layout)
        for name, tensor in self._file.tensors.items():
            if copies and self._types[name] is None:
                block = tensor.type.block_values, tensor.type.block_bytes
                stored = StoredTensor(
                    name, tensor.path, tensor.type.name, tensor.shape, tensor.offset, tensor.size, block
                )
                self._out.copy(name, stored)

    def put(self, name: str, weight: Quantized) -> None:
        self.put_rows(name, weight, 0)

    def put_rows(self, name: str, weight: Quantized, first: int) -> None:
        assert self._out is not None, "open comes first"
        stored = self._names[name]
        kind, tensor = self._types[stored.name], self._file.tensors[stored.name]
        assert kind is not None, "a quantised tensor has a type"
        columns = tensor.shape[-1]
        rows = (stored.offset - tensor.offset) // tensor.type.row_bytes(columns) + first
        self._out.put(stored.name, Blocks(kind).encode(weight), rows * TYPES[kind].row_bytes(columns))

    def stored_floats(self, name: str, values: Tensor) -> Tensor | None:
        stored = self._names[name]
        return values if stored.dtype == "F32" and not stored.steps else None

    def write_floats(self, name: str, values: Tensor) -> None:
        assert self._out is not None, "open comes first"
        self._out.put(self._names[name].name, floats(values, torch.float32))

    def finish(self, folder: Path) -> None:
        assert self._out is not None, "open comes first"
        self._out.close()

    def move(self, folder: Path, out: Path) -> None:
        os.replace(folder / GGUF_NAME, out)
        folder.rmdir()


Destination = FolderDestination | GgufDestination
