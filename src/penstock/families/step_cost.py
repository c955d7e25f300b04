"""The least cost of a step, computed from a model's sizes: bytes read, bytes sent over links, operations."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from penstock.config import EngineConfig, ModelFacts
from penstock.config.memory import block_bytes
from penstock.config.weights import matmul_bytes
from penstock.families.spec import ModelSpec
from penstock.families.traffic import link_bytes, step_traffic
from penstock.observe.costs import StepCosts


def model_costs(facts: ModelFacts, engine: EngineConfig) -> StepCosts:
    """The costs of steps of any size, all ranks together: of a whole model if `facts` are those of one."""
    return StepCosts(
        weight_bytes=lru_cache(lambda tokens: float(matmul_bytes(facts, engine, tokens))),
        block_bytes=block_bytes(facts, engine),
        layer_flops=2.0 * facts.parameters_per_token,
        head_flops=0.0 if facts.pooling else 2.0 * facts.vocab_size * facts.hidden_size,
    )


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
