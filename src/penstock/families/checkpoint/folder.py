"""Reads which tensors the checkpoint in a model's folder has."""

import re
from pathlib import Path

from penstock.families.checkpoint.safetensors_file import read_header
from penstock.families.checkpoint.stored import CheckpointError, StoredTensor
from penstock.gguf.json_file import read_json_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
_NAMED = 5  # tensors that an error names; it counts the others


def tensors_of_folder(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by name: of model.safetensors, else of the index's shards. Raises CheckpointError.

    Of both, transformers reads model.safetensors: who saves a model into the folder of another leaves an index there.
    """
    places = _places(folder / INDEX) if (folder / INDEX).is_file() else None
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    if places is not None:
        return _sharded(folder, places)
    unsafe = sorted(path.name for path in folder.glob("*") if path.suffix in {".bin", ".pt", ".pth", ".ckpt"})
    if unsafe:
        raise CheckpointError(
            f"{folder} has no {SINGLE}; {unsafe[0]} is not read, as loading it can run code: load and save the model "
            "with transformers, which writes safetensors, or use a version in safetensors or GGUF"
        )
    raise CheckpointError(f"{folder} has no weights: neither {SINGLE} nor {INDEX} is there; download them into it")


def refuse_tensors(what: str, names: list[str], why: str = "") -> None:
    """Raises CheckpointError if there are names: what the checkpoint does with these tensors, and why that is wrong."""
    if not names:
        return
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    reason = f", which {why}" if why else ""
    raise CheckpointError(f"the checkpoint {what} {', '.join(names[:_NAMED])}{more}{reason}")


def _places(path: Path) -> dict[str, str]:
    """The file of each tensor, as an index has it."""
    try:
        places = read_json_object(path).get("weight_map")
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CheckpointError(f"{path}: weight_map is not an object of tensor names and file names")
    return places


def _sharded(folder: Path, places: dict[str, str]) -> dict[str, StoredTensor]:
    path = folder / INDEX
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
    refuse_tensors(f"lacks, though {INDEX} lists them:", lost)
    return tensors
