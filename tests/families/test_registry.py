"""Every family against what transformers writes: names, shapes, windows, and ropes."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.config.facts import GroupFacts, MatrixFacts, MixtureFacts, PageShape
from penstock.families import (
    RopeSpec,
    UnsupportedModel,
    load_spec,
    model_facts,
    spec_from_config,
)
from penstock.families.spec import ModelSpec, MoESpec, TensorSource
from penstock.messages import Window
from penstock.weights.checkpoint import tensor_shapes
from tests.checkpoints import VARIANTS
from tests.families.configurations import LLAMA, MIXTRAL, QWEN3_MOE
from tests.families.divisible import spec_of, stacked_shapes

ONLY_VERSION_5 = (
    *("gemma3_linear", "ministral", "ministral3", "ministral3_far", "granite_4", "granite_4_dense"),
    *("granite_4_hybrid", "granite_4_mamba", "qwen3_next", "qwen3_next_plain", "qwen3_5_moe"),
    *("nemotron_h_moe", "nemotron_h_latent"),
    *("gemma4", "gemma4_moe", "gemma4_separate", "gemma4_shared"),
)
QWEN2_MIXTURE = MoESpec(7, 3, 40, False, shared_intermediate_size=56, shared_gate=True)


def is_transposed(spec: ModelSpec, name: str) -> bool:
    return any(source.transposed for p in spec.parameters for source in p.sources if source.name == name)


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("variant", VARIANTS)
def test_sources_are_exactly_the_checkpoint_transformers_writes(
    tiny_checkpoint: Callable[..., Path], variant: str
) -> None:
    folder = tiny_checkpoint(variant)
    spec = load_spec(folder)
    shapes, read = tensor_shapes(spec), Counter[str]()
    assert stacked_shapes(shapes) == stored_shapes(folder)
    for parameter in spec.parameters:
        assert sum(source.rows for source in parameter.sources) == parameter.shape[0]
        for source in parameter.sources:
            read[source.name] += source.rows
    unread = {name: shapes[name][-1 if is_transposed(spec, name) else 0] - rows for name, rows in read.items()}
    if variant == "gemma4_shared":  # each layer reads its part, and all read one norm
        return
    # kv_b_proj is read by rows for values, by columns for keys: tests/weights/test_shards.py compares what comes of it.
    others = {name for name, rows in unread.items() if rows and not name.endswith("kv_b_proj.weight")}
    positions, keys_and_values = "model.decoder.embed_positions.weight", "model.layers.5.self_attn.k_proj.weight"
    assert others == {"opt": {positions}, "gemma4": {keys_and_values}}.get(variant, set())
    assert spec.tie_embeddings == (not {"lm_head.weight", "embed_out.weight"} & shapes.keys())


@pytest.mark.parametrize(
    ("variant", "windows", "groups"),
    [
        ("llama2", (0,), [0, 0, 0]),
        ("qwen2", (0,), [0, 0, 0]),
        ("qwen2_window", (0, 16), [0, 1, 1]),
        ("mistral", (0,), [0, 0, 0]),
        ("mistral_window", (16,), [0, 0, 0]),
        ("gemma3", (0, 16), [1, 1, 1, 1, 1, 0]),
        ("gemma3_linear", (0, 16), [0, 1, 1, 0]),
        ("gemma4", (0, 16), [1, 1, 1, 1, 1, 0]),
        ("gemma4_shared", (0, 16), [1, 0] * 3),
        ("mixtral", (0,), [0, 0, 0]),
        ("mixtral_window", (16,), [0, 0, 0]),
        ("qwen2_moe_normed", (0, 16), [1, 0, 0]),
        ("qwen3_moe_window", (16,), [0, 0]),
    ],
)
def test_windows_and_their_layers(
    tiny_checkpoint: Callable[..., Path], variant: str, windows: tuple[int, ...], groups: list[int]
) -> None:
    spec = load_spec(tiny_checkpoint(variant))
    assert spec.windows == tuple(map(Window, windows))
    assert [layer.kv_group for layer in spec.layers] == groups
    own = [i for i in range(len(groups)) if spec.kv_layer(i) == i]
    assert sorted(i for group in range(len(windows)) for i in spec.group_layers(group)) == own
    assert {*own} == ({0, 1, 2} if variant == "gemma4_shared" else {*range(len(groups))})


def test_a_window_counts_its_query_as_transformers_masks_it() -> None:
    """sliding_window = w: query i sees the w keys i - w + 1 .. i."""
    from transformers.masking_utils import sliding_window_overlay

    sees = [key for key in range(10) if key <= 9 and sliding_window_overlay(4)(0, 0, 9, key)]
    assert sees == [6, 7, 8, 9]


def test_a_window_that_no_position_leaves_is_full_attention() -> None:
    config = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 256}
    assert spec_from_config(config).windows == (Window(),)
    assert spec_from_config(config | {"sliding_window": 255}).windows == (Window(255),)


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("llama2", RopeSpec()),
        ("llama3", RopeSpec(5e5, "llama3", 8.0, 1.0, 4.0, 64)),
        ("llama_linear", RopeSpec(1e4, "linear", 4.0)),
    ],
)
def test_rope(tiny_checkpoint: Callable[..., Path], variant: str, expected: RopeSpec) -> None:
    assert {layer.attention.rope for layer in load_spec(tiny_checkpoint(variant)).layers} == {expected}


def test_gemma3_ropes_differ_by_layer_type(tiny_checkpoint: Callable[..., Path]) -> None:
    full, sliding, _, _ = load_spec(tiny_checkpoint("gemma3_linear")).layers
    assert full.attention.rope == RopeSpec(1e6, "linear", 8.0)
    assert sliding.attention.rope == RopeSpec(1e4)


def test_gemma3_traits(tiny_checkpoint: Callable[..., Path]) -> None:
    spec = load_spec(tiny_checkpoint("gemma3"))
    assert (spec.norm_offset, spec.embedding_scale) == (1.0, 72**0.5)
    traits = {(x.activation, x.attention.scale, x.post_norms, x.attention.qk_norm) for x in spec.layers}
    assert traits == {("gelu_tanh", 20**-0.5, True, "heads")}


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("mixtral", [MoESpec(5, 2, 72, True)] * 3),
        ("qwen2_moe", [QWEN2_MIXTURE, None, QWEN2_MIXTURE]),
        ("qwen2_moe_normed", [MoESpec(6, 3, 40, True, 40, True)] * 3),
        ("qwen3_moe", [MoESpec(7, 3, 40, True)] * 3),
        ("qwen3_moe_sparse", [None, MoESpec(7, 3, 40, False), None]),
    ],
)
def test_mixtures_and_their_layers(
    tiny_checkpoint: Callable[..., Path], variant: str, expected: list[MoESpec | None]
) -> None:
    layers = load_spec(tiny_checkpoint(variant)).layers
    assert [layer.moe for layer in layers] == expected
    assert all((layer.intermediate_size == 0) == (layer.moe is not None) for layer in layers)


def test_an_experts_rows_follow_each_other_the_gate_first() -> None:
    parameters = {p.name: p for p in spec_from_config(MIXTRAL).parameters}
    gate_up, down = parameters["layers.1.experts.gate_up.weight"], parameters["layers.1.experts.down.weight"]
    assert (gate_up.shape, down.shape) == ((4 * 2 * 48, 32), (4 * 32, 48))
    assert (gate_up.experts, gate_up.kind, down.experts, down.kind) == (4, "gated", 4, "matrix")
    theirs = "model.layers.1.block_sparse_moe."
    assert gate_up.sources[2:4] == (
        TensorSource(theirs + "experts.1.w1.weight", 2 * 48, 48),
        TensorSource(theirs + "experts.1.w3.weight", 3 * 48, 48),
    )
    assert down.sources[3] == TensorSource(theirs + "experts.3.w2.weight", 3 * 32, 32)
    router = parameters["layers.1.router.weight"]
    assert (router.shape, router.kind, router.sources[0].name) == ((4, 32), "router", theirs + "gate.weight")


def test_facts_of_a_mixture(tiny_checkpoint: Callable[..., Path]) -> None:
    facts = model_facts(load_spec(tiny_checkpoint("qwen2_moe")))
    assert facts.mixture == MixtureFacts(experts=7, per_token=3, intermediate_size=40)
    assert facts.widest_mlp == 112  # of the dense layer: the shared expert's is 56
    experts = [m for m in facts.matrices if m.experts > 1]
    assert experts == [
        MatrixFacts(rows=80, columns=64, count=2, gated=True, experts=7, share=3 / 7),
        MatrixFacts(rows=64, columns=40, count=2, experts=7, share=3 / 7),
    ]
    routers = [m for m in facts.matrices if m.router]
    assert routers == [MatrixFacts(rows=rows, columns=64, count=2, router=True) for rows in (7, 1)]


def test_transformers_5_renamed_the_number_of_experts() -> None:
    renamed = {k: v for k, v in QWEN3_MOE.items() if k != "num_experts"} | {"num_local_experts": 6}
    assert spec_from_config(renamed) == spec_from_config(QWEN3_MOE)


def to_version_4(config: dict[str, Any]) -> dict[str, Any]:
    """The same model as transformers 4 wrote it."""
    old = {k: v for k, v in config.items() if k not in ("rope_parameters", "dtype", "layer_types")}
    rope = config.get("rope_parameters")
    if rope is None:  # learned positions
        return {**old, "torch_dtype": config["dtype"]}
    if "full_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        if config["model_type"].startswith("gemma3"):
            old["sliding_window_pattern"] = 6
        rope = rope["full_attention"]
    old["rope_theta"] = rope["rope_theta"]
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope["partial_rotary_factor"]
    scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor")}
    old["rope_scaling"] = None if rope["rope_type"] == "default" else scaling
    return {**old, "torch_dtype": config["dtype"]}


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in ONLY_VERSION_5])
def test_version_4_configurations_mean_the_same(tiny_checkpoint: Callable[..., Path], variant: str) -> None:
    config = json.loads((tiny_checkpoint(variant) / "config.json").read_text())
    assert spec_from_config(to_version_4(config)) == spec_from_config(config)


def test_gemma3_scaling_of_version_4_concerns_full_layers_alone(tiny_checkpoint: Callable[..., Path]) -> None:
    config = to_version_4(json.loads((tiny_checkpoint("gemma3") / "config.json").read_text()))
    spec = spec_from_config(config | {"rope_scaling": {"type": "linear", "factor": 8.0}})
    assert spec.layers[5].attention.rope == RopeSpec(1e6, "linear", 8.0)
    assert {layer.attention.rope for layer in spec.layers[:5]} == {RopeSpec(1e4)}


GEMMA_4_31B = {
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "global_head_dim": 512,
    "head_dim": 256,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": "vision",
}


def test_the_language_model_of_a_multimodal_gemma4() -> None:
    config = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": GEMMA_4_31B, "vision_config": {}}
    spec = spec_from_config(config)
    assert (spec.vocab_size, spec.max_position, spec.tie_embeddings) == (262_144, 131_072, True)
    assert spec.windows == (Window(), Window(1024)) and spec.group_layers(0) == list(range(5, 60, 6))
    full, sliding = spec.layers[5].attention, spec.layers[0].attention
    assert (full.page.heads, full.head_dim, full.scale, full.keys_are_values) == (4, 512, 1.0, True)
    assert (sliding.page.heads, sliding.head_dim, sliding.scale, sliding.keys_are_values) == (16, 256, 1.0, False)
    assert full.rope == RopeSpec(1e6, "proportional", turning=64) and sliding.rope == RopeSpec(1e4)
    assert all(s.name.startswith("model.language_model.") for p in spec.parameters for s in p.sources)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_bidirectional_attention", "all"),
        ("num_kv_shared_layers", 58),
        ("num_kv_shared_layers", 61),
    ],
)
def test_what_gemma4_lacks_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(UnsupportedModel, match=field):
        spec_from_config({**GEMMA_4_31B, "architectures": ["Gemma4ForCausalLM"], field: value})


def test_the_language_model_of_a_multimodal_gemma3() -> None:
    """As the hub has it: a text_config with little in it, and tensors below language_model."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text["rope_scaling"] = {"factor": 8.0, "rope_type": "linear"}
    spec = spec_from_config(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "text_config": text,
            "torch_dtype": "bfloat16",
            "vision_config": {"hidden_size": 1152},
        }
    )
    assert (spec.vocab_size, spec.max_position, spec.tie_embeddings) == (262_208, 131_072, True)
    assert (spec.eos_token_ids, spec.checkpoint_dtype) == ((1, 106), "bfloat16")
    assert spec.windows == (Window(), Window(1024)) and len(spec.group_layers(0)) == 5
    assert all(s.name.startswith("language_model.model.") for p in spec.parameters for s in p.sources)
    assert "vision_tower.*" in spec.ignored_tensors
    assert spec.duplicates == (("language_model.lm_head.weight", "language_model.model.embed_tokens.weight"),)


def test_optional_sizes_follow_from_others() -> None:
    config = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    attention = spec_from_config(config).layers[0].attention
    assert (attention.num_kv_heads, attention.head_dim, attention.scale) == (4, 8, 8**-0.5)
    assert spec_from_config(config | {"head_dim": None}) == spec_from_config(config)
    assert spec_from_config(config).checkpoint_dtype == "float32"


def test_a_null_rope_of_gpt_oss_counts_as_absent() -> None:
    assert spec_of("gpt_oss", rope_parameters=None) == spec_of("gpt_oss")


def test_facts_of_a_mixed_model(tiny_checkpoint: Callable[..., Path]) -> None:
    spec = load_spec(tiny_checkpoint("gemma3"))
    facts = model_facts(spec)
    assert facts.num_parameters == spec.num_parameters() == sum(p.size for p in spec.parameters)
    # Norms of heads are counted once for each head; matrices are what they are.
    each = [layer.attention for layer in spec.layers]
    repeated = sum((x.num_heads + x.num_kv_heads - 2) * x.head_dim for x in each)
    sizes = sum(m.count * m.rows * m.columns for m in facts.matrices)
    assert sizes + facts.vector_elements == spec.num_parameters() + repeated
    assert [m for m in facts.matrices if m.vocabulary] == [MatrixFacts(rows=307, columns=72, vocabulary=True)]
    assert [m for m in facts.matrices if m.gated] == [MatrixFacts(rows=224, columns=72, count=6, gated=True)]
    page = PageShape(2, 2, 48)
    assert facts.groups == (GroupFacts(Window(), 1, page), GroupFacts(Window(16), 5, page))
    assert (facts.widest_attention, facts.widest_gathered, facts.widest_mlp) == (3 * 192 + 4 * 96, 2 * 96, 112)


@pytest.mark.parametrize(("layers", "sensitive"), [(7, set()), (8, {"0", "7"})])
def test_the_first_and_the_last_of_many_layers_are_sensitive(layers: int, sensitive: set[str]) -> None:
    spec = spec_from_config(LLAMA | {"num_hidden_layers": layers})
    marked = [p for p in spec.parameters if p.sensitive]
    assert {p.name.split(".")[1] for p in marked} == sensitive
    assert len(marked) == 4 * len(sensitive) and not any(p.kind == "vector" for p in marked)
    counts = [m.count for m in model_facts(spec).matrices if m.gated]
    assert sorted(counts) == ([2, layers - 2] if sensitive else [layers])


def test_layers_of_one_group_share_their_page(tiny_checkpoint: Callable[..., Path]) -> None:
    from dataclasses import replace

    from penstock.families.registry import check_layers

    spec = load_spec(tiny_checkpoint("gemma3"))
    layer = spec.layers[0]
    wider = replace(layer, attention=replace(layer.attention, head_dim=32))
    with pytest.raises(UnsupportedModel, match=r"window 16 .* \[\(2, 32\), \(2, 48\)\]"):
        check_layers(replace(spec, layers=(wider, *spec.layers[1:])))
