"""Which splits there are, and what a step of each costs at least."""

from typing import Any

from penstock.config import EngineConfig, Split
from penstock.config.weights import matmul_bytes
from penstock.families import check_split, rank_facts
from penstock.families.shard import possible_splits
from penstock.families.step_cost import step_cost
from penstock.families.traffic import link_bytes, step_traffic
from tests.families.divisible import spec_of


def engine(split: Split, **changes: Any) -> EngineConfig:
    sizes = {"tensor_parallel_size": split.tensor, "pipeline_parallel_size": split.pipeline, **changes}
    return EngineConfig(model="m", name="m", expert_parallel=split.expert, **sizes)


def test_splits_that_a_number_of_ranks_allows() -> None:
    spec = spec_of("llama")  # 4 KV heads, 5 layers
    assert possible_splits(spec, 1) == [Split()]
    assert possible_splits(spec, 4) == [Split(), Split(2), Split(1, 2), Split(4), Split(2, 2), Split(1, 4)]
    assert Split(1, 5) in possible_splits(spec, 5)
    assert Split(1, 5) not in possible_splits(spec, 6)
    for split in possible_splits(spec, 100, group=16):
        check_split(spec, split, group=16)
        assert split.world <= 100


def test_experts_are_divided_or_whole() -> None:
    splits = possible_splits(spec_of("mixtral"), 4)
    assert Split(4) in splits and Split(2, 2, True) in splits
    assert not any(split.expert for split in splits if split.tensor == 1)
    assert not any(split.expert for split in possible_splits(spec_of("llama"), 8))


def test_a_step_reads_what_the_slowest_rank_of_each_stage_reads_or_all_of_a_shared_memory() -> None:
    spec, split = spec_of("qwen3"), Split(2, 2)
    ranks, config = rank_facts(spec, split), engine(split)
    reads = [matmul_bytes(facts, config, 7) for facts in ranks]
    apart, together = (step_cost(spec, config, ranks, 7, 3, shared=shared) for shared in (False, True))
    assert apart.read == max(reads[:2]) + max(reads[2:])
    assert together.read == sum(reads)
    moved = [step_traffic(spec, place, 7, 3, 2).total for place in split.places]
    assert apart.moved == together.moved == sum(moved)
    assert apart.linked == link_bytes(spec, split, 7, 3, 2)


def test_tensor_ranks_halve_what_is_read_in_turn_and_stages_do_not() -> None:
    spec = spec_of("qwen3", vocab_size=320, intermediate_size=128)
    costs = [
        # In fp32, whose weights have no scales, of which some are on every rank.
        step_cost(spec, engine(split, dtype="float32"), rank_facts(spec, split), 1, 1, shared=False)
        for split in (Split(), Split(2), Split(1, 2))
    ]
    assert costs[0].read == 2 * costs[1].read == costs[2].read
    assert costs[0].moved == costs[0].linked == 0
    assert costs[2].moved < costs[1].moved
