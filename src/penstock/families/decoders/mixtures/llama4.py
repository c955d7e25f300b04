"""Llama 4, the text model: layers with rope see only the tokens of their chunk, and their heads are normed without a
weight; every fourth layer sees all tokens and no positions; mixtures of experts weigh their inputs, beside a shared
expert."""

from collections.abc import Sequence
from dataclasses import replace

from penstock.config.facts import QueryTemperature
from penstock.families.experts import ExpertNames, moe_spec
from penstock.families.hf_config import HFConfig, layer_windows
from penstock.families.llama_like import NAMES, decoder_spec, layer_spec, num_layers, with_attention
from penstock.families.rope_config import NO_ROPE, rope
from penstock.families.spec import ModelSpec
from penstock.messages import Window

_NAMES = replace(NAMES, mlp="feed_forward.")
_EXPERTS = ExpertNames(
    router="feed_forward.router",
    stacks=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
    transposed=True,
    experts="feed_forward.experts.",
    shared="feed_forward.shared_expert.",
)


def llama4(config: HFConfig, prefix: str = "") -> ModelSpec:
    count, bias = num_layers(config), config.flag("attention_bias")
    dense = layer_spec(
        config,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
        rope_spec=rope(config, 5e5, interleaved=True),
        qkv_bias=bias,
        output_bias=bias,
        intermediate_size=config.integer("intermediate_size_mlp", 16_384),
    )
    size = ("intermediate_size", 8192)
    routed = moe_spec(config, count=("num_local_experts", 16), per_token=1, size=size, normalize=False)
    if routed.experts_per_token > 1:
        raise config.unsupported("num_experts_per_tok", routed.experts_per_token, "1")
    moe = replace(routed, sigmoid=True, weigh_inputs=True, shared_intermediate_size=routed.intermediate_size)
    step = config.integer("interleave_moe_layer_step", 1)
    sparse = config.integers("moe_layers") or list(range(step - 1, count, step))
    ropes = config.integers("no_rope_layers") or [int((i + 1) % 4 != 0) for i in range(count)]
    if len(ropes) != count:
        raise config.unsupported("no_rope_layers", f"with {len(ropes)} entries", f"one for each of {count} layers")
    unturned = NO_ROPE
    if config.flag("attn_temperature_tuning", True):
        every, scale = config.integer("floor_scale", 8192), config.number("attn_scale", 0.1, or_zero=True)
        unturned = replace(NO_ROPE, temperature=QueryTemperature(every, scale, first=1))
    layers = []
    for i, turned in enumerate(ropes):
        layer = replace(dense, intermediate_size=0, moe=moe) if i in sparse else dense
        norm = "unit" if turned and config.flag("use_qk_norm", True) else ""
        layers.append(with_attention(layer, qk_norm=norm) if turned else with_attention(layer, rope=unturned))
    return decoder_spec(
        config,
        "llama4",
        layers,
        _windows(config, ropes),
        prefix=prefix,
        eps=("rms_norm_eps", 1e-5),
        max_position=131_072,
        names=_NAMES,
        experts=_EXPERTS,
    )


def _windows(config: HFConfig, ropes: Sequence[int]) -> list[Window]:
    """Layers with rope see the tokens of their chunk, unless `layer_types` says otherwise."""
    if config.is_null("attention_chunk_size"):
        return [Window()] * len(ropes)
    size, by_default = config.integer("attention_chunk_size", 8192), [bool(turned) for turned in ropes]
    sizes = layer_windows(config, len(ropes), size, by_default, kind="chunked_attention")
    return [Window(each, chunked=each > 0) for each in sizes]
