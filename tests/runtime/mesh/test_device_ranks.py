"""Ranks whose batch is on a device give the tokens of one rank: real processes, a real scheduler, fp32.

A MirrorDevice replaces the GPU and gloo replaces NCCL; everything else is what runs on GPUs. Near-ties are treated as
in test_parallel.py.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from penstock.config import Split
from penstock.messages import NewSequence, SamplingParams, StepPlan, StepResult, Work
from penstock.runtime.batch import ResidentBatch
from tests.models.serving import make_device_runner
from tests.often import rare
from tests.runtime.mesh.ranks import Processes
from tests.runtime.mesh.test_parallel import (
    BOTH,
    EXPERTS,
    PIPELINE,
    TENSOR,
    Served,
    compare,
    compare_drafted,
    compare_rows,
    requests,
    serve,
    start,
)

Checkpoint = Callable[..., Path]


@pytest.fixture(scope="module")
def one_rank(tiny_checkpoint: Checkpoint) -> Callable[[str], Served]:
    return cache(lambda variant: serve(make_device_runner(tiny_checkpoint(variant)), requests()))


@pytest.mark.parametrize(
    ("variant", "split", "settings"),
    [
        ("llama_bias", TENSOR, {}),
        ("qwen3", TENSOR, {"deterministic": True}),
        rare("mixtral_window", EXPERTS, {"enforce_eager": True}),
        ("qwen3", PIPELINE, {}),
        ("gemma3", BOTH, {}),
        ("qwen2_moe_normed", Split(2, 2, expert=True), {"enforce_eager": True}),
    ],
    ids=str,
)
def test_several_ranks_are_one(
    variant: str,
    split: Split,
    settings: dict[str, object],
    processes: Processes,
    one_rank: Callable[[str], Served],
    tiny_checkpoint: Checkpoint,
) -> None:
    expected = one_rank(variant)
    ranks = processes.load(tiny_checkpoint(variant), split, device=True, **settings)
    assert (ranks.capacity.depth, ranks.capacity.late_ids) == (2, split.pipeline == 1)

    cached = serve(ranks, requests("warm-"), requests(), caching=True)
    assert cached.hits > 16 * len(requests())
    compare(variant, expected, cached)

    in_chunks = serve(ranks, requests(), budget=64, blocks=17)
    assert in_chunks.preemptions > 0
    compare(variant, expected, in_chunks)


@pytest.mark.parametrize("split", [rare(TENSOR), rare(PIPELINE), BOTH], ids=str)
def test_drafts_change_no_token(split: Split, processes: Processes, tiny_checkpoint: Checkpoint) -> None:
    """Ranks of the last stage have the sampled tokens before the step ends, and so the drafts that were accepted. Other
    ranks learn of both with the next plan."""
    ranks = processes.load(tiny_checkpoint("qwen3"), split, device=True, speculation="suffix", num_speculative_tokens=7)
    assert ranks.capacity.depth == split.pipeline
    compare_drafted(ranks, serve(ranks, requests(output=50)), split, exact=False)


def test_plans_build_upon_tokens_that_nobody_has_seen(processes: Processes, tiny_checkpoint: Checkpoint) -> None:
    """Tensor ranks have two plans outstanding: the second one's tokens are sampled by the first."""
    folder = tiny_checkpoint("llama2")
    drawn = SamplingParams(seed=3, max_tokens=32, repetition_penalty=1.2, logprobs=1)
    first = StepPlan(1, (Work(1, 9, True), Work(2, 1, True)), (begun(1, 9, 1, drawn), begun(2, 1, 20)))
    rest = [StepPlan(2 + i, (Work(1, 1, True), Work(2, 1, True))) for i in range(5)]
    one = make_device_runner(folder)
    expected = [one.execute(plan) for plan in (first, *rest)]

    ranks = processes.load(folder, TENSOR, device=True)
    got: list[StepResult] = []
    ranks.submit(first)
    for plan in rest:
        ranks.submit(plan)
        got.append(ranks.result())
    got.append(ranks.result())
    for ours, theirs in zip(got, expected, strict=True):
        assert theirs is not None and ours.plan_id == theirs.plan_id
        for result, other in zip(ours.results, theirs.results, strict=True):
            assert (result.token_ids, result.error) == (other.token_ids, "")
            compare_rows(other.logprobs, result.logprobs, 1 if result.seq == 1 else None)


def begun(seq: int, count: int, first_block: int, sampling: SamplingParams | None = None) -> NewSequence:
    made = start(seq, tuple(range(5, 5 + count)), first_block)
    return made if sampling is None else msgspec.structs.replace(made, sampling=sampling)


def test_what_a_stage_learns_is_there_before_its_row_is_anothers() -> None:
    batch = ResidentBatch(1, 16, 4, 1, torch.device("cpu"), shared=False)

    def known() -> list[int]:
        change = batch.change()
        assert change is not None
        change.write([torch.from_numpy(array) for array in change.arrays])
        return batch.state.token_ids[0, :5].tolist()

    row, two = np.zeros(1, np.int64), np.full(1, 2)
    batch.add(NewSequence(1, (5, 6), 2, 0, ((1,),), SamplingParams(seed=0, max_tokens=4), 0))
    batch.advance(row, two, row + 1)
    assert known() == [5, 6, 0, 0, 0]
    batch.learn(1, (9,))
    batch.learn(7, (8,))  # whom nobody knows
    assert known() == [5, 6, 9, 0, 0]
    assert batch.change() is None
    batch.learn(1, (4,))
    batch.remove(1)
    batch.add(NewSequence(2, (7, 8, 1), 3, 0, ((1,),), SamplingParams(seed=0, max_tokens=4), 0))
    assert known()[:3] == [7, 8, 1]
