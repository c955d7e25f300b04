"""Reads a torch.export archive (.pt2). Nothing in it is unpickled, imported or evaluated.

An archive is a zip file. models/NAME.json has the graph, data/weights/ and data/constants/ have the bytes of tensors.
The pickles that torch.export also writes, such as sample inputs, are never read. Symbolic expressions are only sizes of
intermediate results, which are not needed.

Sources: torch/_export/serde/schema.py and torch/export/pt2_archive/ of PyTorch 2.13.
"""

import zipfile
from pathlib import Path
from typing import Any

import msgspec

from penstock.repository.backend.files import HostileFile, inside
from penstock.repository.settings import EXPORT

SCHEMA = 8  # the major version of the schema that is read
MAX_JSON = 64 << 20  # bytes of a graph
MAX_ENTRIES = 100_000  # files in an archive
MALFORMED = (LookupError, TypeError, AttributeError, RecursionError)  # what a graph with other fields raises
_READ_BYTES = 1 << 24
_STORED = {"parameter": "parameter_name", "buffer": "buffer_name", "tensor_constant": "tensor_constant_name"}


class TorchArchive:
    """The graph of a model, with the fields of PyTorch's schema, and the bytes of its tensors."""

    def __init__(self, path: Path, root: Path) -> None:
        """Raises HostileFile."""
        inside(path, root)
        self.inputs: list[str] = []  # tensors of a request
        self.constants: dict[str, Any] = {}  # values of other inputs of the graph, by name
        self.tensors: dict[str, tuple[dict[str, Any], bytearray]] = {}  # parameters and buffers: the place, and a file
        self._files: dict[str, bytearray] = {}  # tensors may share one
        try:
            with zipfile.ZipFile(path) as self._archive:
                self._entries = _entries(self._archive, path)
                self._read(path)
        except (zipfile.BadZipFile, NotImplementedError, EOFError, OverflowError):
            raise HostileFile(f"{path.name} is no archive of torch.export; {EXPORT}") from None
        except (msgspec.DecodeError, *MALFORMED) as error:
            raise HostileFile(f"{path.name}: its JSON is not that of torch.export: {error!r:.200}") from None

    def _read(self, path: Path) -> None:
        models = [name for name in self._entries if name.startswith("models/") and name.endswith(".json")]
        if len(models) != 1:
            raise HostileFile(f"{path.name} has {len(models)} exported programs; it must have one: {EXPORT}")
        program, name = self._json(models[0]), models[0].removeprefix("models/").removesuffix(".json")
        version, module = program["schema_version"]["major"], program["graph_module"]
        if version != SCHEMA:
            raise HostileFile(
                f"{path.name} has version {version} of the schema; {SCHEMA} is read: export it with PyTorch 2.13"
            )
        self.graph: dict[str, Any] = module["graph"]
        folders = {
            f"data/{folder}/": self._json(f"data/{folder}/{name}_{folder}_config.json")["config"]
            for folder in ("weights", "constants")
        }
        for spec in module["signature"]["input_specs"]:
            self._input(*one(spec), folders)
        self.outputs = [_output(*one(spec)) for spec in module["signature"]["output_specs"]]

    def _input(self, kind: str, fields: dict[str, Any], folders: dict[str, Any]) -> None:
        """Takes an input of the graph: a tensor of requests, a tensor of the archive, or a constant."""
        if kind == "constant_input":
            self.constants[fields["name"]] = one(fields["value"])[1]
        elif kind == "user_input":
            what, value = one(fields["arg"])
            if what != "as_tensor":
                raise HostileFile(f"an input of the model is {what}, no tensor; export it with tensors as inputs")
            self.inputs.append(value["name"])
        elif kind in _STORED:
            self._stored(fields["arg"]["name"], fields[_STORED[kind]], folders)
        else:
            raise HostileFile(f"an input of the graph is a {kind}, which is never loaded; export a model without it")

    def _stored(self, name: str, own: str, folders: dict[str, Any]) -> None:
        folder = next((each for each, config in folders.items() if own in config), None)
        if folder is None:
            raise HostileFile(f"the archive lacks the tensor {own[:100]!r}")
        payload = folders[folder][own]
        if payload["use_pickle"] is not False or payload["tensor_meta"] is None:
            raise HostileFile(f"tensor {own[:100]!r} is stored as a pickle, which is never read; use plain tensors")
        path = folder + payload["path_name"]
        if path not in self._files:
            self._files[path] = self._bytes(path)
        self.tensors[name] = payload["tensor_meta"], self._files[path]

    def _json(self, name: str) -> dict[str, Any]:
        if name in self._entries and self._entries[name].file_size > MAX_JSON:
            raise HostileFile(f"{name[:200]} has {self._entries[name].file_size} bytes; the limit is {MAX_JSON}")
        return msgspec.json.decode(self._bytes(name), type=dict[str, Any])

    def _bytes(self, name: str) -> bytearray:
        """A file of the archive, without a second copy."""
        if name not in self._entries:
            raise HostileFile(f"the archive has no {name[:200]}; export the model again")
        data, at = bytearray(self._entries[name].file_size), 0
        with self._archive.open(self._entries[name]) as file:
            while at < len(data) and (size := file.readinto(memoryview(data)[at : at + _READ_BYTES])):  # type: ignore[attr-defined]
                at += size
        return data


def one(fields: Any) -> tuple[str, Any]:
    """Returns the kind and the value of a union. Raises HostileFile."""
    if not isinstance(fields, dict) or len(fields) != 1:
        raise HostileFile(f"the graph has {str(fields)[:100]} where one value belongs")
    return next(iter(fields.items()))


def _entries(archive: zipfile.ZipFile, path: Path) -> dict[str, zipfile.ZipInfo]:
    """The files in an archive, by their paths within its one folder. Entries are not compressed, so their sizes are
    bounded by that of the archive. Raises HostileFile."""
    found = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    has_code = any(name.startswith("code/") for name in found)
    if has_code or "data.pkl" in found:
        what = "TorchScript" if has_code else "a state dict"
        raise HostileFile(f"{path.name} is {what}, which is a pickle and is never read; {EXPORT}")
    if any(name.startswith("data/aotinductor/") for name in found):
        raise HostileFile(f"{path.name} has compiled code of AOTInductor, which is never loaded; {EXPORT}")
    if len(found) > MAX_ENTRIES:
        raise HostileFile(f"{path.name} has {len(found)} files; the limit is {MAX_ENTRIES}")
    if any(info.compress_type != zipfile.ZIP_STORED for info in found.values()):
        raise HostileFile(f"{path.name} has compressed files, which torch.export does not write; export it again")
    if sum(info.file_size for info in found.values()) > path.stat().st_size:
        raise HostileFile(f"{path.name} says that its files are larger than it is")
    return found


def _output(kind: str, fields: dict[str, Any]) -> str:
    """The name of an output. Raises HostileFile for one that is no tensor, or that changes the model."""
    if kind != "user_output":
        raise HostileFile(f"the model has a {kind}: it changes when it runs; call eval() before it is exported")
    what, value = one(fields["arg"])
    if what != "as_tensor":
        raise HostileFile(f"an output of the model is {what}, no tensor; export a model whose outputs are tensors")
    return str(value["name"])
