"""The ranks' specs are the model's: every value of every tensor is somewhere, once where sums would count it twice."""

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import RankPlace, Split
from penstock.config.split import part
from penstock.families import CannotSplit, LatentSpec, Parameter, check_split, model_facts, shard
from penstock.families.shard import stage_layers, tensor_sizes
from penstock.messages import Window
from tests.families.divisible import CONFIGS, spec_of

SPLITS = st.builds(Split, st.sampled_from([1, 2, 4]), st.integers(1, 5))


COLUMNS = ".key_up.weight"  # made of columns of a tensor whose other rows are another parameter


def values_of(parameter: Parameter) -> Counter[tuple[str, int, int, int]]:
    """(tensor, row, first column, columns) of every row read."""
    read: Counter[tuple[str, int, int, int]] = Counter()
    for source in parameter.sources:
        width = source.columns or prod(parameter.shape[1:])
        for row in range(source.first_row, source.end_row, source.step):
            read[source.name, row, source.first_column, width] += 1
    return read


@pytest.mark.parametrize("family", CONFIGS)
@given(split=SPLITS, expert=st.booleans())
@settings(max_examples=12)
def test_ranks_read_every_value_and_only_what_is_whole_everywhere_twice(
    family: str, split: Split, expert: bool
) -> None:
    spec = spec_of(family)
    split = replace(split, expert=expert and split.tensor > 1 and any(layer.moe for layer in spec.layers))
    read: Counter[tuple[str, int]] = Counter()
    for place in split.places:
        for parameter in shard(spec, place).parameters:
            if parameter.name.endswith(COLUMNS):
                continue
            for (name, row, _, width), times in values_of(parameter).items():  # rows of the parameter, as are columns
                assert times == 1
                read[name, row] += width
    vocabulary = {s.name for p in spec.parameters if p.kind == "vocabulary" for s in p.sources}
    for parameter in spec.parameters:
        name = parameter.name
        if name.endswith(COLUMNS):
            continue
        whole = ("norm", ".router.", ".shared.gate.", "embedding.positions.weight", ".output_scale.", ".choice.")
        whole += (".expert_scales.", ".query_down.", ".latent.", ".key_rope.")
        own = family == "cohere" and name.endswith(("q_norm.weight", "k_norm.weight"))  # each head's
        everywhere = any(part in name for part in whole) and not own
        copies = split.tensor if everywhere else 1
        for source in parameter.sources:
            twice = spec.tie_embeddings and split.pipeline > 1 and source.name in vocabulary
            for row in range(source.first_row, source.end_row, source.step):
                assert read[source.name, row] == prod(parameter.shape[1:]) * copies * (2 if twice else 1), name


@pytest.mark.parametrize("family", CONFIGS)
@given(split=SPLITS)
@settings(max_examples=12)
def test_a_ranks_layers_are_those_its_parameters_describe(family: str, split: Split) -> None:
    """Sizes in the layers and shapes of the parameters are changed separately: they must agree."""
    spec = spec_of(family)
    expert = split.tensor > 1 and any(layer.moe for layer in spec.layers)
    for place in replace(split, expert=expert).places:
        mine = shard(spec, place)
        shapes = {parameter.name: parameter.shape for parameter in mine.parameters}
        hidden = spec.hidden_size
        for i, layer in enumerate(mine.layers):
            attention = layer.attention
            if isinstance(attention, LatentSpec):
                heads, low = attention.num_heads, attention.query_rank or hidden
                assert shapes[f"layers.{i}.query.weight"] == (heads * attention.key_dim, low)
                assert shapes[f"layers.{i}.key_up.weight"] == (heads * attention.rank, attention.key_dim)
                assert shapes[f"layers.{i}.output.weight"] == (hidden, heads * attention.value_dim)
            else:
                width = attention.query_width
                assert shapes[f"layers.{i}.qkv.weight"] == (width + 2 * attention.kv_width, hidden)
                assert shapes[f"layers.{i}.output.weight"] == (hidden, width)
                assert (f"layers.{i}.output.bias" in shapes) == attention.output_bias
            if layer.moe is None:
                name, halves = ("gate_up", 2) if layer.gated else ("up", 1)
                assert shapes[f"layers.{i}.{name}.weight"] == (halves * layer.intermediate_size, hidden)
                assert shapes[f"layers.{i}.down.weight"] == (hidden, layer.intermediate_size)
            else:
                size, held = layer.moe.intermediate_size, layer.moe.held
                assert shapes[f"layers.{i}.router.weight"] == (layer.moe.num_experts, hidden)
                assert shapes[f"layers.{i}.experts.gate_up.weight"] == (held * 2 * size, hidden)
                assert shapes[f"layers.{i}.experts.down.weight"] == (held * hidden, size)
        assert sum(name.endswith(".output.weight") for name in shapes) == len(mine.layers)
        assert ("embedding.weight" in shapes) == place.first
        assert mine.has_head == ("norm.weight" in shapes) == place.last
        if place.last:
            assert mine.tie_embeddings != ("head.weight" in shapes)
        for name in {"embedding.weight", "head.weight"} & shapes.keys():
            assert shapes[name] == (mine.vocab_size, hidden)
        for parameter in mine.parameters:  # sources fill it without gaps
            starts = [source.start for source in parameter.sources]
            ends = [source.start + source.rows for source in parameter.sources]
            assert starts == [0, *ends[:-1]] and ends[-1] == parameter.shape[0]


@pytest.mark.parametrize("family", CONFIGS)
def test_one_rank_has_the_spec_itself(family: str) -> None:
    spec = spec_of(family)
    assert shard(spec, RankPlace()) is spec


def test_whole_experts_go_to_ranks_in_order() -> None:
    spec = spec_of("qwen3_moe")
    for place in Split(4, expert=True).places:
        mine = shard(spec, place)
        moe = mine.layers[0].moe
        assert moe is not None
        assert (moe.first_expert, moe.held, moe.num_experts) == (3 * place.rank, 3, 12)
        assert moe.intermediate_size == 40
        weight = next(p for p in mine.parameters if p.name == "layers.0.experts.down.weight")
        assert weight.experts == 3
        names = [f"model.layers.0.mlp.experts.{e}.down_proj.weight" for e in range(3 * place.rank, 3 * place.rank + 3)]
        assert [source.name for source in weight.sources] == names


def test_a_bias_that_follows_a_sum_is_added_once() -> None:
    first, second = (shard(spec_of("llama"), place) for place in Split(2).places)
    once = {"layers.0.output.bias", "layers.0.down.bias"}
    names = [{parameter.name for parameter in spec.parameters} for spec in (first, second)]
    assert once <= names[0] and not once & names[1]
    assert {"layers.0.qkv.bias", "layers.0.gate_up.bias"} <= names[0] & names[1]


def test_an_odd_vocabulary_is_divided_unevenly() -> None:
    parts = [shard(spec_of("qwen3"), place) for place in Split(4).places]
    assert [(spec.vocab_start, spec.vocab_size) for spec in parts] == [(0, 77), (77, 77), (154, 77), (231, 76)]
    assert {spec.vocabulary for spec in parts} == {307}


def test_stages_have_their_layers_and_all_kv_groups() -> None:
    spec = spec_of("gemma3", num_hidden_layers=4)  # the last layer alone sees everything
    stages = [shard(spec, place) for place in Split(1, 2).places]
    assert [len(stage.layers) for stage in stages] == [2, 2]
    assert {stage.windows for stage in stages} == {(Window(), Window(16))}
    kept = [[group.layers * group.page.block_bytes(1, 2) for group in model_facts(each).groups] for each in stages]
    assert [elements > 0 for elements, _ in kept] == [False, True]
    whole = [group.layers * group.page.block_bytes(1, 2) for group in model_facts(spec).groups]
    assert list(map(sum, zip(*kept, strict=True))) == whole


@given(st.integers(1, 200), st.integers(1, 40))
def test_parts_are_consecutive_and_as_even_as_can_be(total: int, parts: int) -> None:
    pieces = [part(total, parts, index) for index in range(parts)]
    assert [i for piece in pieces for i in piece] == list(range(total))
    sizes = [len(piece) for piece in pieces]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    assert [stage_layers(total, parts, index) for index in range(parts)] == pieces


@pytest.mark.parametrize(
    ("family", "split", "changes", "message"),
    [
        ("llama", Split(3), {}, "--tensor-parallel-size 3 does not divide the 4 KV heads: use 1, 2 or 4"),
        ("llama", Split(8), {}, "--tensor-parallel-size 8 does not divide the 4 KV heads: use 1, 2 or 4"),
        ("llama", Split(4), {"num_attention_heads": 4, "intermediate_size": 90}, "intermediate size of 90: use 1 or 2"),
        ("llama", Split(2), {"num_key_value_heads": 1}, "does not divide the 1 KV heads: use 1"),
        ("llama", Split(1, 6), {}, "--pipeline-parallel-size 6 is more than the 5 layers: use 1 to 5"),
        ("llama", Split(2, 1, True), {}, "a llama model has no experts: leave it out"),
        ("llama", Split(4), {"vocab_size": 3}, "is more than the 3 tokens of the vocabulary: use 1 or 2"),
        ("qwen3_moe", Split(4, 1, True), {"num_experts": 10}, "does not divide the 10 experts: use 1 or 2"),
        ("qwen3_moe", Split(1, 2, True), {}, "--tensor-parallel-size 1 has no ranks for --expert-parallel"),
        ("qwen3_moe", Split(4), {"moe_intermediate_size": 42}, "experts' intermediate size of 42: use 1 or 2"),
        ("qwen2_moe", Split(4), {"shared_expert_intermediate_size": 50}, "shared expert's intermediate size of 50"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_sizes_that_work(
    family: str, split: Split, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CannotSplit) as caught:
        shard(spec_of(family, **changes), split.places[0])
    assert message in str(caught.value)


def test_parts_of_rows_that_share_scales_are_whole_groups() -> None:
    spec = spec_of("llama")  # rows of 128 (output) and 96 (down) values
    check_split(spec, Split(2), group=16)
    with pytest.raises(CannotSplit, match=r"cuts rows of 96 values \(down\) into 48, which are no groups of 32: use 1"):
        check_split(spec, Split(2), group=32)
    check_split(spec, Split(), group=64)
    moe = spec_of("qwen3_moe")
    assert tensor_sizes(moe, expert=False, group=16) == [1]  # experts' rows of 40 values are cut
    assert tensor_sizes(moe, expert=True, group=16) == [1, 2, 4]  # and are not


@given(st.sampled_from(sorted(CONFIGS)), st.booleans(), st.sampled_from([1, 8, 16, 32]), st.integers(1, 9))
@settings(max_examples=12)
def test_sizes_that_are_said_to_work_do_and_no_others(family: str, expert: bool, group: int, size: int) -> None:
    spec = spec_of(family)
    expert = expert and size > 1 and any(layer.moe for layer in spec.layers)
    works = size in tensor_sizes(spec, expert, group)
    try:
        check_split(spec, Split(size, 1, expert), group)
    except CannotSplit:
        assert not works
    else:
        assert works


@pytest.mark.parametrize(("sizes", "message"), [((0, 1), "tensor_parallel_size=0"), ((1, -1), "pipeline_parallel_si")])
def test_no_ranks_are_no_split(sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Split(*sizes)


def test_ranks_are_numbered_stage_by_stage() -> None:
    places = Split(2, 3).places
    assert [(place.stage, place.tensor_rank) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [place.reports for place in places] == [False] * 4 + [True, False]
    with pytest.raises(ValueError, match="no rank 6 among 6: use 0 to 5"):
        RankPlace(Split(2, 3), 6)
