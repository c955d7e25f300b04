"""What nearly every family shares with Llama: the meaning of the configuration's fields, and the checkpoint's tensors,
their names, shapes and how they are fused.
"""

from collections.abc import Sequence
from dataclasses import replace

from penstock.families.experts import ExpertNames, expert_parameters
from penstock.families.hf_config import HFConfig, activation, checkpoint_dtype, layer_windows, rope
from penstock.families.spec import LayerSpec, ModelSpec, Parameter, RopeSpec, stacked

MAX_LAYERS = 2000


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
    """A layer in KV group 0, as the configuration and the family say.

    `num_heads`, `num_kv_heads` and `head_dim` are the family's defaults for a configuration without them; `act` is the
    activation's field and its default. Raises UnsupportedModel where sizes do not fit each other.
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
    return LayerSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        intermediate_size=config.integer("intermediate_size"),
        kv_group=0,
        rope=rope_spec or rope(config),
        attention_scale=attention_scale or size**-0.5,
        activation=activation(config, *act),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        post_norms=post_norms,
    )


def upper_layer_windows(config: HFConfig) -> tuple[int, ...]:
    """Qwen's rule: with use_sliding_window, layers from max_window_layers up have the window."""
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
) -> ModelSpec:
    """The whole model, of one layer repeated or of the given layers.

    `windows` says per layer how many tokens a query sees (None: all of them), from which the KV groups follow. `prefix`
    stands before every tensor name. `vocab_size`, `max_position` and `tied` are the family's defaults. `experts` names
    the tensors of layers that are mixtures.
    """
    if isinstance(layers, LayerSpec):
        layers = [layers] * num_layers(config)
    positions = _integer(config, "max_position_embeddings", max_position)
    # A window that no position can leave is full attention: one KV group less.
    seen = [window if window < positions else 0 for window in windows or [0] * len(layers)]
    groups = tuple(sorted(set(seen)))
    layers = [replace(layer, kv_group=groups.index(window)) for layer, window in zip(layers, seen, strict=True)]
    vocab, hidden = _integer(config, "vocab_size", vocab_size), config.integer("hidden_size")
    tie = config.flag("tie_word_embeddings", tied)
    return ModelSpec(
        family=family,
        vocab_size=vocab,
        hidden_size=hidden,
        layers=tuple(layers),
        windows=groups,
        max_position=positions,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        tie_embeddings=tie,
        norm_offset=norm_offset,
        embedding_scale=embedding_scale,
        checkpoint_dtype=checkpoint_dtype(config),
        eos_token_ids=config.token_ids("eos_token_id"),
        parameters=decoder_parameters(layers, vocab, hidden, tied=tie, prefix=prefix, experts=experts),
        ignored_tensors=(f"{prefix}model.layers.*.self_attn.rotary_emb.inv_freq", f"{prefix}model.rotary_emb.inv_freq"),
        duplicates=((f"{prefix}lm_head.weight", f"{prefix}model.embed_tokens.weight"),) if tie else (),
    )


def _integer(config: HFConfig, name: str, default: int | None) -> int:
    return config.integer(name) if default is None else config.integer(name, default)


def layer_parameters(
    index: int, layer: LayerSpec, hidden: int, prefix: str = "", experts: ExpertNames | None = None
) -> list[Parameter]:
    """Parameters of decoder layer `index`: `layers.{index}.*`, from `{prefix}model.layers.{index}.*`.

    A layer with post_norms has Gemma's four norms; its `pre_feedforward_layernorm` is the MLP's norm.
    """
    ours, theirs = f"layers.{index}.", f"{prefix}model.layers.{index}."
    attention, mlp = theirs + "self_attn.", theirs + "mlp."
    q_rows, kv_rows = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    heads = [("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)]
    width = layer.intermediate_size

    def linear(name: str, columns: int, parts: Sequence[tuple[str, int]], bias: bool) -> list[Parameter]:
        weight = stacked(ours + name + ".weight", (columns,), *((part + ".weight", rows) for part, rows in parts))
        if not bias:
            return [weight]
        return [weight, stacked(ours + name + ".bias", (), *((part + ".bias", rows) for part, rows in parts))]

    def norm(name: str, source: str, size: int = hidden) -> Parameter:
        return stacked(ours + name + ".weight", (), (source + ".weight", size))

    mlp_norm = "pre_feedforward_layernorm" if layer.post_norms else "post_attention_layernorm"
    parameters = [
        norm("attention_norm", theirs + "input_layernorm"),
        *linear("qkv", hidden, [(attention + part, rows) for part, rows in heads], layer.qkv_bias),
        *linear("output", q_rows, [(attention + "o_proj", hidden)], layer.output_bias),
        norm("mlp_norm", theirs + mlp_norm),
    ]
    if layer.moe is not None and experts is not None:
        parameters += expert_parameters(ours, theirs, layer.moe, hidden, experts)
    else:
        parameters += linear("gate_up", hidden, [(mlp + "gate_proj", width), (mlp + "up_proj", width)], layer.mlp_bias)
        parameters += linear("down", width, [(mlp + "down_proj", hidden)], layer.mlp_bias)
    if layer.qk_norm:
        parameters += [norm(f"{x}_norm", f"{attention}{x}_norm", layer.head_dim) for x in ("q", "k")]
    if layer.post_norms:
        parameters.append(norm("attention_post_norm", theirs + "post_attention_layernorm"))
        parameters.append(norm("mlp_post_norm", theirs + "post_feedforward_layernorm"))
    return parameters


def decoder_parameters(
    layers: Sequence[LayerSpec],
    vocab: int,
    hidden: int,
    *,
    tied: bool,
    prefix: str = "",
    experts: ExpertNames | None = None,
) -> tuple[Parameter, ...]:
    """All parameters: `embedding`, `layers.*`, `norm` and, where the head is untied, `head`."""
    parameters = [stacked("embedding.weight", (hidden,), (f"{prefix}model.embed_tokens.weight", vocab))]
    for index, layer in enumerate(layers):
        parameters += layer_parameters(index, layer, hidden, prefix, experts)
    parameters.append(stacked("norm.weight", (), (f"{prefix}model.norm.weight", hidden)))
    if not tied:
        parameters.append(stacked("head.weight", (hidden,), (f"{prefix}lm_head.weight", vocab)))
    return tuple(parameters)
