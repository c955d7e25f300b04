"""Makes the spec of a model that transformers' own code executes: any decoder that uses transformers'
AttentionInterface, so that its attention can be ours.

transformers is not imported here. Whether it has the architecture is read from its source, in milliseconds.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from penstock.families.checkpoint.folder import tensors_of_folder
from penstock.families.checkpoint.stored import CheckpointError, StoredTensor
from penstock.families.hf_config import HFConfig, UnsupportedModel, checkpoint_dtype, layer_windows
from penstock.families.kinds.attention import GroupedQuerySpec, RopeSpec
from penstock.families.rope_config import context_length
from penstock.families.spec import LayerSpec, ModelSpec, Parameter, TensorSource, TransformersCode
from penstock.families.wrong_models import EXAMPLE
from penstock.messages import Window

INSTALL = "pip install 'penstock[transformers]'"
MAX_LAYERS = 1024
_DECODER = re.compile(r"[A-Za-z0-9_]+(ForCausalLM|LMHeadModel)")
_MODULE = re.compile(r"[a-z0-9_]+")
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_MAX_SOURCE_BYTES = 4 << 20
# Fields of config.json that name code, files or kernels to load. transformers must not see them.
_NEVER_PASSED = ("auto_map", "fusion_config", "transformers_weights", "trust_remote_code", "attn_implementation")
_CONTEXT_DEPENDENT_ROPE = ("dynamic", "longrope", "su")


def is_decoder(architecture: str) -> bool:
    """Whether the name is that of a decoder with a head."""
    return _DECODER.fullmatch(architecture) is not None


def why_not_transformers(architecture: str) -> str:
    """Returns why transformers' code does not execute an architecture that Penstock does not have; "" if it is not a
    decoder's."""
    if not is_decoder(architecture):
        return ""
    if find_spec("transformers") is None:
        return f"transformers' code may execute it: {INSTALL}"
    return f"transformers {_version()} does not have it either"


def transformers_spec(folder: Path, config: HFConfig, architecture: str) -> ModelSpec | None:
    """Returns the spec of a model outside of the registry. None: transformers has no such decoder, or is not installed.

    Reads the headers of the weights. Raises UnsupportedModel if the model needs what our attention does not do.
    """
    uses = uses_interface(architecture, config.get("model_type"))
    if uses is None:
        return None
    if not uses:
        raise UnsupportedModel(
            f"architecture {architecture!r} is not supported: Penstock does not have it, and transformers' code of it "
            "does not use the AttentionInterface, so its attention cannot be ours; use a model of another family, such "
            f"as {EXAMPLE} (`penstock models` lists them)"
        )
    try:
        tensors = tensors_of_folder(folder)
    except CheckpointError as error:
        raise UnsupportedModel(
            f"{architecture} is executed by transformers' code, which is planned from its weights: {error}"
        ) from None
    config = config.renamed(
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        hidden_size="n_embd",
        intermediate_size="n_inner",
        max_position_embeddings="n_positions",
    )
    _refuse(config)
    return _spec(config, tensors, TransformersCode(architecture, _version(), _passed(config)))


def uses_interface(architecture: str, model_type: Any) -> bool | None:
    """Whether transformers' code of an architecture uses its AttentionInterface; None without such code."""
    spec = find_spec("transformers")
    if spec is None or not spec.submodule_search_locations or not isinstance(model_type, str):
        return None
    if not is_decoder(architecture):
        return None
    name = model_type.replace("-", "_")
    for module in dict.fromkeys((name, name.removesuffix("_text"))):
        if not _MODULE.fullmatch(module):
            continue
        path = Path(spec.submodule_search_locations[0], "models", module, f"modeling_{module}.py")
        if not path.is_file() or path.stat().st_size > _MAX_SOURCE_BYTES:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if re.search(rf"^class {architecture}\(", text, re.MULTILINE):
            return _INTERFACE in text
    return None


def _version() -> str:
    try:
        return version("transformers")
    except PackageNotFoundError:  # a source tree on the path
        return "unknown"


def _passed(config: HFConfig) -> str:
    """The configuration that transformers gets, as JSON. Private fields could choose other code."""
    names = [name for name in config.names() if not name.startswith("_") and name not in _NEVER_PASSED]
    return json.dumps({name: config.get(name) for name in names}, sort_keys=True)


def _refuse(config: HFConfig) -> None:
    """Raise UnsupportedModel for what a short probe would not find: it depends on long contexts, or on the batch."""
    config.refuse("is_encoder_decoder", "a model without an encoder")
    config.refuse("attention_chunk_size", "attention over all tokens, or over a sliding window")
    config.refuse("kv_lora_rank", "attention that keeps keys and values, not latent vectors")
    for name, value in _nested(config):
        if name in ("rope_type", "type") and value in _CONTEXT_DEPENDENT_ROPE:
            raise config.unsupported(
                name, value, "rope whose frequencies do not depend on the longest sequence of a step"
            )


def _nested(config: HFConfig) -> Iterator[tuple[str, Any]]:
    """Fields of the objects within the configuration, two deep."""
    for name in config.names():
        outer = config.get(name)
        if not isinstance(outer, dict):
            continue
        yield from outer.items()
        for inner in outer.values():
            if isinstance(inner, dict):
                yield from inner.items()


def _spec(config: HFConfig, tensors: Mapping[str, StoredTensor], code: TransformersCode) -> ModelSpec:
    count = config.integer("num_hidden_layers", most=MAX_LAYERS)
    hidden = config.integer("hidden_size")
    positions = context_length(config, config.integer("max_position_embeddings"))
    windows = _windows(config, count, positions)
    groups = sorted(set(windows))
    attention = _attention(config, hidden)
    width = config.integer("intermediate_size", 4 * hidden)
    return ModelSpec(
        family=config.text("model_type"),
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        layers=tuple(LayerSpec(attention, width, groups.index(window)) for window in windows),
        windows=tuple(map(Window, groups)),
        max_position=positions,
        norm_eps=1e-6,  # transformers' code reads its own
        tie_embeddings=config.flag("tie_word_embeddings"),
        checkpoint_dtype=checkpoint_dtype(config),
        eos_token_ids=config.token_ids("eos_token_id"),
        parameters=_parameters(tensors),
        transformers=code,
    )


def _attention(config: HFConfig, hidden: int) -> GroupedQuerySpec:
    """The attention of every layer. The decoder compares it with the arguments that transformers' code passes to our
    attention."""
    heads = config.integer("num_attention_heads")
    kv_heads = 1 if config.get("multi_query") is True else config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.unsupported("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    head_dim = config.integer("head_dim", max(hidden // heads, 1))
    if head_dim % 2:
        raise config.unsupported("head_dim", head_dim, "an even number")
    return GroupedQuerySpec(heads, kv_heads, head_dim, RopeSpec(scaling="off"), scale=head_dim**-0.5)


def _windows(config: HFConfig, layers: int, positions: int) -> Sequence[int]:
    """The tokens that a query of each layer sees, itself included; 0: all."""
    window = config.integer("sliding_window", 0, least=0)
    if config.get("use_sliding_window") is False:
        window = 0
    windows = layer_windows(config, layers, window, [window > 0] * layers)
    return [window if window < positions else 0 for window in windows]


def _parameters(tensors: Mapping[str, StoredTensor]) -> tuple[Parameter, ...]:
    """The tensors as they are stored. The matrix with the most rows is the embedding."""
    for name, tensor in tensors.items():
        if not prod(tensor.shape):
            raise UnsupportedModel(f"the checkpoint's tensor {name} has the shape {list(tensor.shape)}: it is empty")
    matrices = [tensor for tensor in tensors.values() if len(tensor.shape) > 1]
    if not matrices:
        raise UnsupportedModel("the checkpoint has no matrix")
    embedding = max(matrices, key=lambda tensor: tensor.shape[0]).name
    return tuple(
        Parameter(
            "embedding.weight" if name == embedding else name,
            tensor.shape,
            (TensorSource(name, 0, tensor.rows),),
            precise=len(tensor.shape) > 1 or tensor.dtype == "F32",
        )
        for name, tensor in tensors.items()
    )
