"""The tensors of a checkpoint on disk, checked against a spec. Nothing is allocated here."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from penstock.families.checkpoint.folder import refuse_tensors, tensors_of_folder
from penstock.families.checkpoint.stacks import divided
from penstock.families.checkpoint.stored import F32_ONLY, StoredTensor
from penstock.families.spec import ModelSpec
from penstock.gguf import TYPES, is_gguf
from penstock.weights.gguf_file import read_gguf_tensors

LOADABLE = ("F32", "BF16", "F16")  # and in GGUF files all of penstock.gguf.TYPES


def stored_tensors(model: Path, spec: ModelSpec | None = None) -> dict[str, StoredTensor]:
    """The tensors of a model, by Hugging Face's names: of a GGUF file, or of the checkpoint in a folder: from the
    index's shards, else from model.safetensors. With a spec, by the names of its sources: its scheme joins the tensors
    of a matrix, tensors of several matrices are divided as it says, and its `base_prefix` is put before the names of a
    decoder that was saved without its head, as embedding models are. Raises CheckpointError, GgufError or
    UnsupportedModel."""
    tensors = read_gguf_tensors(model) if is_gguf(model) else tensors_of_folder(model)
    if spec is None:
        return tensors
    wanted = {source.name: source.stored for p in spec.parameters for source in p.sources}
    if spec.scheme is not None:
        tensors = spec.scheme.join(tensors, wanted)
    tensors = divided(tensors, wanted)
    base_prefix = spec.base_prefix
    if not base_prefix or any(name.startswith(base_prefix) for name in tensors):
        return tensors
    return {name if name.startswith("lm_head.") else base_prefix + name: tensor for name, tensor in tensors.items()}


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor that a model's spec names. Several sources may be parts of one tensor."""
    shapes: dict[str, tuple[int, ...]] = {}
    for parameter in spec.parameters:
        for source in parameter.sources:
            if not parameter.shape:
                shapes[source.name] = ()
                continue
            columns = parameter.shape[1:]
            if source.columns:
                columns = (source.first_column + columns[0],)
            shape = (*columns, source.end_row) if source.transposed else (source.end_row, *columns)
            shapes[source.name] = tuple(map(max, shape, shapes.get(source.name, shape)))
    return shapes


def check_tensors(spec: ModelSpec, tensors: dict[str, StoredTensor]) -> None:
    """Raise CheckpointError unless the tensors are exactly those the spec names, in shape and in a type we load."""
    sources = tensor_shapes(spec)
    allowed = {tensor for tensor, _ in spec.duplicates}
    config = "metadata" if any(is_gguf(tensor.path) for tensor in tensors.values()) else "config.json"
    refuse_tensors(
        "has no tensor",
        [name for name in sources if name not in tensors],
        f"a {spec.family} model with this {config} needs",
    )
    refuse_tensors(
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
    refuse_tensors(f"has tensors of another shape than {config} says:", wrong)
    _check_types(spec, tensors)


def _check_types(spec: ModelSpec, tensors: dict[str, StoredTensor]) -> None:
    """Only matrices may be quantised, and some steps need values of float32."""
    loadable = {*LOADABLE, *TYPES}
    vectors = {source.name for p in spec.parameters if p.kind == "vector" for source in p.sources}
    types = {source.name: tensors[source.name].dtype for p in spec.parameters for source in p.sources}
    unknown = [f"{name} ({kind})" for name, kind in types.items() if kind not in loadable and not tensors[name].steps]
    refuse_tensors(f"has tensors of a dtype that is not supported (supported: {', '.join(LOADABLE)}):", unknown)
    quantized = [f"{name} ({kind})" for name, kind in types.items() if kind not in LOADABLE and name in vectors]
    refuse_tensors(f"has norms or biases that are quantised (supported: {', '.join(LOADABLE)}):", quantized)
    others = {name: kind for name, kind in types.items() if kind != "F32" and tensors[name].steps}
    for step in F32_ONLY:
        wrong = [
            f"{name} ({kind})" for name, kind in others.items() if any(isinstance(s, step) for s in tensors[name].steps)
        ]
        refuse_tensors(f"has {step.what} in another type than F32:", wrong)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
