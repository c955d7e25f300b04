"""The list of schemes, and the choice of a checkpoint's scheme by its configuration."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from penstock.families.checkpoint.auto_round import auto_round
from penstock.families.checkpoint.awq import Awq
from penstock.families.checkpoint.bitsandbytes import bitsandbytes
from penstock.families.checkpoint.compressed import compressed_tensors, modelopt
from penstock.families.checkpoint.fp8 import Fp8
from penstock.families.checkpoint.gptq import Gptq
from penstock.families.checkpoint.mxfp4 import ARCHITECTURES, Mxfp4
from penstock.families.checkpoint.scheme import SUPPORTED, Scheme
from penstock.families.hf_config import HFConfig
from penstock.families.spec import ModelSpec, Parameter

# quant_method -> a function (config.json, its quantization_config) -> Scheme. GGUF files have no quant_method: their
# scheme is in families/gguf/scheme.py.
SCHEMES: Mapping[str, Callable[[HFConfig, HFConfig], Scheme]] = {
    "gptq": Gptq.of,
    "awq": Awq.of,
    "auto-round": auto_round,
    "compressed-tensors": compressed_tensors,
    "modelopt": modelopt,
    "bitsandbytes": bitsandbytes,
    "fp8": Fp8.of,
    "mxfp4": Mxfp4.of,
}


def scheme_of(config: HFConfig, quantization: HFConfig) -> Scheme:
    """Returns the scheme that `quantization`, a config.json's quantization_config, names. Raises UnsupportedModel for
    an unknown one, and for any but mxfp4 in the families of mxfp4.py."""
    method = quantization.get("quant_method")
    if {*(config.texts("architectures") or ())} & {*ARCHITECTURES} and method != "mxfp4":
        raise config.unsupported("quantization_config", method, "mxfp4, or weights in floats")
    if not isinstance(method, str) or method not in SCHEMES:
        raise config.unsupported("quantization_config", method, SUPPORTED)
    return SCHEMES[method](config, quantization)


def with_scheme(spec: ModelSpec, scheme: Scheme) -> ModelSpec:
    """Returns the spec with the scheme, and with the format of each source (TensorSource.stored)."""

    def quantized(parameter: Parameter) -> Parameter:
        kind = parameter.kind
        columns = parameter.shape[-1] if parameter.shape else 1
        found = [scheme.stored(source.name, kind, columns) for source in parameter.sources]
        if not any(found):  # a fast path: there may be 50,000 sources
            return parameter
        pairs = zip(parameter.sources, found, strict=True)
        return replace(parameter, sources=tuple(replace(source, stored=stored) for source, stored in pairs))

    return replace(spec, scheme=scheme, parameters=tuple(map(quantized, spec.parameters)))
