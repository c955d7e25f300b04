"""Settings and memory of a model that several ranks share."""

from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import (
    ConfigError,
    DoesNotFit,
    EngineConfig,
    Resolved,
    Split,
    memory_table,
    read_settings,
    resolve,
    size_memory,
    size_ranks,
)
from penstock.config.memory import activation_bytes, token_bytes, workspace_bytes
from penstock.config.weights import matmul_bytes, weights_bytes
from penstock.families import CannotSplit, model_facts, rank_facts
from tests.config.models import GIB, machine
from tests.families.divisible import CONFIGS, spec_of

LARGE: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 31,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
}
SPLITS = st.builds(Split, st.sampled_from([1, 2, 4]), st.integers(1, 5))


def engine(split: Split, **changes: Any) -> EngineConfig:
    sizes = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 128, **changes}
    return EngineConfig(
        model="m",
        name="m",
        tensor_parallel_size=split.tensor,
        pipeline_parallel_size=split.pipeline,
        expert_parallel=split.expert,
        **sizes,
    )


def resolved(family: str = "llama", gib: float = 16, changes: dict[str, Any] | None = None, **flags: Any) -> Resolved:
    divide = partial(rank_facts, spec_of(family, **(changes or {})))
    return resolve(read_settings(flags), divide, machine(gib, cores=8), folder="/models/m")


@given(family=st.sampled_from(sorted(CONFIGS)), split=SPLITS, memory=st.lists(st.integers(GIB, 8 * GIB), min_size=20))
@settings(max_examples=30, deadline=None)
def test_all_ranks_get_the_blocks_of_the_one_with_least_room(family: str, split: Split, memory: list[int]) -> None:
    spec, config, available = spec_of(family), engine(split, max_num_seqs=4096), memory[: split.world]
    ranks = rank_facts(spec, split)
    plans = size_ranks(ranks, config, available)
    alone = [size_memory(facts, config, bytes) for facts, bytes in zip(ranks, available, strict=True)]
    assert {plan.num_blocks for plan in plans} == {min(plan.num_blocks for plan in alone)}
    for plan, facts, bytes in zip(plans, ranks, available, strict=True):
        assert sum(row.bytes for row in plan.rows) == bytes
        assert all(row.bytes >= 0 for row in plan.rows)
        assert memory_table(facts, config, plan.num_blocks) == plan.rows[:-1]


def test_ranks_of_a_large_model_add_up_to_it() -> None:
    spec, split = spec_of("qwen3", **LARGE, tie_word_embeddings=False), Split(8, 2)
    whole, ranks = model_facts(spec), rank_facts(spec, split)
    config = engine(split, dtype="float32")  # whose weights have no scales, of which some are on every rank
    norms = sum(facts.vector_elements for facts in ranks) - whole.vector_elements
    assert sum(weights_bytes(facts, config) for facts in ranks) == weights_bytes(whole, config) + 4 * norms
    assert sum(matmul_bytes(facts, config) for facts in ranks) == matmul_bytes(whole, config)
    assert sum(token_bytes(facts, config)[0] for facts in ranks) == token_bytes(whole, config)[0]
    assert [facts.num_layers for facts in ranks] == [16] * 8 + [15] * 8


@given(family=st.sampled_from(sorted(CONFIGS)), split=SPLITS)
@settings(max_examples=30, deadline=None)
def test_the_first_rank_of_a_stage_needs_the_most(family: str, split: Split) -> None:
    """Whoever looks at the stages' first ranks has seen what the others need."""
    config = engine(split)
    ranks = rank_facts(spec_of(family), split)
    for place, facts in zip(split.places, ranks, strict=True):
        first = ranks[place.stage * split.tensor]
        for needs in (lambda f: weights_bytes(f, config), lambda f: workspace_bytes(f, 8), lambda f: f.num_parameters):
            assert needs(facts) <= needs(first)


def test_logits_are_whole_on_one_rank_and_in_parts_on_its_stage() -> None:
    spec = spec_of("llama", vocab_size=1000)
    earlier, _, reporting, helping = rank_facts(spec, Split(2, 2))
    whole = workspace_bytes(model_facts(spec), 256)
    assert workspace_bytes(earlier, 256) == 0
    assert workspace_bytes(helping, 256) == 256 * 500 * 4
    assert workspace_bytes(reporting, 256) == whole + 256 * 500 * 4


def test_what_ranks_exchange_takes_memory() -> None:
    facts, hidden = model_facts(spec_of("llama")), 64 * 2
    alone, tensor, stages = (activation_bytes(facts, engine(split)) for split in (Split(), Split(4), Split(1, 3)))
    assert tensor == alone + 128 * 8 * hidden
    assert stages == alone + 128 * 4 * hidden


def test_a_rank_that_does_not_fit_is_named() -> None:
    split = Split(1, 2)
    ranks = rank_facts(spec_of("llama"), split)
    with pytest.raises(DoesNotFit, match="rank 1 of 2: the model does not fit"):
        size_ranks(ranks, engine(split), [GIB, 200 << 20])


def test_ranks_share_the_machines_memory_and_cores() -> None:
    one, four = resolved(), resolved(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert (one.engine.threads, one.engine.depth, len(one.ranks)) == (8, 1, 1)
    assert (four.engine.threads, four.engine.depth, len(four.ranks)) == (2, 2, 4)
    assert {sum(row.bytes for row in plan.rows) for plan in four.ranks} == {4 * GIB}
    assert four.provenance["threads"][1] == "default: the share of each of 4 ranks in 8 cores"
    assert four.engine.split == Split(2, 2)
    assert four.memory in four.ranks


def test_more_ranks_than_cores_have_a_thread_each() -> None:
    crowded = resolved(pipeline_parallel_size=5, tensor_parallel_size=2)
    assert crowded.engine.threads == 1
    said = "default: 10 ranks share 8 cores and wait for each other: fewer ranks are faster"
    assert crowded.provenance["threads"][1] == said


def test_ray_places_ranks_on_machines_not_known_here() -> None:
    placed = resolved(tensor_parallel_size=4, distributed_executor="ray")
    assert placed.engine.threads == 0
    assert {sum(row.bytes for row in plan.rows) for plan in placed.ranks} == {16 * GIB}
    assert resolved(tensor_parallel_size=4, distributed_executor="ray", threads=32).engine.threads == 32


def test_a_model_too_large_for_one_rank_gets_a_context_that_fits_its_part() -> None:
    changes = {**LARGE, "max_position_embeddings": 131_072}
    one, two = (
        resolved(gib=24, changes=changes, dtype="bfloat16", tensor_parallel_size=size, distributed_executor="ray")
        for size in (1, 2)
    )
    assert one.engine.max_model_len < two.engine.max_model_len
    assert two.memory.kv_tokens >= two.engine.max_model_len


@pytest.mark.parametrize(
    ("flags", "error", "words"),
    [
        ({"threads": 5, "tensor_parallel_size": 2}, ConfigError, "8 cores and 2 ranks share them: .* set --threads 4"),
        (
            {"tensor_parallel_size": 3},
            CannotSplit,
            "--tensor-parallel-size 3 does not divide the 4 KV heads: use 1, 2 or",
        ),
        ({"tensor_parallel_size": 4, "quantization": "int4"}, CannotSplit, "into 24, which are no groups of 32: use 1"),
        ({"pipeline_parallel_size": 9}, CannotSplit, "more than the 5 layers: use 1 to 5"),
        ({"expert_parallel": True}, CannotSplit, "has no experts: leave it out"),
        ({"tensor_parallel_size": 0}, ConfigError, r"--tensor-parallel-size \(command line\) is 0"),
        ({"tensor_parallel_size": 2000}, ConfigError, "1024"),
        ({"distributed_executor": "mpi"}, ConfigError, "give auto, process or ray"),
        ({"kv_cache_memory": "9GiB", "tensor_parallel_size": 2}, DoesNotFit, "rank 0 of 2: a KV cache of 9.00 GiB"),
    ],
)
def test_splits_that_cannot_be_are_refused_with_a_remedy(
    flags: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        resolved(**flags)
