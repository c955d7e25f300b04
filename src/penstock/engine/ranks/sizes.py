"""Sizes of a model's ranks: the part that each holds, and the KV blocks that all have room for. No torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.config import EngineConfig, RankPlace, size_ranks
from penstock.config.split import part
from penstock.families import ModelSpec, load_spec, rank_facts
from penstock.families.shard import stage_layers


class RankSizes(NamedTuple):
    num_blocks: tuple[int, ...]  # per KV group, for every rank; none: the ranks measure, and agree
    parts: tuple[str, ...]  # what each rank holds, for people


def size_model(config: EngineConfig, available: Sequence[int]) -> RankSizes:
    """As many KV blocks as every rank has room for, of whose machine's memory `available` bytes are its own. On GPUs
    each measures what it has.

    Raises DoesNotFit, CannotSplit, UnsupportedModel, CheckpointError or OSError.
    """
    spec = load_spec(Path(config.model))
    group = config.quantization_group if config.quantization == "int4" else 1
    facts = rank_facts(spec, config.split, group)
    num_blocks = () if config.device == "cuda" else size_ranks(facts, config, available)[0].num_blocks
    return RankSizes(num_blocks, tuple(_part(spec, place) for place in config.split.places))


def _part(spec: ModelSpec, place: RankPlace) -> str:
    """'layers 0 to 13 of 28, heads 8 to 15 of 16, experts 4 to 7 of 8'."""
    split = place.split
    parts = {"layers": (stage_layers(len(spec.layers), split.pipeline, place.stage), len(spec.layers))}
    if split.tensor > 1:
        heads = spec.layers[0].attention.num_heads
        parts["heads"] = (part(heads, split.tensor, place.tensor_rank), heads)
    if split.expert:
        experts = max(layer.moe.num_experts for layer in spec.layers if layer.moe)
        parts["experts"] = (part(experts, split.tensor, place.tensor_rank), experts)
    return ", ".join(f"{what} {held[0]} to {held[-1]} of {total}" for what, (held, total) in parts.items())
