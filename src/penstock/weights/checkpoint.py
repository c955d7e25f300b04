"""The tensors of a checkpoint on disk, checked against a spec. Nothing is allocated here."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from penstock.families.json_file import read_json_object
from penstock.families.spec import ModelSpec
from penstock.gguf import TYPES, is_gguf
from penstock.weights.gguf_file import read_gguf_tensors
from penstock.weights.safetensors_file import read_header
from penstock.weights.stacks import divided
from penstock.weights.stored import CheckpointError, StoredTensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LOADABLE = ("F32", "BF16", "F16")  # and in GGUF files all of penstock.gguf.TYPES
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
_NAMED = 5  # tensors that an error names; it counts the others


def stored_tensors(model: Path, spec: ModelSpec | None = None) -> dict[str, StoredTensor]:
    """The tensors of a model, by Hugging Face's names: of a GGUF file, or of the checkpoint in a folder: from the
    index's shards, else from model.safetensors. With a spec, by the names of its sources: tensors of several matrices
    are divided as it says, and its `base_prefix` is put before the names of a decoder that was saved without its head,
    as embedding models are. Raises CheckpointError, GgufError or UnsupportedModel."""
    tensors = read_gguf_tensors(model) if is_gguf(model) else _of_folder(model)
    if spec is None:
        return tensors
    tensors = divided(tensors, (source.name for p in spec.parameters for source in p.sources))
    base_prefix = spec.base_prefix
    if not base_prefix or any(name.startswith(base_prefix) for name in tensors):
        return tensors
    return {name if name.startswith("lm_head.") else base_prefix + name: tensor for name, tensor in tensors.items()}


def _of_folder(folder: Path) -> dict[str, StoredTensor]:
    if (folder / INDEX).is_file():
        return _sharded(folder)
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    unsafe = sorted(path.name for path in folder.glob("*") if path.suffix in {".bin", ".pt", ".pth", ".ckpt"})
    if unsafe:
        raise CheckpointError(
            f"{folder} has no {SINGLE}; {unsafe[0]} is not read, as loading it can run code: load and save the model "
            "with transformers, which writes safetensors, or use a version in safetensors or GGUF"
        )
    raise CheckpointError(f"{folder} has no weights: neither {SINGLE} nor {INDEX} is there; download them into it")


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor that a model's spec names. Several sources may be parts of one tensor."""
    shapes: dict[str, tuple[int, ...]] = {}
    for parameter in spec.parameters:
        for source in parameter.sources:
            rows = max(source.end_row, shapes.get(source.name, (0,))[-1 if source.transposed else 0])
            columns = parameter.shape[1:]
            shapes[source.name] = (*columns, rows) if source.transposed else (rows, *columns)
    return shapes


def check_tensors(spec: ModelSpec, tensors: dict[str, StoredTensor]) -> None:
    """Raise CheckpointError unless the tensors are exactly those the spec names, in shape and in a type we load."""
    sources = tensor_shapes(spec)
    allowed = {tensor for tensor, _ in spec.duplicates}
    config = "metadata" if any(is_gguf(tensor.path) for tensor in tensors.values()) else "config.json"
    _refuse(
        "has no tensor",
        [name for name in sources if name not in tensors],
        f"a {spec.family} model with this {config} needs",
    )
    _refuse(
        "has the unexpected tensor",
        [
            name
            for name in tensors
            if name not in sources and name not in allowed and not _matches(name, spec.ignored_tensors)
        ],
        f"no {spec.family} model with this {config} has",
    )
    wrong = [
        f"{name} {list(tensors[name].shape)} (expected {list(shape)})"
        for name, shape in sources.items()
        if tensors[name].shape != shape
    ]
    _refuse(f"has tensors of another shape than {config} says:", wrong)
    _check_types(spec, tensors)


def _check_types(spec: ModelSpec, tensors: dict[str, StoredTensor]) -> None:
    """Only matrices may be quantised, and only float32 values can be shifted."""
    loadable = {*LOADABLE, *TYPES}
    vectors = {source.name for p in spec.parameters if p.kind == "vector" for source in p.sources}
    types = {source.name: tensors[source.name].dtype for p in spec.parameters for source in p.sources}
    unknown = [f"{name} ({kind})" for name, kind in types.items() if kind not in loadable]
    _refuse(f"has tensors of a dtype that is not supported (supported: {', '.join(LOADABLE)}):", unknown)
    quantized = [f"{name} ({kind})" for name, kind in types.items() if kind not in LOADABLE and name in vectors]
    _refuse(f"has norms or biases that are quantised (supported: {', '.join(LOADABLE)}):", quantized)
    shifted = [f"{name} ({kind})" for name, kind in types.items() if kind != "F32" and tensors[name].shift]
    _refuse("has norms with 1 added in another type than F32:", shifted)


def _refuse(what: str, names: list[str], why: str = "") -> None:
    if not names:
        return
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    reason = f", which {why}" if why else ""
    raise CheckpointError(f"the checkpoint {what} {', '.join(names[:_NAMED])}{more}{reason}")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _sharded(folder: Path) -> dict[str, StoredTensor]:
    path = folder / INDEX
    try:
        places = read_json_object(path).get("weight_map")
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CheckpointError(f"{path}: weight_map is not an object of tensor names and file names")
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(places.values())):
        if not _FILE_NAME.fullmatch(file):
            raise CheckpointError(f"{path}: {file!r} is not the name of a safetensors file in the same folder")
        if not (folder / file).is_file():
            count = sum(place == file for place in places.values())
            raise CheckpointError(f"{folder}: the shard {file} is missing, which holds {count} tensors; download it")
        for name, tensor in read_header(folder / file).items():
            if places.get(name) != file:
                raise CheckpointError(f"{folder / file}: holds {name}, which {INDEX} places in {places.get(name)}")
            tensors[name] = tensor
    lost = [name for name in places if name not in tensors]
    _refuse(f"lacks, though {INDEX} lists them:", lost)
    return tensors
