"""SmolLM 3: Llama in which every fourth layer sees no positions (NoPE)."""

from penstock.families.hf_config import HFConfig, layer_windows
from penstock.families.llama_like import decoder_spec, layer_spec, num_layers, with_attention
from penstock.families.rope_config import NO_ROPE, rope
from penstock.families.spec import ModelSpec


def smollm3(config: HFConfig) -> ModelSpec:
    bias, count = config.flag("attention_bias"), num_layers(config)
    turned = layer_spec(
        config,
        num_kv_heads=4,
        rope_spec=rope(config, 2e6),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
    )
    plain = with_attention(turned, rope=NO_ROPE)
    every = config.integer("no_rope_layer_interval", 4)
    ropes = config.integers("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]
    if len(ropes) != count:
        raise config.unsupported("no_rope_layers", f"with {len(ropes)} entries", f"one for each of {count} layers")
    window = config.integer("sliding_window", 0, least=0) if config.flag("use_sliding_window") else 0
    windows = layer_windows(config, count, window, [bool(window) and not rope for rope in ropes])
    return decoder_spec(config, "smollm3", [turned if rope else plain for rope in ropes], windows, tied=True)
