"""Memory is divided without remainder, what does not fit is refused, and the remedy named really is one."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.config import DoesNotFit, EngineConfig, ModelFacts, parse_bytes, size_memory
from penstock.config.memory import fit_tokens, pool_bytes, tokens_of_one_sequence
from tests.config.models import FULL, GIB, MIXED, SMALL, WINDOWED


def engine(**changes: Any) -> EngineConfig:
    settings = {"max_model_len": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 512, **changes}
    return EngineConfig(model="m", name="m", **settings)


def rows(facts: ModelFacts, config: EngineConfig, available: int) -> dict[str, int]:
    return {row.name: row.bytes for row in size_memory(facts, config, available).rows}


def test_the_table_of_a_known_model() -> None:
    table = rows(FULL, engine(kv_cache_bytes=2 * GIB), 16 * GIB)
    assert list(table) == ["weights", "KV cache", "activations", "workspace", "runtime", "free"]
    repeated = 28 * 22 * 128  # the norms of q and k, once for every head
    scales = 4 * 28 * (4096 + 1024 + 6144 + 1024)  # of the layers' matrices, one for each column
    assert table["weights"] == 2 * (596_049_920 + repeated) + scales
    assert table["KV cache"] <= 2 * GIB < table["KV cache"] + 16 * 114_688
    assert table["workspace"] == 256 * 151_936 * 4
    assert sum(table.values()) == 16 * GIB


def test_float32_doubles_weights_and_a_token_of_kv() -> None:
    half, whole = engine(), engine(dtype="float32")
    scales = 4 * 28 * (4096 + 1024 + 6144 + 1024)
    assert rows(FULL, whole, 32 * GIB)["weights"] == 2 * (rows(FULL, half, 32 * GIB)["weights"] - scales)
    assert pool_bytes(FULL, whole, 1024) == 2 * pool_bytes(FULL, half, 1024)


def test_the_pool_by_default_is_what_can_be_used_or_half_of_what_is_left() -> None:
    little = size_memory(SMALL, engine(max_model_len=2048), 16 * GIB)
    assert little.kv_tokens == 64 * 2048
    much = rows(FULL, engine(), 8 * GIB)
    assert much["KV cache"] == pytest.approx(much["free"], abs=2 * 16 * 114_688)


def test_a_single_long_sequence_may_have_more_than_half() -> None:
    plan = size_memory(FULL, engine(max_model_len=40_960, max_num_seqs=1), 8 * GIB)
    assert plan.kv_tokens == 40_960


def test_block_0_of_each_group_comes_on_top() -> None:
    plan = size_memory(SMALL, engine(max_model_len=160, max_num_seqs=2), GIB)
    assert plan.num_blocks == (1 + 2 * 160 // 16,)
    assert plan.kv_bytes == 21 * 16 * 1536 * 2


def test_groups_with_a_window_hold_what_running_sequences_see() -> None:
    plan = size_memory(MIXED, engine(max_model_len=32_768, max_num_seqs=8), 16 * GIB)
    full, windowed = plan.num_blocks
    assert full == 1 + 8 * 32_768 // 16
    assert windowed == 1 + (8 * (512 + 32) + 512) // 16
    assert plan.kv_bytes == full * 16 * 4096 + windowed * 16 * 22_528


def test_a_window_above_the_whole_pool_is_cut_to_it() -> None:
    plan = size_memory(MIXED, engine(max_model_len=256, max_num_seqs=1), 16 * GIB)
    assert plan.num_blocks == (17, 17)


def test_a_model_of_windows_needs_no_room_for_its_whole_length() -> None:
    config = engine(max_model_len=32_768, max_num_seqs=1)
    assert tokens_of_one_sequence(WINDOWED, config) == 4096 + 32 + 512
    plan = size_memory(WINDOWED, replace(config, kv_cache_bytes=GIB), 16 * GIB)
    assert plan.num_blocks[0] * config.block_size < 32_768 == plan.kv_tokens


def remedy(facts: ModelFacts, config: EngineConfig, available: int) -> tuple[str, str]:
    with pytest.raises(DoesNotFit) as caught:
        size_memory(facts, config, available)
    message = str(caught.value)
    found = re.search(r"; set --([a-z-]+) (\S+)", message)
    assert found, message
    return found[1], found[2]


@pytest.mark.parametrize(
    ("changes", "gib", "setting"),
    [
        ({"max_model_len": 40_960}, 4, "max-model-len"),
        ({"max_model_len": 512, "max_num_batched_tokens": 131_072}, 4, "max-num-batched-tokens"),
        ({"max_model_len": 512, "max_num_seqs": 2048}, 4, "max-num-seqs"),
        ({"max_num_seqs": 100_000, "max_num_batched_tokens": 100_000}, 16, "max-num-seqs"),  # by default the same
        ({"max_num_seqs": 4096, "max_num_batched_tokens": 8192, "max_model_len": 512}, 7, "max-num-seqs"),
        ({"dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": 32, "max_num_seqs": 1}, 2.3, "dtype"),
        ({"max_model_len": 16, "max_num_batched_tokens": 32, "max_num_seqs": 1}, 1.3, "quantization"),
        ({"quantization": "int8", "max_model_len": 16, "max_num_batched_tokens": 16}, 0.95, "quantization"),
        ({"kv_cache_bytes": 100 << 20}, 16, "kv-cache-memory"),
        ({"kv_cache_bytes": 20 * GIB}, 16, "kv-cache-memory"),
    ],
)
def test_the_setting_named_makes_it_fit(changes: dict[str, Any], gib: float, setting: str) -> None:
    config, available = engine(**changes), int(gib * GIB)
    name, value = remedy(FULL, config, available)
    assert name == setting
    size_memory(FULL, applied(config, name, value), available)


def applied(config: EngineConfig, name: str, value: str) -> EngineConfig:
    if name == "kv-cache-memory":
        return replace(config, kv_cache_bytes=parse_bytes(value))
    if name == "max-num-seqs" and config.max_num_seqs == config.max_num_batched_tokens:
        return replace(config, max_num_seqs=int(value), max_num_batched_tokens=int(value))  # as by default
    return replace(config, **{name.replace("-", "_"): value if name in ("dtype", "quantization") else int(value)})


def test_where_no_setting_helps_it_says_so() -> None:
    with pytest.raises(DoesNotFit, match="no single setting makes it fit: use a smaller model"):
        size_memory(FULL, engine(), GIB)


def test_where_no_setting_alone_helps_several_do() -> None:
    config, available = engine(max_num_seqs=512, max_num_batched_tokens=8192), 2 * GIB
    with pytest.raises(DoesNotFit, match="no single setting makes it fit, but these together do: ") as refused:
        size_memory(FULL, config, available)
    for flag, value in re.findall(r"--([a-z-]+) (\d+)", str(refused.value).partition("together do: ")[2]):
        config = applied(config, flag, value)
    size_memory(FULL, config, available)


def test_a_refusal_for_good_names_the_memory_that_is_enough() -> None:
    with pytest.raises(DoesNotFit, match=r"it needs [\d.]+ GiB even with --max-model-len 1024, --max-num-seqs 4"):
        size_memory(FULL, engine(), GIB)


@given(
    facts=st.sampled_from([FULL, MIXED, WINDOWED, SMALL]),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    quantization=st.sampled_from(["none", "int8", "int4"]),
    length=st.integers(1, 40_960),
    seqs=st.integers(1, 512),
    tokens=st.integers(1, 8192),
    block=st.sampled_from([1, 8, 16, 128]),
    kv=st.none() | st.integers(1, 20 * GIB),
    available=st.integers(GIB // 4, 24 * GIB),
)
def test_a_plan_adds_up_and_holds_one_sequence_or_names_a_remedy_that_works(
    facts: ModelFacts,
    dtype: str,
    quantization: str,
    length: int,
    seqs: int,
    tokens: int,
    block: int,
    kv: int | None,
    available: int,
) -> None:
    config = engine(
        dtype=dtype,
        quantization=quantization,
        max_model_len=length,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        block_size=block,
        kv_cache_bytes=kv,
    )
    plan, refusal = None, ""
    try:
        plan = size_memory(facts, config, available)
    except DoesNotFit as error:
        refusal = str(error)
    if plan is None:
        found = re.search(r"; set --([a-z-]+) (\S+)", refusal)
        assert found or "no single setting" in refusal
        if found and kv is None:
            size_memory(facts, applied(config, found[1], found[2]), available)
        return
    assert sum(row.bytes for row in plan.rows) == available
    assert all(row.bytes >= 0 for row in plan.rows)
    assert plan.kv_tokens >= tokens_of_one_sequence(facts, config)
    assert plan.kv_tokens % block == 0
    assert plan.kv_bytes <= (kv or available)
    assert all(1 <= blocks - 1 <= plan.kv_tokens // block for blocks in plan.num_blocks)


@given(facts=st.sampled_from([FULL, MIXED, WINDOWED]), budget=st.integers(0, 8 * GIB))
def test_fit_tokens_is_the_most_that_fits(facts: ModelFacts, budget: int) -> None:
    config = engine(max_num_seqs=4)
    tokens = fit_tokens(facts, config, budget)
    assert tokens == 0 or pool_bytes(facts, config, tokens) <= budget
    if facts is not WINDOWED:  # whose pool stops growing with its windows
        assert pool_bytes(facts, config, tokens + config.block_size) > budget


def test_where_windows_bound_the_pool_all_that_runs_finds_room_in_it() -> None:
    config = engine(max_num_seqs=4, max_model_len=100_000)
    assert fit_tokens(WINDOWED, config, pool_bytes(WINDOWED, config, 10**9)) >= 4 * config.max_model_len
