"""How a GGUF file stores matrices: blocks of codes, each with its scales, and for some architectures rows in another
order."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penstock.config.weights import GGUF_FORMATS, WeightFormat
from penstock.families.checkpoint.scheme import Formats
from penstock.families.checkpoint.schemes import with_scheme
from penstock.families.checkpoint.stored import StoredTensor
from penstock.families.gguf.config import rotary_dim
from penstock.families.gguf.names import EXPERT, halves, hf_tensor_name, is_interleaved
from penstock.families.spec import ModelSpec, Parameter
from penstock.gguf import GgufFile


@dataclass(frozen=True)
class Gguf:
    """Reads blocks as they are: one tensor holds codes and scales. `types` are those of matrices, by Hugging Face's
    names with {} for an expert's number."""

    types: Mapping[str, str] = field(repr=False, compare=False)

    def stored(self, name: str, kind: str, columns: int) -> WeightFormat | None:
        return GGUF_FORMATS.get(self.types.get(EXPERT.sub("{}", name), ""))

    def join(self, tensors: Mapping[str, StoredTensor], wanted: Formats) -> dict[str, StoredTensor]:
        return dict(tensors)


def as_in_file(spec: ModelSpec, file: GgufFile) -> ModelSpec:
    """Returns the spec, whose sources have the formats and the order of rows of the file's tensors."""
    architecture = str(file.metadata.get("general.architecture"))
    names = {
        name: tensor for tensor in file.tensors.values() for name in halves(hf_tensor_name(architecture, tensor.name))
    }
    spec = with_scheme(spec, Gguf({name: tensor.type.name for name, tensor in names.items()}))
    # In llama.cpp's order for rope, row 2 i + s of a head is row s * half + i here.
    half = rotary_dim(file) // 2
    turned = {name for name, tensor in names.items() if is_interleaved(architecture, tensor.name)}
    if not half or not turned:
        return spec

    def straight(parameter: Parameter) -> Parameter:
        if not any(source.name in turned for source in parameter.sources):
            return parameter
        order = ((0, half, 2), (1, half, 2))
        sources = (replace(each, order=order) if each.name in turned else each for each in parameter.sources)
        return replace(parameter, sources=tuple(sources))

    return replace(spec, parameters=tuple(map(straight, spec.parameters)))
