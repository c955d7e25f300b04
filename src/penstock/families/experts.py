"""Shared by families with a mixture of experts: how their fields are read, and how checkpoints name the tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.families.hf_config import HFConfig
from penstock.families.spec import LayerSpec, MoESpec, Parameter, TensorSource, joined, stacked

MAX_EXPERTS = 4096

# the norms of a mixture beside an MLP, and the tensors of their weights
NORMS_BESIDE_MLP = {
    "router_norm": "router.scale",
    "experts_norm": "pre_feedforward_layernorm_2.weight",
    "experts_post_norm": "post_feedforward_layernorm_2.weight",
    "dense_post_norm": "post_feedforward_layernorm_1.weight",
}


@dataclass(frozen=True)
class ExpertNames:
    """Names of a mixture's tensors, after `model.layers.N.`. Those of expert i follow `experts` and `i.`; with `stacks`
    two tensors hold the matrices of all experts instead: gate and up, and down."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_expert."
    shared_gate: str = "mlp.shared_expert_gate"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    stacks: tuple[str, str] | None = None
    transposed: bool = False  # the matrices of stacks are [in, out]
    alternating: bool = False  # the rows of gate and up alternate in stacks; False: all of the gate come first
    beside_mlp: Mapping[str, str] = field(default_factory=lambda: NORMS_BESIDE_MLP)
    expert_scales: str = "router.per_expert_scale"
    experts_in: str = ""
    experts_out: str = ""
    shared_fused: tuple[str, str] | None = None  # after `shared`: gate and up in one tensor, and down


def moe_spec(
    config: HFConfig, *, count: tuple[str, int], per_token: int, size: tuple[str, int | None], normalize: bool
) -> MoESpec:
    """A mixture from the configuration. `count` and `size` are (field, the family's default) of the number of experts
    and of an expert's intermediate size; `per_token` is the default of num_experts_per_tok.

    Raises UnsupportedModel if a token uses more experts than there are.
    """
    name, default = count
    experts = config.integer(name, default, most=MAX_EXPERTS)
    chosen = config.integer("num_experts_per_tok", per_token)
    if chosen > experts:
        raise config.unsupported("num_experts_per_tok", chosen, f"at most {name} ({experts})")
    width = config.integer(size[0]) if size[1] is None else config.integer(*size)
    return MoESpec(experts, chosen, width, normalize)


def grouped_routing(config: HFConfig, moe: MoESpec, *, sigmoid: bool) -> MoESpec:
    """The mixture with DeepSeek's fields: n_group groups of experts, of which topk_group take part, and the scale of
    the weights. With `sigmoid`, which is V3's way, scores are sigmoids, a bias of theirs changes the choice, and a
    group's score is the sum of its two largest.

    Raises UnsupportedModel if groups are not equal, or those that take part have too few experts."""
    groups, kept = config.integer("n_group", 1), config.integer("topk_group", 1)
    if moe.num_experts % groups or moe.num_experts // groups < (2 if groups > 1 else 1):
        raise config.unsupported("n_group", groups, f"equal groups of two or more of the {moe.num_experts} experts")
    if kept > groups or kept * (moe.num_experts // groups) < moe.experts_per_token:
        raise config.unsupported("topk_group", kept, f"up to n_group ({groups}), with {moe.experts_per_token} experts")
    scale = config.number("routed_scaling_factor", 1.0)
    moe = replace(moe, groups=groups, kept_groups=kept, weight_scale=scale)
    return replace(moe, sigmoid=sigmoid, by_pairs=sigmoid, choice_bias=sigmoid)


def with_shared_experts(config: HFConfig, moe: MoESpec, count: int) -> MoESpec:
    """The mixture with n_shared_experts shared experts, by default `count`: together one of so many times the width."""
    shared = config.integer("n_shared_experts", count, least=0)
    return replace(moe, shared_intermediate_size=moe.intermediate_size * shared)


def dense_first(config: HFConfig, layer: LayerSpec, moe: MoESpec, count: int, dense: int) -> list[LayerSpec]:
    """The layers by DeepSeek's rule: of `count` layers the first first_k_dense_replace, by default `dense`, are like
    `layer`. The others are mixtures."""
    first = config.integer("first_k_dense_replace", dense, least=0)
    mixture = replace(layer, intermediate_size=0, moe=moe, mlp_bias=False)
    return [layer if i < first else mixture for i in range(count)]


def sparse_layers(config: HFConfig, layer: LayerSpec, moe: MoESpec, count: int) -> list[LayerSpec]:
    """The layers by Qwen's rule: every decoder_sparse_step-th of `count` layers is a mixture. The others, and all
    mlp_only_layers, are dense like `layer`."""
    step = config.integer("decoder_sparse_step", 1)
    dense = config.integers("mlp_only_layers")
    mixture = replace(layer, intermediate_size=0, moe=moe)
    return [mixture if (i + 1) % step == 0 and i not in dense else layer for i in range(count)]


def expert_parameters(
    ours: str, theirs: str, moe: MoESpec, hidden: int, names: ExpertNames, *, gated: bool
) -> list[Parameter]:
    """The parameters `{ours}*` of a layer's mixture (see MoESpec), from the tensors `{theirs}*`."""
    parts = ("gate_up", (names.gate, names.up)) if gated else ("up", (names.up,))

    def mlps(name: str, prefixes: Sequence[str], width: int, hidden: int, *, biases: bool = False) -> list[Parameter]:
        found = []
        halves = [(f"{theirs}{prefix}{half}", width) for prefix in prefixes for half in parts[1]]
        downs = [(f"{theirs}{prefix}{names.down}", hidden) for prefix in prefixes]
        for kind in ("weight", "bias")[: 1 + biases]:
            for part, columns, sources in ((parts[0], hidden, halves), ("down", width, downs)):
                tensors = [(f"{source}.{kind}", rows) for source, rows in sources]
                shape = (columns,) if kind == "weight" else ()
                found.append(stacked(f"{ours}{name}.{part}.{kind}", shape, *tensors, experts=len(prefixes)))
        return found

    inner = moe.experts_hidden or hidden
    held = range(moe.first_expert, moe.first_expert + moe.held)
    each = [f"{names.experts}{i}." for i in held]
    parameters = [stacked(f"{ours}router.weight", (hidden,), (f"{theirs}{names.router}.weight", moe.num_experts))]
    if moe.biases:
        parameters.append(stacked(f"{ours}router.bias", (), (f"{theirs}{names.router}.bias", moe.num_experts)))
    if names.stacks is not None:
        parameters += _of_stacks(f"{ours}experts.", theirs, moe, hidden, names)
    else:
        parameters += mlps("experts", each, moe.intermediate_size, inner, biases=moe.biases)
    if moe.experts_hidden:
        for name, tensor, rows, columns in (
            ("experts_in", names.experts_in, inner, hidden),
            ("experts_out", names.experts_out, hidden, inner),
        ):
            parameters.append(stacked(f"{ours}{name}.weight", (columns,), (f"{theirs}{tensor}.weight", rows)))
    if moe.choice_bias:
        parameters.append(stacked(f"{ours}choice.bias", (), (f"{theirs}{names.choice_bias}", moe.num_experts)))
    if moe.shared_intermediate_size and names.shared_fused is not None:
        parameters += _fused_mlp(f"{ours}shared.", f"{theirs}{names.shared}", moe, hidden, names.shared_fused)
    elif moe.shared_intermediate_size:
        parameters += mlps("shared", [names.shared], moe.shared_intermediate_size, hidden)
    if moe.beside_mlp:
        parameters += [
            stacked(f"{ours}{name}.weight", (), (f"{theirs}{tensor}", hidden))
            for name, tensor in names.beside_mlp.items()
        ]
        scales = stacked(f"{ours}expert_scales.weight", (), (f"{theirs}{names.expert_scales}", moe.num_experts))
        parameters.append(replace(scales, precise=True))
    if moe.shared_gate:
        parameters.append(stacked(f"{ours}shared.gate.weight", (hidden,), (f"{theirs}{names.shared_gate}.weight", 1)))
    return parameters


def _of_stacks(ours: str, theirs: str, moe: MoESpec, hidden: int, names: ExpertNames) -> list[Parameter]:
    """The experts' matrices and biases, from tensors that hold those of all experts."""
    assert names.stacks is not None
    gate_up, down = (f"{theirs}{name}" for name in names.stacks)
    width, held = moe.intermediate_size, range(moe.first_expert, moe.first_expert + moe.held)
    second, step = (1, 2) if names.alternating else (width, 1)
    halves = [
        TensorSource(f"{gate_up}[{i}]", 0, width, first, transposed=names.transposed, step=step)
        for i in held
        for first in (0, second)
    ]
    downs = [TensorSource(f"{down}[{i}]", 0, hidden, transposed=names.transposed) for i in held]
    parameters = [
        joined(f"{ours}gate_up.weight", (hidden,), halves, experts=len(held)),
        joined(f"{ours}down.weight", (width,), downs, experts=len(held)),
    ]
    if moe.biases:
        for name, sources in (("gate_up.bias", halves), ("down.bias", downs)):
            vectors = [replace(source, name=source.name.replace("[", "_bias["), transposed=False) for source in sources]
            parameters.append(joined(f"{ours}{name}", (), vectors, experts=len(held)))
    return parameters


def _fused_mlp(ours: str, theirs: str, moe: MoESpec, hidden: int, names: tuple[str, str]) -> list[Parameter]:
    """The matrices of a shared expert whose gate and up are one tensor."""
    (gate_up, down), width = names, moe.shared_intermediate_size
    halves = [TensorSource(f"{theirs}{gate_up}.weight", 0, width, first) for first in (0, width)]
    return [
        joined(f"{ours}gate_up.weight", (hidden,), halves),
        stacked(f"{ours}down.weight", (width,), (f"{theirs}{down}.weight", hidden)),
    ]
