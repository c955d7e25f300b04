"""Shared by nearly all families: how a Llama-like configuration is read, and the names and shapes of its tensors."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from penstock.families.attention_kinds import GroupedQuerySpec, RopeSpec
from penstock.families.experts import ExpertNames, expert_parameters
from penstock.families.hf_config import HFConfig, activation, checkpoint_dtype, layer_windows, rope
from penstock.families.spec import LayerSpec, ModelSpec, Parameter, stacked

MAX_LAYERS = 2000

# (prefix of our names, prefix of the checkpoint's, the layer's AttentionSpec, hidden size) to its parameters
AttentionParameters = Callable[[str, str, Any, int], list[Parameter]]


def num_layers(config: HFConfig) -> int:
    return config.integer("num_hidden_layers", most=MAX_LAYERS)


def layer_spec(
    config: HFConfig,
    *,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    act: tuple[str, str] = ("hidden_act", "silu"),
    attention_scale: float | None = None,
    rope_spec: RopeSpec | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    post_norms: bool = False,
) -> LayerSpec:
    """A layer in KV group 0, from the configuration and the family's arguments.

    `num_heads`, `num_kv_heads` and `head_dim` are the family's defaults for a configuration without them; `act` is the
    activation's field and its default. Raises UnsupportedModel for sizes that contradict each other.
    """
    hidden = config.integer("hidden_size")
    heads = _integer(config, "num_attention_heads", num_heads)
    kv_heads = config.integer("num_key_value_heads", heads if num_kv_heads is None else num_kv_heads)
    if heads % kv_heads:
        raise config.unsupported("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    if config.get("head_dim") is None and head_dim is None and hidden % heads:
        raise config.unsupported("num_attention_heads", heads, f"a divisor of hidden_size ({hidden}), or give head_dim")
    size = config.integer("head_dim", hidden // heads if head_dim is None else head_dim)
    if size % 2:
        raise config.unsupported("head_dim", size, "an even size: rope rotates its halves")
    attention = GroupedQuerySpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        rope=rope_spec or rope(config),
        scale=attention_scale or size**-0.5,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
    )
    return LayerSpec(
        attention,
        intermediate_size=config.integer("intermediate_size"),
        kv_group=0,
        activation=activation(config, *act),
        mlp_bias=mlp_bias,
        post_norms=post_norms,
    )


def upper_layer_windows(config: HFConfig) -> tuple[int, ...]:
    """The window of each layer by Qwen's rule: with use_sliding_window, layers from max_window_layers up have it."""
    count = num_layers(config)
    window = config.integer("sliding_window", 4096) if config.flag("use_sliding_window") else 0
    first = config.integer("max_window_layers", 28, least=0)
    return layer_windows(config, count, window, [bool(window) and i >= first for i in range(count)])


def decoder_spec(
    config: HFConfig,
    family: str,
    layers: LayerSpec | Sequence[LayerSpec],
    windows: Sequence[int] | None = None,
    *,
    prefix: str = "",
    vocab_size: int | None = None,
    max_position: int | None = None,
    tied: bool = False,
    norm_offset: float = 0.0,
    embedding_scale: float = 1.0,
    experts: ExpertNames | None = None,
    attention_parameters: AttentionParameters | None = None,
) -> ModelSpec:
    """The whole model: one layer repeated, or the given layers.

    `windows` has the number of tokens that a query sees, per layer (None: all of them). KV groups follow from it and
    from what the layers keep. `prefix` stands before every tensor name. `vocab_size`, `max_position` and `tied` are the
    family's defaults. `experts` names the tensors of mixtures. `attention_parameters` makes the parameters of each
    layer's attention; None: those of GroupedQuerySpec, by Llama's names.
    """
    if isinstance(layers, LayerSpec):
        layers = [layers] * num_layers(config)
    positions = _integer(config, "max_position_embeddings", max_position)
    # A window that no position can leave is full attention: one KV group less.
    seen = [window if window < positions else 0 for window in windows or [0] * len(layers)]
    # Layers that see the same tokens and keep the same of each share a block table.
    kept = [(window, layer.attention.page) for layer, window in zip(layers, seen, strict=True)]
    groups = sorted(dict.fromkeys(kept), key=lambda group: group[0])
    layers = [replace(layer, kv_group=groups.index(group)) for layer, group in zip(layers, kept, strict=True)]
    vocab, hidden = _integer(config, "vocab_size", vocab_size), config.integer("hidden_size")
    tie = config.flag("tie_word_embeddings", tied)
    attention = attention_parameters or grouped_query_parameters
    return ModelSpec(
        family=family,
        vocab_size=vocab,
        hidden_size=hidden,
        layers=tuple(layers),
        windows=tuple(window for window, _ in groups),
        max_position=positions,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        tie_embeddings=tie,
        norm_offset=norm_offset,
        embedding_scale=embedding_scale,
        checkpoint_dtype=checkpoint_dtype(config),
        eos_token_ids=config.token_ids("eos_token_id"),
        parameters=decoder_parameters(
            layers, vocab, hidden, tied=tie, prefix=prefix, experts=experts, attention=attention
        ),
        ignored_tensors=(f"{prefix}model.layers.*.self_attn.rotary_emb.inv_freq", f"{prefix}model.rotary_emb.inv_freq"),
        duplicates=((f"{prefix}lm_head.weight", f"{prefix}model.embed_tokens.weight"),) if tie else (),
    )


def _integer(config: HFConfig, name: str, default: int | None) -> int:
    return config.integer(name) if default is None else config.integer(name, default)


def decoder_parameters(
    layers: Sequence[LayerSpec],
    vocab: int,
    hidden: int,
    *,
    tied: bool,
    prefix: str,
    attention: AttentionParameters,
    experts: ExpertNames | None,
) -> tuple[Parameter, ...]:
    """All parameters: `embedding`, `layers.*`, `norm` and, unless the head is tied, `head`."""
    parameters = [stacked("embedding.weight", (hidden,), (f"{prefix}model.embed_tokens.weight", vocab))]
    for index, layer in enumerate(layers):
        ours, theirs = f"layers.{index}.", f"{prefix}model.layers.{index}."
        parameters += attention(ours, f"{theirs}self_attn.", layer.attention, hidden)
        parameters += _norm_parameters(ours, theirs, layer, hidden)
        if layer.moe is not None and experts is not None:
            parameters += expert_parameters(ours, theirs, layer.moe, hidden, experts)
        else:
            parameters += _mlp_parameters(ours, f"{theirs}mlp.", layer, hidden)
    parameters.append(stacked("norm.weight", (), (f"{prefix}model.norm.weight", hidden)))
    if not tied:
        parameters.append(stacked("head.weight", (hidden,), (f"{prefix}lm_head.weight", vocab)))
    return tuple(parameters)


def _norm_parameters(ours: str, theirs: str, layer: LayerSpec, hidden: int) -> list[Parameter]:
    """A layer with post_norms has Gemma's four norms; its `pre_feedforward_layernorm` is the MLP's norm."""
    names = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if layer.post_norms:
        names["mlp_norm"] = "pre_feedforward_layernorm"
        names["attention_post_norm"] = "post_attention_layernorm"
        names["mlp_post_norm"] = "post_feedforward_layernorm"
    return [stacked(f"{ours}{norm}.weight", (), (f"{theirs}{name}.weight", hidden)) for norm, name in names.items()]


def grouped_query_parameters(ours: str, theirs: str, spec: GroupedQuerySpec, hidden: int) -> list[Parameter]:
    rows = spec.query_width, spec.kv_width, spec.kv_width
    heads = [(f"{theirs}{name}_proj", count) for name, count in zip("qkv", rows, strict=True)]
    parameters = _linear(f"{ours}qkv", hidden, heads, spec.qkv_bias)
    parameters += _linear(f"{ours}output", spec.query_width, [(f"{theirs}o_proj", hidden)], spec.output_bias)
    if spec.qk_norm:
        for name in ("q_norm.weight", "k_norm.weight"):
            parameters.append(stacked(ours + name, (), (theirs + name, spec.head_dim)))
    return parameters


def _mlp_parameters(ours: str, theirs: str, layer: LayerSpec, hidden: int) -> list[Parameter]:
    width = layer.intermediate_size
    halves = [(f"{theirs}gate_proj", width), (f"{theirs}up_proj", width)]
    parameters = _linear(f"{ours}gate_up", hidden, halves, layer.mlp_bias)
    return parameters + _linear(f"{ours}down", width, [(f"{theirs}down_proj", hidden)], layer.mlp_bias)


def _linear(name: str, columns: int, sources: Sequence[tuple[str, int]], bias: bool) -> list[Parameter]:
    """The weight and, with `bias`, the bias of a layer made of (checkpoint prefix, rows)."""
    kinds: dict[str, tuple[int, ...]] = {"weight": (columns,), "bias": ()} if bias else {"weight": (columns,)}
    return [
        stacked(f"{name}.{kind}", shape, *((f"{source}.{kind}", rows) for source, rows in sources))
        for kind, shape in kinds.items()
    ]
