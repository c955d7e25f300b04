"""A model over several ranks gives the tokens of one rank: real processes over gloo, a real scheduler, fp32.

Tensor ranks add parts of a sum, so logits may differ from one rank's in the last bits: where tokens differ, the two
best candidates must be within 1e-4. Pipeline stages give the bits of one rank.
"""

from collections.abc import Callable
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.config import EngineConfig, RankPlace, Split
from penstock.families import load_spec, shard
from penstock.families.traffic import step_traffic
from penstock.kernels import Needs, detect_platform, select_kernels
from penstock.kernels.native.loader import instruction_sets
from penstock.messages import (
    GenerateRequest,
    NewSequence,
    SamplingParams,
    SequenceResult,
    StepPlan,
    StepResult,
    Work,
    unpack_rows,
)
from penstock.runtime.device import HostDevice
from penstock.runtime.in_flight import HIDDEN_NOT_FINITE
from penstock.runtime.mesh.mesh import Mesh
from penstock.runtime.pages import KVPages
from penstock.runtime.runner import ModelRunner
from penstock.weights.load import load_parameters
from tests.invariance.test_batch_invariance import Judge
from tests.models.serving import Server, make_runner, outputs
from tests.often import rare
from tests.runtime.mesh.ranks import Processes, RanksRunner
from tests.schedule.invariants import check_scheduler

Checkpoint = Callable[..., Path]
OUTPUT = 20
SHARED = tuple(range(5, 38))  # two blocks and a token that several prompts begin with
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "logprobs": 0},
    {"temperature": 0.0, "logprobs": 4, "prompt_logprobs": 2},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 40, "repetition_penalty": 1.1},
    {"temperature": 0.7, "min_p": 0.02, "presence_penalty": 0.3, "prompt_logprobs": 0},
]
NEAR = 1e-4
BAD_TOKEN = 306


def requests(prefix: str = "", output: int = OUTPUT) -> list[GenerateRequest]:
    made = []
    for i, length in enumerate((1, 9, 30, 64, 17, 40, 2, 33)):
        tokens = tuple(int(t) for t in np.random.default_rng(i).integers(0, BAD_TOKEN, length))
        sampling = SamplingParams(seed=i, max_tokens=output, ignore_eos=True, **WAYS[i % len(WAYS)])
        prompt = (*SHARED, *tokens) if i % 2 else tokens
        made.append(GenerateRequest(request_id=f"{prefix}{i}", prompt_ids=prompt, sampling=sampling))
    return made


class Served(NamedTuple):
    """The results of a wave of requests, by request."""

    tokens: dict[str, list[int]]
    prompts: dict[str, bytes]  # logprobs of the prompt's tokens,
    outputs: dict[str, bytes]  # and of those generated
    hits: int
    preemptions: int
    accepted: int  # drafts


def serve(runner: Any, *waves: list[GenerateRequest], **limits: Any) -> Served:
    """Runs waves one after another and returns the results of the last."""
    server = Server(runner, **limits)
    for wave in waves:
        deltas = server.run(wave)
    check_scheduler(server.scheduler)
    stats = server.scheduler.stats()
    runner.execute(StepPlan(0, (), gone=tuple(range(1000))))  # whoever schedules next begins anew
    tokens = {request: ids for (request, _), ids in outputs(deltas).items()}
    prompts, rows = (
        {request: b"".join(getattr(d, name) for d in deltas if d.request_id == request) for request in tokens}
        for name in ("prompt_logprobs", "logprobs")
    )
    return Served(tokens, prompts, rows, stats.prefix_hits, stats.preemptions, stats.accepted_tokens)


def compare(variant: str, expected: Served, got: Served) -> None:
    """Tokens are the same up to a near-tie, and logprobs as close."""
    for request in requests():
        name, sampling = request.request_id, request.sampling
        right, ours = expected.tokens[name], got.tokens[name]
        assert len(right) == len(ours) == OUTPUT
        part = next((i for i in range(OUTPUT) if right[i] != ours[i]), None)
        compare_rows(expected.prompts[name], got.prompts[name], sampling.prompt_logprobs)
        if part is None:
            compare_rows(expected.outputs[name], got.outputs[name], sampling.logprobs)
        else:
            assert Judge(variant).near_tie(request, right[:part]), f"request {name} parts at output {part}"


def compare_rows(expected: bytes, got: bytes, k: int | None) -> None:
    for right, ours in zip(unpack_rows(expected, k or 0), unpack_rows(got, k or 0), strict=True):
        assert ours.token_id == right.token_id
        assert ours.logprob == pytest.approx(right.logprob, abs=NEAR)
        assert [value for _, value in ours.top] == pytest.approx([value for _, value in right.top], abs=NEAR)


@pytest.fixture(scope="module")
def one_rank(tiny_checkpoint: Checkpoint) -> Callable[[str], Served]:
    """The results of one rank, with native kernels if available."""
    return cache(lambda variant: serve(make_runner(tiny_checkpoint(variant)), requests()))


TENSOR, PIPELINE, BOTH, EXPERTS = Split(2, 1), Split(1, 2), Split(2, 2), Split(2, 1, expert=True)


@pytest.mark.parametrize(
    ("variant", "split", "kernels", "link"),
    [
        ("llama_bias", TENSOR, "native", "memory"),
        rare("llama2", TENSOR, "torch", "gloo"),
        ("llama2", PIPELINE, "native", "gloo"),
        rare("llama2", BOTH, "native", "gloo"),
        ("qwen3", TENSOR, "native", "gloo"),
        ("qwen3", PIPELINE, "native", "memory"),  # the head is tied, and a copy on the last stage
        rare("qwen3", BOTH, "native", "gloo"),
        rare("gemma3", TENSOR, "native", "gloo"),
        ("gemma3", PIPELINE, "native", "gloo"),  # the first stage has none of a KV group's layers
        ("gemma3", BOTH, "native", "memory"),
        ("qwen2_moe", TENSOR, "native", "gloo"),  # a shared expert
        rare("qwen3_moe", PIPELINE, "torch", "memory"),
        ("qwen2_moe_normed", EXPERTS, "native", "gloo"),  # experts of both ranks, and half a shared one
        ("mixtral_window", EXPERTS, "torch", "memory"),
        ("mixtral_window", Split(2, 2, expert=True), "native", "memory"),
        ("deepseek_v3", TENSOR, "native", "memory"),  # latents on both ranks, heads divided
        rare("deepseek_v3", PIPELINE, "native", "gloo"),
        rare("gpt_oss", TENSOR, "native", "memory"),  # sinks are divided
        rare("gemma4_separate", TENSOR, "native", "gloo"),  # two kinds of pages
    ],
    ids=str,
)
def test_several_ranks_are_one(
    variant: str,
    split: Split,
    kernels: str,
    link: str,
    processes: Processes,
    one_rank: Callable[[str], Served],
    tiny_checkpoint: Checkpoint,
) -> None:
    expected = one_rank(variant)
    ranks = processes.load(tiny_checkpoint(variant), split, native=kernels == "native", share=link == "memory")

    chunked = serve(ranks, requests(), budget=40)
    compare(variant, expected, chunked)

    cached = serve(ranks, requests("warm-"), requests(), caching=True)
    assert cached.hits > 16 * len(requests())
    compare(variant, expected, cached)

    preempted = serve(ranks, requests(), blocks=16)
    assert preempted.preemptions > 0
    compare(variant, expected, preempted)

    if kernels == "native" and instruction_sets():  # torch's products are not of the same bits for any number of rows
        assert chunked[:3] == cached[:3] == preempted[:3]
        if split.tensor == 1:
            assert chunked[:3] == expected[:3]


@pytest.mark.skipif(not instruction_sets(), reason="torch's products are not of the same bits for any number of rows")
@pytest.mark.parametrize(
    ("variant", "split"),
    [
        ("qwen3", TENSOR),
        rare("gemma3", TENSOR),
        ("qwen2_moe_normed", EXPERTS),
        ("qwen3", PIPELINE),
        rare("gemma3", PIPELINE),
        ("qwen3", BOTH),
    ],
    ids=str,
)
def test_drafts_change_no_token_on_several_ranks(
    variant: str, split: Split, processes: Processes, tiny_checkpoint: Checkpoint
) -> None:
    ranks = processes.load(tiny_checkpoint(variant), split, speculation="suffix", num_speculative_tokens=7)
    compare_drafted(ranks, serve(ranks, requests(output=50)), split)


def compare_drafted(ranks: RanksRunner, plain: Served, split: Split, *, exact: bool = True) -> None:
    """Greedy and sampled, with preemption. Every seventh draft is wrong, so ranks learn of some of a step's drafts that
    they were accepted and of others that they were not. In a pipeline only a sequence that runs alone has drafts."""
    guessed = [
        replace(each, prediction_ids=tuple(t ^ (i % 7 == 6) for i, t in enumerate(plain.tokens[each.request_id])))
        for each in requests(output=50)
    ]
    roomy: dict[str, int] = {} if split.pipeline == 1 else {"max_num_seqs": 1}
    scarce = {"budget": 40, "blocks": 24} if split.pipeline == 1 else {"max_num_seqs": 2, "blocks": 11}
    for limits in (roomy, scarce):
        drafted = serve(ranks, guessed, speculation="suffix", drafts=7, **limits)
        assert drafted.tokens == plain.tokens
        assert not exact or drafted[:3] == plain[:3]
        assert drafted.accepted > 5 * len(guessed) and (drafted.preemptions or limits is roomy)
    assert not plain.accepted


@pytest.fixture(scope="module")
def poisoned(tiny_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose logits after BAD_TOKEN are NaN, and which never chooses that token."""
    folder = tmp_path_factory.mktemp("poisoned")
    for file in tiny_checkpoint("llama2").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][BAD_TOKEN] = np.nan
    tensors["lm_head.weight"][BAD_TOKEN] = 0.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def start(seq: int, tokens: tuple[int, ...], first_block: int, **sampling: Any) -> NewSequence:
    parameters = SamplingParams(seed=0, max_tokens=32, temperature=0.0, **sampling)
    return NewSequence(seq, tokens, len(tokens), 0, (tuple(range(first_block, first_block + 8)),), parameters, 0)


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("split", [TENSOR, PIPELINE, BOTH], ids=str)
def test_a_failed_sequence_fails_alone_on_all_ranks(
    split: Split, device: bool, processes: Processes, poisoned: Path
) -> None:
    """Its embedding is the second tensor rank's. Only the rank that reports knows of a failure while the next plan is
    under way: all compute the same still."""
    good, bad = tuple(range(20, 60)), (*range(30, 40), BAD_TOKEN, *range(50, 70))
    alone = make_runner(poisoned)
    alone.execute(StepPlan(1, (Work(1, 40, True),), (start(1, good, 1),)))
    expected = [alone.execute(StepPlan(n, (Work(1, 1, True),))).results[0].token_ids for n in (2, 3)]

    ranks = processes.load(poisoned, split, device=device)
    new = (start(1, good, 1), start(2, bad, 20, prompt_logprobs=1), start(3, good, 40, logit_bias={999: 1.0}))
    ranks.submit(StepPlan(1, (Work(1, 25, False), Work(2, 16, False), Work(3, 9, False)), new))
    ranks.submit(StepPlan(2, (Work(2, 8, False), Work(3, 31, True), Work(1, 15, True))))
    first, second = ranks.result(), ranks.result()
    assert first.results[0] == SequenceResult(1)
    assert first.results[1] == SequenceResult(2, error=HIDDEN_NOT_FINITE) == second.results[0]
    assert "999" in first.results[2].error and first.results[2] == second.results[1]
    assert not second.results[2].error
    third = ranks.execute(StepPlan(3, (Work(2, 7, True), Work(3, 1, True), Work(1, 1, True))))
    assert third.results == (*second.results[:2], SequenceResult(1, expected[0]))
    fourth = ranks.execute(StepPlan(4, (Work(1, 1, True),), gone=(2, 3)))
    assert fourth.results == (SequenceResult(1, expected[1]),)


class NextStage:
    """Replaces a mesh: drops what is sent."""

    place = RankPlace(PIPELINE, 0)
    broadcasts_tokens = False

    def send(self, x: Tensor) -> None:
        pass


def test_what_a_rank_has_to_learn(tiny_checkpoint: Checkpoint) -> None:
    folder = tiny_checkpoint("llama2")
    spec, config = load_spec(folder), EngineConfig(model=str(folder), name="tiny", dtype="float32", max_num_seqs=4)
    part_of_it = shard(spec, NextStage.place)
    parameters = load_parameters(folder, part_of_it, torch.float32, whole=spec, progress=False)
    kernels = select_kernels(detect_platform(), Needs(torch.float32, 16, (16,)))
    pages = KVPages(part_of_it, (64,), config.block_size, torch.float32)
    mesh = cast(Mesh, NextStage())
    runner = ModelRunner(part_of_it, parameters, kernels, config, pages, HostDevice(), mesh=mesh)

    def step(plan_id: int, *work: Work, **changes: Any) -> None:
        assert runner.execute(StepPlan(plan_id, work, **changes)) is None

    step(1, Work(1, 3, True), Work(2, 3, True), new=(start(1, (1, 2, 3), 1), start(2, (4, 5, 6), 10)))
    with pytest.raises(RuntimeError, match="builds upon a token of sequence 1 that this rank did not learn"):
        step(2, Work(1, 1, True))
    step(2, gone=(2,))
    runner.learn(StepResult(1, (SequenceResult(1, (7,)), SequenceResult(2, (8,)))))  # nothing is left of the second
    step(3, Work(1, 1, True))
    runner.learn(StepResult(3, (SequenceResult(1, error="it failed"),)))
    step(4, Work(1, 1, True))  # planned before it failed: passed over, as there is no token to begin with


def test_stages_take_plans_while_others_are_under_way(processes: Processes, tiny_checkpoint: Checkpoint) -> None:
    """Each sequence's next token is planned when its last is known, and another's plan is under way meanwhile."""
    tokens = [tuple(range(20 * i, 20 * i + 30)) for i in range(2)]
    alone = make_runner(tiny_checkpoint("qwen3"))
    expected = []
    for i, ids in enumerate(tokens):
        new = (start(i, ids, 1 + 10 * i),)
        expected.append([alone.execute(StepPlan(0, (Work(i, 30, True),), new)).results])
        work = (Work(i, 1, True),)
        expected[i] += [alone.execute(StepPlan(0, work)).results for _ in range(6)]

    ranks = processes.load(tiny_checkpoint("qwen3"), BOTH)
    got: list[list[Any]] = [[], []]
    for i, ids in enumerate(tokens):
        ranks.submit(StepPlan(1 + i, (Work(i, 30, True),), (start(i, ids, 1 + 10 * i),)))
    for step in range(12):
        got[step % 2].append(ranks.result().results)
        ranks.submit(StepPlan(3 + step, (Work(step % 2, 1, True),)))
    assert [got[i] == expected[i][:6] for i in range(2)] == [True, True]
    assert [ranks.result().results for _ in range(2)] == [expected[0][6], expected[1][6]]


@pytest.mark.parametrize(
    ("variant", "split"),
    [
        ("llama2", TENSOR),
        ("llama2", PIPELINE),
        ("llama2", BOTH),
        ("gemma3", BOTH),
        ("qwen2_moe", TENSOR),
        ("mixtral_window", Split(2, 2, True)),
    ],
    ids=str,
)
def test_bytes_handed_over_are_those_planned(
    variant: str, split: Split, processes: Processes, tiny_checkpoint: Checkpoint
) -> None:
    folder = tiny_checkpoint(variant)
    spec, ranks = load_spec(folder), processes.load(folder, split)
    ranks.execute(StepPlan(0, ()))
    new = start(1, tuple(range(30)), 1), start(2, SHARED, 10)
    steps = [
        (StepPlan(1, (Work(1, 30, True), Work(2, 9, False)), new), 39, 1),  # and its tokens, and those followed by one
        (StepPlan(2, (Work(1, 1, True),)), 1, 1),
    ]
    for plan, tokens, sampled in steps:
        before = list(ranks.traffic)
        ranks.execute(plan)
        for place, now, then in zip(split.places, ranks.traffic, before, strict=True):
            moved = tuple(a - b for a, b in zip(now, then, strict=True))
            assert moved == astuple(step_traffic(spec, place, tokens, sampled, 4))
