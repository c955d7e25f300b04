"""The least cost of a step of a divided model: the bytes read from memory, and those sent over links."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config import EngineConfig, ModelFacts
from penstock.config.weights import matmul_bytes
from penstock.families.spec import ModelSpec
from penstock.families.traffic import link_bytes, step_traffic


@dataclass(frozen=True)
class StepCost:
    """Bytes of one step, summed over the stages, which run one after the other."""

    read: int  # weights, by the rank of each stage that reads most; if ranks share a memory, by all ranks
    moved: int  # sent by all ranks
    linked: int  # sent over links one after the other


def step_cost(
    spec: ModelSpec, engine: EngineConfig, ranks: Sequence[ModelFacts], tokens: int, sampled: int, *, shared: bool
) -> StepCost:
    """The cost of a step of `tokens` tokens, `sampled` of which are sampled after. `ranks` are those of `engine.split`;
    `shared`: they share one memory."""
    split, size = engine.split, engine.element_size
    reads = [matmul_bytes(facts, engine, tokens) for facts in ranks]
    stages = [reads[first : first + split.tensor] for first in range(0, split.world, split.tensor)]
    return StepCost(
        read=sum(map(sum if shared else max, stages)),
        moved=sum(step_traffic(spec, place, tokens, sampled, size).total for place in split.places),
        linked=link_bytes(spec, split, tokens, sampled, size),
    )
