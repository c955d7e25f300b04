"""What a step of a divided model costs at least: the bytes that are read of memory, and those that pass links."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config import EngineConfig, ModelFacts
from penstock.config.weights import matmul_bytes
from penstock.families.spec import ModelSpec
from penstock.families.traffic import link_bytes, step_traffic


@dataclass(frozen=True)
class StepCost:
    """In bytes, of a step through all stages, one after the other."""

    read: int  # of weights, by the rank of each stage that reads most; where ranks share a memory, by all
    moved: int  # that all ranks hand to each other
    linked: int  # that pass links one after the other


def step_cost(
    spec: ModelSpec, engine: EngineConfig, ranks: Sequence[ModelFacts], tokens: int, sampled: int, *, shared: bool
) -> StepCost:
    """Of `tokens` tokens after `sampled` of which another is chosen. `ranks` are those of `engine.split`; `shared` is
    whether they share one memory."""
    split, size = engine.split, engine.element_size
    reads = [matmul_bytes(facts, engine, tokens) for facts in ranks]
    stages = [reads[first : first + split.tensor] for first in range(0, split.world, split.tensor)]
    return StepCost(
        read=sum(map(sum if shared else max, stages)),
        moved=sum(step_traffic(spec, place, tokens, sampled, size).total for place in split.places),
        linked=link_bytes(spec, split, tokens, sampled, size),
    )
