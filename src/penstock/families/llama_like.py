"""Shared by nearly all families: how a Llama-like configuration is read, and the names and shapes of its tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from penstock.config.facts import PageShape
from penstock.families.experts import ExpertNames, expert_parameters
from penstock.families.hf_config import HFConfig, activation, checkpoint_dtype, layer_windows
from penstock.families.kinds.attention import GroupedQuerySpec, QKNorm, RopeSpec
from penstock.families.rope_config import context_length, rope
from penstock.families.rows import fused_heads, head_order
from penstock.families.shared_layers import per_layer_parameters
from penstock.families.spec import LayerSpec, ModelSpec, Parameter, TensorSource, joined, stacked
from penstock.messages import Window

MAX_LAYERS = 2000

LLAMA_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
GEMMA_NORMS = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class TensorNames:
    """How a checkpoint names its tensors, without `.weight` and `.bias`. Those of a layer follow `layers` and its
    number."""

    embedding: str = "model.embed_tokens"
    positions: str = ""  # learned ones
    layers: str = "model.layers."
    norm: str = "model.norm"
    head: str = "lm_head"
    head_bias: bool = False
    norms: Mapping[str, str] = field(default_factory=lambda: LLAMA_NORMS)
    attention: str = "self_attn."
    heads: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # after `attention`; one name: q, k and v are fused,
    by_group: bool = False  # those of each KV head together
    head_norms: tuple[str, str] = ("q_norm.weight[{}]", "k_norm.weight[{}]")  # of head {}, with qk_norm "centered"
    output: str = "o_proj"
    mlp: str = "mlp."
    up: tuple[str, ...] = ("gate_proj", "up_proj")  # after `mlp`; one name: the halves are fused, or there is no gate
    down: str = "down_proj"
    transposed: bool = False  # matrices of layers are [in, out]
    first_position: int = 0  # the row of the first learned position
    output_scale: str = "layer_scalar"


NAMES = TensorNames()

# (prefix of our names, prefix of the layer's in the checkpoint, its AttentionSpec, hidden size) to its parameters
AttentionParameters = Callable[[str, str, Any, int], list[Parameter]]


def with_attention(layer: LayerSpec, **changes: Any) -> LayerSpec:
    """The layer with fields of its GroupedQuerySpec changed."""
    assert isinstance(layer.attention, GroupedQuerySpec)
    return replace(layer, attention=replace(layer.attention, **changes))


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
    qk_norm: QKNorm = "",
    softcap: float = 0.0,
    intermediate_size: int | None = None,
    **block: Any,
) -> LayerSpec:
    """A layer in KV group 0, from the configuration and the family's arguments.

    `num_heads`, `num_kv_heads` and `head_dim` are the family's defaults for a configuration without them; `act` is the
    activation's field and its default; `block` has further fields of LayerSpec. Raises UnsupportedModel for sizes that
    contradict each other.
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
    turned = rope(config) if rope_spec is None else rope_spec
    if turned.dims > size or turned.dims % 2:
        raise config.unsupported("partial_rotary_factor", turned.dims / size, "an even part of the head")
    attention = GroupedQuerySpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        rope=turned,
        scale=attention_scale or size**-0.5,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        softcap=softcap,
    )
    return LayerSpec(
        attention,
        intermediate_size=config.integer("intermediate_size") if intermediate_size is None else intermediate_size,
        kv_group=0,
        activation=activation(config, *act, gated=block.get("gated", True)),
        mlp_bias=mlp_bias,
        **block,
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
    windows: Sequence[int | Window] | None = None,
    *,
    prefix: str = "",
    vocab_size: int | None = None,
    max_position: int | None = None,
    tied: bool = False,
    eps: tuple[str, float] = ("rms_norm_eps", 1e-6),
    norm_bias: bool = False,
    names: TensorNames = NAMES,
    experts: ExpertNames | None = None,
    attention_parameters: AttentionParameters | None = None,
    unused: Sequence[str] = (),
    **model: Any,
) -> ModelSpec:
    """The whole model: one layer repeated, or the given layers.

    `windows` has the number of tokens that a query sees, per layer, or a Window (None: all of them). KV groups follow
    from it and from what the layers keep. `prefix` stands before every tensor name. `vocab_size`, `max_position` and
    `tied` are the family's defaults; `eps` is the field of the norms' epsilon and its default. `norm_bias`: norms have
    biases. `names` and `experts` name the tensors. `attention_parameters` makes the parameters of each layer's
    attention; None: those of GroupedQuerySpec. `unused` are patterns of tensors that are not read, such as those of
    layers that predict a token further on. `model` has further fields of ModelSpec.
    """
    if isinstance(layers, LayerSpec):
        layers = [layers] * num_layers(config)
    if config.flag("gguf"):  # llama.cpp's conversion undoes these forms of tensors
        names = replace(names, by_group=False, transposed=False)
        experts = None if experts is None else replace(experts, stacks=None, shared_fused=None)
    positions = _integer(config, "max_position_embeddings", max_position)
    if family != "gemma3":  # its max_position_embeddings has the scaling already
        positions = context_length(config, positions)
    each = [window if isinstance(window, Window) else Window(window) for window in windows or [0] * len(layers)]
    layers, group_windows = _in_kv_groups(layers, each, positions)
    vocab, hidden = _integer(config, "vocab_size", vocab_size), config.integer("hidden_size")
    tie = config.flag("tie_word_embeddings", tied)
    if any(layer.post_norms and layer.pre_norms for layer in layers) and names.norms == LLAMA_NORMS:
        names = replace(names, norms=GEMMA_NORMS)
    parameters = _ParameterMaker(names, prefix, hidden, norm_bias, experts, attention_parameters)
    return ModelSpec(
        family=family,
        vocab_size=vocab,
        hidden_size=hidden,
        layers=tuple(layers),
        windows=group_windows,
        max_position=positions,
        norm_eps=config.number(*eps),
        tie_embeddings=tie,
        checkpoint_dtype=checkpoint_dtype(config),
        eos_token_ids=config.token_ids("eos_token_id"),
        parameters=parameters.of_model(layers, vocab, positions, tied=tie),
        ignored_tensors=(
            f"{prefix}{names.layers}*.{names.attention}rotary_emb.inv_freq",
            f"{prefix}model.rotary_emb.inv_freq",
            *unused,
        ),
        duplicates=((f"{prefix}{names.head}.weight", f"{prefix}{names.embedding}.weight"),) if tie else (),
        base_prefix="" if prefix else names.embedding.partition(".")[0] + ".",
        **model,
    )


def _in_kv_groups(
    layers: Sequence[LayerSpec], windows: Sequence[Window], positions: int
) -> tuple[list[LayerSpec], tuple[Window, ...]]:
    """Returns the layers with their KV group, and the window of each group that has KV pages.

    Layers share a group, and so a block table, if they have the same window and keep the same data for a token.
    """
    # A window of all positions or more is full attention: one KV group less.
    windows = [window if window.tokens < positions else Window() for window in windows]
    kept = [(window, layer.attention.page) for layer, window in zip(layers, windows, strict=True)]
    groups = sorted(dict.fromkeys(kept), key=lambda group: (group[1].state, group[0]))
    if all(page.state for _, page in groups):  # every sequence needs a block table, even an empty one
        groups.insert(0, (Window(), PageShape(1, 1, 0)))
    layers = [replace(layer, kv_group=groups.index(group)) for layer, group in zip(layers, kept, strict=True)]
    return layers, tuple(window for window, page in groups if not page.state)


def _integer(config: HFConfig, name: str, default: int | None) -> int:
    return config.integer(name) if default is None else config.integer(name, default)


@dataclass(frozen=True)
class _ParameterMaker:
    """Makes the parameters of a model whose tensors have these names."""

    names: TensorNames
    prefix: str
    hidden: int
    norm_bias: bool
    experts: ExpertNames | None
    attention: AttentionParameters | None

    def of_model(self, layers: Sequence[LayerSpec], vocab: int, positions: int, *, tied: bool) -> tuple[Parameter, ...]:
        """All parameters: `embedding`, `positions`, `layers.*`, `norm` and, unless the head is tied, `head`."""
        names, width = self.names, (self.hidden,)
        parameters = [stacked("embedding.weight", width, (f"{self.prefix}{names.embedding}.weight", vocab))]
        if names.positions:
            source = TensorSource(f"{self.prefix}{names.positions}.weight", 0, positions, names.first_position)
            parameters.append(joined("embedding.positions.weight", width, [source]))
        for index, layer in enumerate(layers):
            parameters += self.of_layer(f"layers.{index}.", f"{self.prefix}{names.layers}{index}.", layer)
        parameters += self._norm("norm", f"{self.prefix}{names.norm}")
        if not tied:
            parameters.append(stacked("head.weight", width, (f"{self.prefix}{names.head}.weight", vocab)))
        if names.head_bias:
            parameters.append(stacked("head.bias", (), (f"{self.prefix}{names.head}.bias", vocab)))
        return tuple(parameters)

    def of_layer(self, ours: str, theirs: str, layer: LayerSpec) -> list[Parameter]:
        attention: AttentionParameters = self.attention or partial(grouped_query_parameters, names=self.names)
        parameters = attention(ours, f"{theirs}{self.names.attention}", layer.attention, self.hidden)
        for norm, name in self.names.norms.items():
            parameters += self._norm(f"{ours}{norm}", f"{theirs}{name}")
        if layer.per_layer is not None:
            parameters += per_layer_parameters(ours, theirs, layer.per_layer, self.hidden)
        if layer.output_scale:
            parameters.append(stacked(f"{ours}output_scale.weight", (), (f"{theirs}{self.names.output_scale}", 1)))
        if layer.moe is not None and self.experts is not None:
            parameters += expert_parameters(ours, theirs, layer.moe, self.hidden, self.experts, gated=layer.gated)
            if not layer.moe.beside_mlp:
                return parameters
        if not layer.has_mlp:
            return parameters
        width, mlp, turned = layer.intermediate_size, f"{theirs}{self.names.mlp}", self.names.transposed
        halves = 2 if layer.gated else 1
        each = width * halves // len(self.names.up)
        sources = [TensorSource(f"{mlp}{name}", 0, each) for name in self.names.up]
        if halves > len(sources):
            sources = [replace(sources[0], rows=width), replace(sources[0], rows=width, first_row=width)]
        up = f"{ours}gate_up" if layer.gated else f"{ours}up"
        parameters += _linear(up, self.hidden, sources, layer.mlp_bias, turned)
        down = [TensorSource(f"{mlp}{self.names.down}", 0, self.hidden)]
        return parameters + _linear(f"{ours}down", width, down, layer.mlp_bias, turned)

    def _norm(self, ours: str, theirs: str) -> list[Parameter]:
        kinds = ("weight", "bias") if self.norm_bias else ("weight",)
        return [stacked(f"{ours}.{kind}", (), (f"{theirs}.{kind}", self.hidden)) for kind in kinds]


def grouped_query_parameters(
    ours: str, theirs: str, spec: GroupedQuerySpec, hidden: int, names: TensorNames = NAMES
) -> list[Parameter]:
    """The parameters of a layer's attention. `theirs` ends with the name of the attention."""
    parts, order = (spec.query_width, spec.kv_width, spec.kv_width), head_order(spec.rope, spec.head_dim)
    if len(names.heads) == 1:
        heads = fused_heads(f"{theirs}{names.heads[0]}", spec, by_group=names.by_group)
    else:
        q, k, v = names.heads
        each = zip((q, k, k if spec.keys_are_values else v), parts, (order, order, ()), strict=True)
        heads = [TensorSource(f"{theirs}{name}", 0, rows, order=own) for name, rows, own in each if rows]
    if spec.gate:  # the rows of each query head, then those of its gate
        dim, name = spec.head_dim, f"{theirs}{names.heads[0]}"
        queries = [TensorSource(name, 0, dim, 2 * i * dim, order=order) for i in range(spec.num_heads)]
        gates = [replace(each, first_row=each.first_row + dim, order=()) for each in queries]
        heads = [*queries, *heads[1:]]
    turned, output = names.transposed, [TensorSource(f"{theirs}{names.output}", 0, hidden)]
    parameters = _linear(f"{ours}qkv", hidden, heads, spec.qkv_bias, turned, parts)
    if spec.gate:
        parameters += _linear(f"{ours}gate", hidden, gates, spec.qkv_bias, turned, parts[:1])
    parameters += _linear(f"{ours}output", spec.query_width, output, spec.output_bias, turned)
    if spec.qk_norm in ("heads", "whole"):
        widths = parts[:2] if spec.qk_norm == "whole" else (spec.head_dim, spec.head_dim)
        for name, width in zip(("q_norm.weight", "k_norm.weight"), widths, strict=True):
            if name == "k_norm.weight" and spec.kv_layer is not None:
                continue
            parameters.append(joined(ours + name, (), [TensorSource(theirs + name, 0, width, order=order)]))
    if spec.qk_norm == "centered":  # a checkpoint has a row for each head
        counts = {"q_norm.weight": spec.num_heads, "k_norm.weight": spec.num_kv_heads}
        for (name, count), row in zip(counts.items(), names.head_norms, strict=True):
            rows = [TensorSource(theirs + row.format(i), 0, spec.head_dim, order=order) for i in range(count)]
            parameters.append(joined(ours + name, (), rows, (count * spec.head_dim,)))
    if spec.sinks:
        parameters.append(stacked(f"{ours}sinks.weight", (), (f"{theirs}sinks", spec.num_heads)))
    return parameters


def _linear(
    name: str,
    columns: int,
    sources: Sequence[TensorSource],
    bias: bool,
    transposed: bool,
    parts: tuple[int, ...] = (),
) -> list[Parameter]:
    """The weight and, with `bias`, the bias of a layer made of these sources, whose names lack their ends."""
    parts = parts if len(sources) != len(parts) else ()  # each source is a part
    weights = [replace(source, name=f"{source.name}.weight", transposed=transposed) for source in sources]
    parameters = [joined(f"{name}.weight", (columns,), weights, parts)]
    if bias:
        biases = [replace(source, name=f"{source.name}.bias") for source in sources]
        parameters.append(joined(f"{name}.bias", (), biases, parts))
    return parameters
