"""The tensors of a Llama-shaped checkpoint, which nearly every family shares: names, shapes and how they are fused."""

from collections.abc import Sequence

from penstock.families.spec import LayerSpec, Parameter, TensorSource


def stacked(name: str, columns: tuple[int, ...], *sources: tuple[str, int]) -> Parameter:
    """A parameter made of (tensor name, rows), stacked in order; `columns` is the shape after dimension 0."""
    parts, start = [], 0
    for source, rows in sources:
        parts.append(TensorSource(source, start, rows))
        start += rows
    return Parameter(name, (start, *columns), tuple(parts))


def layer_parameters(index: int, layer: LayerSpec, hidden: int, prefix: str = "model.") -> list[Parameter]:
    """Parameters of decoder layer `index`: `layers.{index}.*`, from `{prefix}layers.{index}.*`.

    A layer with post_norms has Gemma's four norms; its `pre_feedforward_layernorm` is the MLP's norm.
    """
    ours, theirs = f"layers.{index}.", f"{prefix}layers.{index}."
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
        *linear("gate_up", hidden, [(mlp + "gate_proj", width), (mlp + "up_proj", width)], layer.mlp_bias),
        *linear("down", width, [(mlp + "down_proj", hidden)], layer.mlp_bias),
    ]
    if layer.qk_norm:
        parameters += [norm(f"{x}_norm", f"{attention}{x}_norm", layer.head_dim) for x in ("q", "k")]
    if layer.post_norms:
        parameters.append(norm("attention_post_norm", theirs + "post_attention_layernorm"))
        parameters.append(norm("mlp_post_norm", theirs + "post_feedforward_layernorm"))
    return parameters


def decoder_parameters(
    layers: Sequence[LayerSpec], vocab: int, hidden: int, *, tied: bool, prefix: str = "model."
) -> tuple[Parameter, ...]:
    """All parameters: `embedding`, `layers.*`, `norm` and, where the head is untied, `head`."""
    parameters = [stacked("embedding.weight", (hidden,), (f"{prefix}embed_tokens.weight", vocab))]
    for index, layer in enumerate(layers):
        parameters += layer_parameters(index, layer, hidden, prefix)
    parameters.append(stacked("norm.weight", (), (f"{prefix}norm.weight", hidden)))
    if not tied:
        parameters.append(stacked("head.weight", (hidden,), ("lm_head.weight", vocab)))
    return tuple(parameters)
