"""The tensors of a model in GGUF, by Hugging Face's names."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from penstock.families.checkpoint.stored import CheckpointError, Logarithm, Shift, StoredTensor
from penstock.families.experts import MAX_EXPERTS
from penstock.families.gguf.names import LONG_FACTORS, ROPE_FACTORS, SHIFTED, SHORT_FACTORS, halves, hf_tensor_name
from penstock.gguf import GgufTensor, read_gguf, short

_BY_HEAD = (".k_b_proj.weight", ".v_b_proj.weight")  # [heads, rows, columns] in a file: the rows of all heads here


def read_gguf_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, and of the other parts if it is one of several. Each matrix of an expert is a tensor.

    Raises GgufError, UnsupportedModel or CheckpointError.
    """
    file = read_gguf(path)
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(f"{path}: metadata: general.architecture is missing")
    found: dict[str, StoredTensor] = {}
    for tensor in file.tensors.values():
        if tensor.name in (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS):
            continue
        name, stored = hf_tensor_name(architecture, tensor.name), _stored(tensor)
        if architecture in SHIFTED and name.endswith("norm.weight") and ".ssm_" not in tensor.name:
            stored = stored.then(Shift(-1.0))
        if ".ssm_" in tensor.name:
            stored = _of_state(stored)
        if name.endswith(".shared_expert_gate.weight") and len(stored.shape) == 1:
            stored = replace(stored, shape=(1, *stored.shape))
        if name.endswith(_BY_HEAD):
            stored = replace(stored, shape=(math.prod(stored.shape[:-1]), *stored.shape[-1:]))
        named = {name: stored}
        if "{}" in name:
            named = {
                each.format(i): part
                for i, expert in enumerate(_experts(stored, vectors=name.endswith(".bias")))
                for each, part in zip(halves(name), _parts(expert, len(halves(name))), strict=True)
            }
        if twice := named.keys() & found.keys():
            raise CheckpointError(f"{path}: {short(tensor.name)} is also there by the name {short(twice.pop())}")
        found |= named
    return found


def _stored(tensor: GgufTensor) -> StoredTensor:
    kind = tensor.type
    block = kind.block_values, kind.block_bytes
    return StoredTensor(tensor.name, tensor.path, kind.name, tensor.shape, tensor.offset, tensor.size, block)


def _of_state(stored: StoredTensor) -> StoredTensor:
    """A tensor of a layer with a state. A file has other shapes of the convolution and of vectors."""
    if stored.name.endswith(".ssm_conv1d.weight") and len(stored.shape) == 2:
        return replace(stored, shape=(stored.shape[0], 1, stored.shape[1]))
    if stored.name.endswith((".ssm_a", ".ssm_d", ".ssm_norm.weight")):
        vector = replace(stored, shape=(math.prod(stored.shape),))
        return vector.then(Logarithm()) if stored.name.endswith(".ssm_a") else vector
    return stored


def _experts(stored: StoredTensor, *, vectors: bool) -> list[StoredTensor]:
    """The matrices of a tensor [experts, rows, columns], or the vectors of a tensor [experts, rows]."""
    dimensions = 2 if vectors else 3
    if len(stored.shape) == dimensions - 1:  # of one expert: llama.cpp leaves out leading dimensions of size 1
        stored = replace(stored, shape=(1, *stored.shape))
    if len(stored.shape) != dimensions or stored.shape[0] > MAX_EXPERTS:
        raise CheckpointError(
            f"{stored.path}: tensor {short(stored.name)} has the shape {list(stored.shape)}; expected the matrices of "
            f"1 to {MAX_EXPERTS} experts"
        )
    return stored.entries()


def _parts(stored: StoredTensor, count: int) -> Iterator[StoredTensor]:
    """So many equal parts of the rows of a tensor."""
    if stored.shape[0] % count:
        raise CheckpointError(
            f"{stored.path}: tensor {short(stored.name)} has {stored.shape[0]} rows for each expert; expected a "
            f"multiple of {count}"
        )
    rows, size = stored.shape[0] // count, stored.size // count
    for i in range(count):
        yield replace(stored, shape=(rows, *stored.shape[1:]), offset=stored.offset + i * size, size=size)
