"""The spec of one rank: a function from a model's spec to a smaller one.

Tensor parallelism cuts matrices in pairs (Shoeybi et al., "Megatron-LM", 2019). Each rank has rows of the first (qkv,
gate_up), which are whole heads or whole columns of the MLP, and those columns of the second (output, down) that read
them. The ranks' outputs of the second add up to the model's. Pipeline parallelism cuts the sequence of layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.config import ModelFacts, RankPlace, Split
from penstock.config.split import part
from penstock.families.kinds.attention import Cut
from penstock.families.registry import model_facts
from penstock.families.spec import LayerSpec, ModelSpec, MoESpec, Parameter, TensorSource

_PER_LAYER = ("table", "projection", "norm", "gate", "output", "post_norm")

# The cut of each parameter of a layer. Those of attention are in its AttentionSpec.
_CUTS: Mapping[str, Cut] = {
    "gate_up.weight": "rows",
    "gate_up.bias": "rows",
    "down.weight": "columns",
    "down.bias": "once",
    "shared.gate_up.weight": "rows",
    "shared.down.weight": "columns",
    "experts.gate_up.weight": "rows",
    "experts.down.weight": "columns",
    "shared.gate.weight": "whole",
    "router.weight": "whole",
    "attention_norm.weight": "whole",
    "attention_post_norm.weight": "whole",
    "mlp_norm.weight": "whole",
    "mlp_post_norm.weight": "whole",
    "attention_norm.bias": "whole",
    "mlp_norm.bias": "whole",
    "up.weight": "rows",
    "up.bias": "rows",
    "router.bias": "whole",
    "experts.gate_up.bias": "rows",
    "experts.down.bias": "once",
    "choice.bias": "whole",
    "expert_scales.weight": "whole",
    "router_norm.weight": "whole",
    "experts_norm.weight": "whole",
    "experts_post_norm.weight": "whole",
    "dense_post_norm.weight": "whole",
    "output_scale.weight": "whole",
    **{f"per_layer.{name}.weight": "whole" for name in _PER_LAYER},
}


class CannotSplit(ValueError):
    """The model cannot be split like this. The message names the size, what it must divide, and sizes that work."""


def shard(spec: ModelSpec, place: RankPlace) -> ModelSpec:
    """The part of a model that the rank at `place` holds. Layers and their parameters are numbered from 0 in every
    stage.

    A tied head that is not on the embedding's stage is a parameter of its own, read from the same tensor. Raises
    CannotSplit, as `check_split` does.
    """
    split = place.split
    check_split(spec, split)
    if split.world == 1:
        return spec
    stage = stage_layers(len(spec.layers), split.pipeline, place.stage)
    rows = part(spec.vocab_size, split.tensor, place.tensor_rank)
    parameters: list[Parameter] = []
    for parameter in spec.parameters:
        parameters += _parameter(spec, parameter, place, stage, rows)
    if spec.tie_embeddings and place.last and not place.first:
        table = next(parameter for parameter in spec.parameters if parameter.name == "embedding.weight")
        parameters.append(replace(_take_rows(table, rows), name="head.weight"))
    return replace(
        spec,
        layers=tuple(_layer(spec.layers[index], place) for index in stage),
        parameters=tuple(parameters),
        tie_embeddings=spec.tie_embeddings and place.first and place.last,
        vocab_size=len(rows),
        vocab_start=rows.start,
        vocab_total=spec.vocab_size,
    )


def rank_facts(spec: ModelSpec, split: Split, group: int = 1) -> tuple[ModelFacts, ...]:
    """The sizes of every rank, in rank order. Raises CannotSplit, as `check_split` does."""
    check_split(spec, split, group)
    alike: dict[tuple[int, bool, int], ModelFacts] = {}  # other ranks than the first differ only in their vocabularies
    facts = []
    for place in split.places:
        key = place.stage, place.tensor_rank == 0, len(part(spec.vocab_size, split.tensor, place.tensor_rank))
        if key not in alike:
            alike[key] = model_facts(shard(spec, place))
        facts.append(alike[key])
    return tuple(facts)


def stage_layers(layers: int, stages: int, stage: int) -> range:
    """The layers of a stage: at most one more than another stage has. The last stage, with the head, has no more."""
    return part(layers, stages, stage)


def check_split(spec: ModelSpec, split: Split, group: int = 1) -> None:
    """Raise CannotSplit unless every rank gets whole heads, an equal part of every MLP, whole blocks of codes, and
    a layer.

    `group` values of a row share a scale (1: none do). A rank's part of a row must be whole groups.
    """
    if spec.encoder is not None and split.world > 1:
        raise CannotSplit(
            f"an encoder is not divided, but there are {split.world} ranks: leave --tensor-parallel-size, "
            "--pipeline-parallel-size and --expert-parallel out"
        )
    if spec.transformers is not None and split.world > 1:
        raise CannotSplit(
            f"transformers' code executes {spec.transformers.architecture} whole, but there are {split.world} ranks: "
            "leave --tensor-parallel-size, --pipeline-parallel-size and --expert-parallel out"
        )
    if spec.state_layers and split.world > 1:
        raise CannotSplit(
            f"a {spec.family} model keeps states and is not divided, but there are {split.world} ranks: leave "
            "--tensor-parallel-size, --pipeline-parallel-size and --expert-parallel out"
        )
    if spec.whole_stages and split.pipeline > 1:
        raise CannotSplit(
            f"layers of this {spec.family} model read keys and values or embeddings that another stage would have, but "
            f"--pipeline-parallel-size is {split.pipeline}: leave it out"
        )
    if split.pipeline > len(spec.layers):
        raise CannotSplit(
            f"--pipeline-parallel-size {split.pipeline} is more than the {len(spec.layers)} layers: use "
            f"{_either(range(1, len(spec.layers) + 1))}"
        )
    if split.expert and not any(layer.moe for layer in spec.layers):
        raise CannotSplit(f"--expert-parallel is set, but a {spec.family} model has no experts: leave it out")
    obstacle = _obstacle(spec, split.tensor, split.expert, group)
    if obstacle is not None:
        raise CannotSplit(
            f"--tensor-parallel-size {split.tensor} {obstacle}: use {_either(tensor_sizes(spec, split.expert, group))}"
        )
    if split.expert and split.tensor == 1:
        more = [size for size in tensor_sizes(spec, True, group) if size > 1]
        use = f"use {_either(more)}, or leave" if more else "leave"
        raise CannotSplit(f"--tensor-parallel-size 1 has no ranks for --expert-parallel to divide: {use} that out")


def tensor_sizes(spec: ModelSpec, expert: bool = False, group: int = 1) -> list[int]:
    """Every tensor_parallel_size that works, in order; 1 is always among them."""
    most = min((size for layer in spec.layers for size, _ in layer.attention.tensor_split.sizes), default=1)
    return [size for size in range(1, most + 1) if _obstacle(spec, size, expert, group) is None]


def possible_splits(spec: ModelSpec, most: int, group: int = 1) -> list[Split]:
    """Splits into at most `most` ranks, the fewest ranks first. The number of stages is a power of two, or uses all
    ranks. `group` is as in `check_split`."""
    splits: list[Split] = []
    if spec.encoder is not None or spec.transformers is not None or spec.state_layers:
        return [Split()]
    for expert in (False, True) if any(layer.moe for layer in spec.layers) else (False,):
        for tensor in tensor_sizes(spec, expert, group):
            stages = range(1, 2 if spec.whole_stages else min(most // tensor, len(spec.layers)) + 1)
            some = [count for count in stages if count & (count - 1) == 0 or count * tensor == most]
            splits += [Split(tensor, count, expert) for count in some if tensor > 1 or not expert]
    return sorted(splits, key=lambda split: (split.world, split.pipeline, split.expert))


def _obstacle(spec: ModelSpec, tensor: int, expert: bool, group: int) -> str | None:
    """Why a model cannot be divided among so many tensor ranks; None if it can."""
    if tensor == 1:
        return None
    for layer in dict.fromkeys(spec.layers):
        for size, what in _divided(layer, expert):
            if size % tensor:
                return f"does not divide the {what.format(size)}"
        for width, name in _cut_columns(layer, expert):
            if width // tensor % group:
                return f"cuts rows of {width} values ({name}) into {width // tensor}, which are no groups of {group}"
    for parameter in spec.parameters:
        for codes in filter(None, parameter.stored):
            columns = parameter.shape[1]
            cut = (codes.ordered or columns // tensor % codes.block) and _cut(spec, parameter, expert) == "columns"
            if cut:
                what = f"cuts rows of {columns} values ({parameter.name}, {codes.name}) into {columns // tensor}"
                return f"{what}, which are no blocks of {columns if codes.ordered else codes.block}"
    if tensor > spec.vocab_size:
        return f"is more than the {spec.vocab_size} tokens of the vocabulary"
    return None


def _divided(layer: LayerSpec, expert: bool) -> list[tuple[int, str]]:
    """(size, name) of everything that the number of tensor ranks must divide."""
    moe = layer.moe
    sizes = [*layer.attention.tensor_split.sizes, (layer.intermediate_size, "intermediate size of {}")]
    if moe is not None:
        experts = (moe.num_experts, "{} experts")
        sizes.append(experts if expert else (moe.intermediate_size, "experts' intermediate size of {}"))
        sizes.append((moe.shared_intermediate_size, "shared expert's intermediate size of {}"))
    return sizes


def _cut_columns(layer: LayerSpec, expert: bool) -> list[tuple[int, str]]:
    """Widths of the matrices that are cut by columns, with their names."""
    moe = layer.moe
    widths = [*layer.attention.tensor_split.columns, (layer.intermediate_size, "down")]
    if moe is not None:
        widths.append((0 if expert else moe.intermediate_size, "experts' down"))
        widths.append((moe.shared_intermediate_size, "shared expert's down"))
    return widths


def _either(sizes: Sequence[int]) -> str:
    """'1', '1 or 2', '1, 2, 4 or 8', '1 to 32'."""
    if len(sizes) > 2 and sizes[-1] - sizes[0] == len(sizes) - 1:
        return f"{sizes[0]} to {sizes[-1]}"
    *rest, last = map(str, sizes)
    return f"{', '.join(rest)} or {last}" if rest else last


def _layer(layer: LayerSpec, place: RankPlace) -> LayerSpec:
    tensor = place.split.tensor
    return replace(
        layer,
        attention=layer.attention.shard(tensor, place.tensor_rank),
        intermediate_size=layer.intermediate_size // tensor,
        moe=layer.moe and _moe(layer.moe, place),
    )


def _moe(moe: MoESpec, place: RankPlace) -> MoESpec:
    tensor = place.split.tensor
    moe = replace(moe, shared_intermediate_size=moe.shared_intermediate_size // tensor)
    if not place.split.expert:
        return replace(moe, intermediate_size=moe.intermediate_size // tensor)
    experts = part(moe.num_experts, tensor, place.tensor_rank)
    return replace(moe, first_expert=experts.start, local_experts=len(experts))


def _parameter(
    spec: ModelSpec, parameter: Parameter, place: RankPlace, stage: range, vocabulary: range
) -> list[Parameter]:
    """A rank's part of a parameter of the whole model: one, or none."""
    if parameter.name == "embedding.weight":
        return [_take_rows(parameter, vocabulary)] if place.first else []
    if parameter.name in ("head.weight", "head.bias"):
        return [_take_rows(parameter, vocabulary)] if place.last else []
    if parameter.name == "embedding.positions.weight":
        return [parameter] if place.first else []
    if parameter.name in ("norm.weight", "norm.bias"):
        return [parameter] if place.last else []
    _, number, name = parameter.name.split(".", 2)
    if int(number) not in stage:
        return []
    cut = _cut(spec, parameter, place.split.expert)
    parameter = replace(parameter, name=f"layers.{int(number) - stage.start}.{name}")
    return _divide(parameter, cut, place.split.tensor, place.tensor_rank)


def _cut(spec: ModelSpec, parameter: Parameter, expert: bool) -> Cut:
    """How tensor ranks divide a parameter."""
    if not parameter.name.startswith("layers."):
        return "rows" if parameter.kind == "vocabulary" else "whole"
    _, number, name = parameter.name.split(".", 2)
    if name.startswith("experts.") and expert:
        return "experts"
    cuts = {**_CUTS, **spec.layers[int(number)].attention.tensor_split.cuts}
    return cuts[name]


def _divide(parameter: Parameter, cut: Cut, ranks: int, rank: int) -> list[Parameter]:
    if cut == "whole" or ranks == 1:
        return [parameter]
    if cut == "once":
        return [parameter] if rank == 0 else []
    if cut == "columns":
        return [_take_columns(parameter, part(parameter.shape[1], ranks, rank))]
    if cut == "rows":  # of each part by itself
        sources: list[TensorSource] = []
        start = 0
        for rows in parameter.parts or [source.rows for source in parameter.sources]:
            own = part(rows, ranks, rank)
            sources += _rows_between(parameter.sources, start + own.start, start + own.stop)
            start += rows
        return [replace(parameter.of(sources), parts=tuple(rows // ranks for rows in parameter.parts))]
    experts = part(parameter.experts, ranks, rank)
    each = len(parameter.sources) // parameter.experts
    held = parameter.sources[experts.start * each : experts.stop * each]
    return [replace(parameter.of(held), experts=len(experts))]


def _take_rows(parameter: Parameter, rows: range) -> Parameter:
    """Those rows of a parameter that has one source."""
    return parameter.of([_rows_of(parameter.sources[0], rows)])


def _rows_between(sources: Sequence[TensorSource], first: int, last: int) -> list[TensorSource]:
    """Rows `first` to `last` of a parameter with these sources."""
    found = []
    for source in sources:
        begin, end = max(first - source.start, 0), min(last - source.start, source.rows)
        if begin < end:
            found.append(_rows_of(source, range(begin, end)))
    return found


def _rows_of(source: TensorSource, rows: range) -> TensorSource:
    return replace(source, first_row=source.first_row + rows.start * source.step, rows=len(rows))


def _take_columns(parameter: Parameter, columns: range) -> Parameter:
    sources = tuple(
        replace(source, first_column=source.first_column + columns.start, columns=len(columns))
        for source in parameter.sources
    )
    return replace(parameter, shape=(parameter.shape[0], len(columns)), sources=sources)
