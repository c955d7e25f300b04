"""The spec of the model in a folder or a GGUF file, and its sizes."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from penstock.config.facts import GroupFacts, MatrixFacts, MixtureFacts, ModelFacts
from penstock.declared.sampling import SAMPLING
from penstock.families.architectures import DECODERS, ENCODERS, FAMILIES
from penstock.families.checkpoint.schemes import scheme_of, with_scheme
from penstock.families.end_tokens import EndToken, find_end_tokens
from penstock.families.gguf.config import hf_config, sampling_defaults
from penstock.families.gguf.keys import WHERE
from penstock.families.gguf.scheme import as_in_file
from penstock.families.hf_config import HFConfig, UnsupportedModel
from penstock.families.pooling import with_pooling
from penstock.families.spec import ModelSpec
from penstock.families.transformers_model import transformers_spec, why_not_transformers
from penstock.families.wrong_models import no_config, unknown_architecture
from penstock.gguf import is_gguf, read_gguf
from penstock.gguf.json_file import read_json_object

_ALL = {**FAMILIES, **ENCODERS, **DECODERS}
MAX_CONFIG_BYTES = 4 << 20
FEW_LAYERS = 8
QUANTIZATION_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq"}  # and their quant_method


def spec_from_config(config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
    """The spec of a model from its config.json. Raises UnsupportedModel, which lists what is supported. `where` is the
    configuration's name in errors."""
    fields = HFConfig(config, where)
    architectures = fields.texts("architectures") or []
    known = [name for name in architectures if name in _ALL]
    if not known:
        why = unknown_architecture(
            architectures, fields.get("model_type"), FAMILIES, [*ENCODERS, *DECODERS], why_not_transformers
        )
        raise UnsupportedModel(f"{where}: {why}")
    quantization = fields.section("quantization_config") or fields.section("compression_config")
    spec = _ALL[known[0]](fields)
    if quantization is not None:
        spec = with_scheme(spec, scheme_of(fields, quantization))
    check_layers(spec)
    return _with_sensitive_layers(spec)


def _unknown_to_us(folder: Path, config: Mapping[str, Any]) -> ModelSpec | None:
    """The spec of a model that is not of our families, but that transformers' code can execute."""
    fields = HFConfig(config)
    architectures = fields.texts("architectures") or []
    if not architectures or any(name in _ALL for name in architectures) or fields.get("quantization_config"):
        return None
    return transformers_spec(folder, fields, architectures[0])


def _with_sensitive_layers(spec: ModelSpec) -> ModelSpec:
    """Mark the matrices of the first and the last layer: quantising these costs several times as much quality. With few
    layers they would be too large a part of the model."""
    if len(spec.layers) < FEW_LAYERS:
        return spec
    ends = ("layers.0.", f"layers.{len(spec.layers) - 1}.")
    parameters = (replace(p, sensitive=p.kind != "vector" and p.name.startswith(ends)) for p in spec.parameters)
    return replace(spec, parameters=tuple(parameters))


def load_spec(model: Path) -> ModelSpec:
    """The spec of a model: a folder, or a GGUF file. Its end tokens are those of all files.

    Raises UnsupportedModel, which names the file, also if the file is missing or cannot be read, and GgufError.
    """
    if is_gguf(model):
        return _spec_of_gguf(model)
    spec = _spec_of_folder(model)
    return replace(spec, eos_token_ids=tuple(token.id for token in _end_tokens(model, spec)))


def _spec_of_gguf(path: Path) -> ModelSpec:
    file = read_gguf(path)
    try:
        spec = spec_from_config(hf_config(file), WHERE)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path}: {error}") from None
    return as_in_file(spec, file)


def _spec_of_folder(folder: Path) -> ModelSpec:
    """The spec as config.json alone describes it."""
    path = folder / "config.json"
    try:
        config = _with_quantization(folder, read_json_object(path, max_bytes=MAX_CONFIG_BYTES))
        spec = _unknown_to_us(folder, config) or spec_from_config(config)
    except FileNotFoundError:
        raise UnsupportedModel(no_config(folder)) from None
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{folder}: {error}") from None
    except ValueError as error:
        raise UnsupportedModel(str(error)) from None
    try:
        spec = with_pooling(spec, folder)
        known = spec.transformers is not None or {*config["architectures"]} & {*FAMILIES}
        if spec.pooling is None and not known:
            raise UnsupportedModel("a decoder without a head generates nothing, and no modules.json says how it pools")
    except (UnsupportedModel, ValueError) as error:
        raise UnsupportedModel(f"{folder}: {error}") from None
    return spec


def _with_quantization(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with how matrices are quantised, which some tools write into a file of its own."""
    beside = (each for each in QUANTIZATION_FILES if (folder / each).is_file())
    file = None if config.get("quantization_config") else next(beside, None)
    if file is None:
        return config
    fields = read_json_object(folder / file, max_bytes=MAX_CONFIG_BYTES)
    return {**config, "quantization_config": {**fields, "quant_method": QUANTIZATION_FILES[file]}}


def load_end_tokens(model: Path) -> list[EndToken]:
    """The tokens that end an answer, and the files that name them. Raises what `load_spec` raises."""
    if is_gguf(model):
        texts = read_gguf(model).metadata.get("tokenizer.ggml.tokens") or ()
        ids = _spec_of_gguf(model).eos_token_ids
        return [EndToken(i, str(texts[i]) if i < len(texts) else "", ("the GGUF file",)) for i in ids]
    return _end_tokens(model, _spec_of_folder(model))


def _end_tokens(folder: Path, spec: ModelSpec) -> list[EndToken]:
    named = {
        "generation_config.json": _generation_config(folder).token_ids("eos_token_id"),
        "config.json": spec.eos_token_ids,
    }
    try:
        return find_end_tokens(folder, named, spec.vocabulary)
    except (OSError, ValueError) as error:
        raise UnsupportedModel(str(error)) from None


def load_generation_defaults(model: Path) -> dict[str, float]:
    """The sampling parameters that a model recommends, in generation_config.json or in a GGUF file's metadata, named as
    in SamplingParams; empty without any."""
    config = HFConfig(sampling_defaults(read_gguf(model)), str(model)) if is_gguf(model) else _generation_config(model)
    given = {name: each for name, each in SAMPLING.items() if each.recommended and config.get(name) is not None}
    return {
        name: config.integer(name, least=0) if each.whole else config.number(name, or_zero=True)
        for name, each in given.items()
    }


def model_facts(spec: ModelSpec) -> ModelFacts:
    """The sizes of a model that memory sizing and `resolve` need."""
    layers = spec.layers
    return ModelFacts(
        family=spec.family,
        num_parameters=spec.num_parameters(),
        matrices=_matrices(spec),
        vector_elements=_vector_elements(spec),
        float32_elements=sum(p.size for p in spec.parameters if p.float32),
        num_layers=len(layers),
        vocab_size=spec.vocabulary,
        hidden_size=spec.hidden_size,
        widest_mlp=max(max(x.intermediate_size, x.moe.shared_intermediate_size if x.moe else 0) for x in layers),
        widest_attention=max(layer.attention.memory.per_token for layer in layers),
        widest_gathered=max(layer.attention.memory.per_context_token for layer in layers),
        groups=tuple(
            GroupFacts(window, len(spec.group_layers(group)), spec.group_page(group))
            for group, window in enumerate(spec.windows)
        ),
        max_position=spec.max_position,
        state_elements=len(spec.state_layers) * spec.state_width,
        checkpoint_dtype=spec.checkpoint_dtype,
        eos_token_ids=spec.eos_token_ids,
        mixture=_mixture(spec),
        pooling=spec.pooling,
        transformers="" if spec.transformers is None else spec.transformers.architecture,
        samples=spec.encoder is None and spec.has_head and spec.vocab_start == 0,
        head_part=spec.vocab_size if spec.has_head and spec.vocab_size < spec.vocabulary else 0,
    )


def _mixture(spec: ModelSpec) -> MixtureFacts | None:
    mixtures = [layer.moe for layer in spec.layers if layer.moe is not None]
    if not mixtures:
        return None
    widest = max(mixtures, key=lambda moe: moe.experts_per_token * moe.intermediate_size)
    return MixtureFacts(
        experts=widest.num_experts, per_token=widest.experts_per_token, intermediate_size=widest.intermediate_size
    )


def _matrices(spec: ModelSpec) -> tuple[MatrixFacts, ...]:
    names = {parameter.name for parameter in spec.parameters}
    counts = Counter(
        (
            *(rows // p.experts, p.shape[1:], p.kind, p.experts, stored, p.sensitive),
            *(".experts." in p.name, p.name.replace(".weight", ".bias") in names),
            tuple(fmt and fmt.name for fmt in stored),  # equal formats may have different names
        )
        for p in spec.parameters
        if p.kind != "vector"
        for rows, stored in p.sections
    )
    mixture = _mixture(spec)
    return tuple(
        MatrixFacts(
            rows=rows,
            columns=prod(columns),
            count=count,
            bias=bias,
            gated=kind == "gated",
            vocabulary=kind in ("vocabulary", "table"),
            router=kind in ("router", "table"),
            experts=experts,
            share=mixture.per_token / mixture.experts if mixture and routed else 1.0,
            stored=stored if any(stored) else (),
            sensitive=sensitive,
        )
        for (rows, columns, kind, experts, stored, sensitive, routed, bias, _), count in counts.items()
    )


def _vector_elements(spec: ModelSpec) -> int:
    """Elements of vectors of the model's dtype, but for biases of matrices and a block's output scale, which is held as
    a number. A norm of heads is held once a head."""
    matrices = {p.name for p in spec.parameters if p.kind != "vector"}
    vectors = [p for p in spec.parameters if p.kind == "vector" and not p.float32]
    stored = sum(p.size for p in vectors if p.name.replace(".bias", ".weight") not in matrices)
    return stored + sum(layer.attention.memory.repeated_weights - layer.output_scale for layer in spec.layers)


def _generation_config(folder: Path) -> HFConfig:
    path = folder / "generation_config.json"
    try:
        return HFConfig(read_json_object(path, max_bytes=MAX_CONFIG_BYTES), str(path))
    except FileNotFoundError:
        return HFConfig({})
    except ValueError as error:
        raise UnsupportedModel(str(error)) from None


def check_layers(spec: ModelSpec) -> None:
    """Raise UnsupportedModel unless all layers are causal, and those of a KV group keep the same in a page."""
    if spec.encoder is None and not all(layer.attention.causal for layer in spec.layers):
        raise UnsupportedModel("a layer's attention is not causal; supported: causal attention, computed in chunks")
    if len({spec.layers[i].attention.page for i in spec.state_layers}) > 1:
        raise UnsupportedModel("layers have states of different sizes; supported: one size for all")
    for group, window in enumerate(spec.windows):
        pages = {spec.layers[i].attention.page for i in spec.group_layers(group)}
        if len(pages) > 1:
            shapes = sorted((page.heads, page.width) for page in pages)
            raise UnsupportedModel(f"layers with {window} have different (KV heads, head size): {shapes}")
