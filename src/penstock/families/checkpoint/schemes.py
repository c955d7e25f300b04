"""The schemes of quantised checkpoints, and which one a configuration names."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from penstock.families.checkpoint.fp8 import Fp8
from penstock.families.checkpoint.mxfp4 import ARCHITECTURES, Mxfp4
from penstock.families.checkpoint.scheme import SUPPORTED, Scheme
from penstock.families.hf_config import HFConfig
from penstock.families.spec import ModelSpec, Parameter

# Maps quant_method of a quantization_config to a function (config.json, its quantization_config) -> Scheme. The scheme
# of GGUF files is not among them: see gguf/scheme.py.
SCHEMES: Mapping[str, Callable[[HFConfig, HFConfig], Scheme]] = MappingProxyType(
    {
        "fp8": Fp8.of,
        "compressed-tensors": Fp8.of,
        "mxfp4": Mxfp4.of,
    }
)


def scheme_of(config: HFConfig, quantization: HFConfig) -> Scheme:
    """Returns the scheme of a config.json's quantization_config. Raises UnsupportedModel, also for a family whose
    weights are never quantised in this way."""
    method = quantization.get("quant_method")
    if {*(config.texts("architectures") or ())} & {*ARCHITECTURES} and method != "mxfp4":
        raise config.unsupported("quantization_config", method, "mxfp4, or weights in floats")
    if method not in SCHEMES:
        raise config.unsupported("quantization_config", method, SUPPORTED)
    return SCHEMES[method](config, quantization)


def with_scheme(spec: ModelSpec, scheme: Scheme) -> ModelSpec:
    """Returns the spec of a checkpoint in this scheme: its sources have the formats of their tensors' codes."""

    def quantized(parameter: Parameter) -> Parameter:
        kind = parameter.kind
        found = [scheme.stored(source.name, kind) for source in parameter.sources]
        if not any(found):  # there may be 50,000 sources
            return parameter
        pairs = zip(parameter.sources, found, strict=True)
        return replace(parameter, sources=tuple(replace(source, stored=stored) for source, stored in pairs))

    return replace(spec, scheme=scheme, parameters=tuple(map(quantized, spec.parameters)))
