"""Speculative decoding with a scripted proposer: however many drafts are right, tokens are those without drafts."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.kernels.batch_arrays import BATCH_ROW, DRAFTS, LENGTH, BatchRows, StepArrays
from penstock.kernels.flashinfer import FlashInferAttention
from penstock.messages import GenerateRequest, SamplingParams, TokenDelta
from penstock.runtime.runner import ModelRunner
from penstock.runtime.step_kernels import ReferenceStep
from penstock.schedule import Scheduler, SchedulerConfig
from tests.invariance.test_batch_invariance import requests
from tests.kernels.test_flashinfer import Wrappers
from tests.models.serving import Server, make_device_runner, make_runner, outputs
from tests.runtime.mirror_device import MirrorAttention
from tests.runtime.test_device_runner import answers

Checkpoint = Callable[..., Path]
DRAFTED = 3


class Knowing:
    """Proposes the known continuation of each prompt, and sometimes wrong tokens."""

    most = DRAFTED

    def __init__(self, texts: list[list[int]], right: float, vocab: int = 300) -> None:
        self._texts = texts
        self._right = right
        self._vocab = vocab
        self._random = random.Random(5)
        self.proposed = 0

    def propose(self, state: BatchRows, step: StepArrays, sequences: int) -> None:
        for unit in step.units[:, :sequences].T.tolist():
            row, drafts = unit[BATCH_ROW], unit[DRAFTS]
            if row < 0 or not drafts:
                continue
            known = int(state.computed[row]) + unit[LENGTH] - drafts
            tokens = state.token_ids[row, :known].tolist()
            text = next((text for text in self._texts if text[:known] == tokens), [])
            for i in range(drafts):
                ahead = text[known + i : known + i + 1]
                right = ahead and self._random.random() < self._right
                state.token_ids[row, known + i] = ahead[0] if right else self._random.randrange(self._vocab)
                self.proposed += 1


def drafting_server(runner: ModelRunner, **how: Any) -> Server:
    """A server whose plans grant drafts."""
    server = Server(runner, **how)
    config = SchedulerConfig(
        max_num_seqs=how.get("max_num_seqs", 16),
        max_num_batched_tokens=how.get("budget", 2048),
        max_model_len=256,
        enable_prefix_caching=how.get("caching", False),
        num_drafts=DRAFTED,
    )
    capacity = replace(
        runner.capacity,
        groups=tuple(replace(group, num_blocks=how.get("blocks", 512)) for group in runner.capacity.groups),
    )
    server.scheduler = Scheduler(config, capacity)
    return server


def asked() -> list[GenerateRequest]:
    """Greedy and drawn, with edits that depend on the outputs, stops and logprobs."""
    extras: tuple[dict[str, Any], ...] = (
        {},
        {"logprobs": 2},
        {"stop_token_ids": tuple(range(0, 300, 9))},
        {"repetition_penalty": 1.3, "min_tokens": 6, "stop_token_ids": tuple(range(0, 300, 5))},
        {"frequency_penalty": 0.5, "logprobs": 2},
        {"min_tokens": 9, "stop_token_ids": tuple(range(0, 300, 3))},
    )
    return [
        replace(each, sampling=replace(each.sampling, **extras[i % len(extras)]))
        for i, each in enumerate(requests("qwen3")[:12])
    ]


def texts(wanted: list[GenerateRequest], deltas: list[TokenDelta]) -> list[list[int]]:
    found = outputs(deltas)
    return [[*request.prompt_ids, *found[request.request_id, 0]] for request in wanted]


@pytest.mark.parametrize("variant", ["qwen3", "gemma3"])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("make", [make_runner, make_device_runner], ids=["depth 1", "depth 2"])
@pytest.mark.parametrize("how", [{}, {"budget": 160, "blocks": 14, "max_num_seqs": 12}], ids=["roomy", "preempted"])
def test_drafts_change_no_token(
    make: Callable[..., ModelRunner], right: float, variant: str, how: dict[str, Any], tiny_checkpoint: Checkpoint
) -> None:
    folder, wanted = tiny_checkpoint(variant), asked()
    plain = Server(make_runner(folder)).run(wanted)
    proposer = Knowing(texts(wanted, plain), right)
    server = drafting_server(make(folder, proposer=proposer), **how)
    deltas = server.run(wanted)
    got, want = answers(deltas), answers(plain)
    assert {key: each[:3] for key, each in got.items()} == {key: each[:3] for key, each in want.items()}
    for key, each in want.items():
        assert got[key].scores == pytest.approx(each.scores, abs=1e-4)
    assert proposer.proposed
    server.scheduler.check()
    steps = server.scheduler.stats().steps
    longest = max(len(each.tokens) for each in want.values())
    if not how:
        if right == 1.0:
            assert steps < longest, "several tokens are accepted in a step"
    elif right == 0.0:
        assert server.scheduler.stats().preemptions > 0


def test_a_token_that_stops_among_accepted_drafts_is_the_last(tiny_checkpoint: Checkpoint) -> None:
    folder = tiny_checkpoint("qwen3")
    sampling = SamplingParams(seed=0, max_tokens=24, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(request_id="1", prompt_ids=tuple(range(7, 20)), sampling=sampling)
    text = texts([request], Server(make_runner(folder)).run([request]))
    stop = text[0][13 + 6]
    first = text[0][13:].index(stop)
    stopped = replace(request, sampling=replace(sampling, stop_token_ids=(stop,)))
    for make in (make_runner, make_device_runner):
        server = drafting_server(make(folder, proposer=Knowing(text, 1.0)))
        (answer,) = answers(server.run([stopped])).values()
        assert answer.tokens == tuple(text[0][13 : 13 + first + 1]) and answer.reason == "stop"
        server.scheduler.check()


@pytest.mark.parametrize("most", [1, 3])
def test_a_plan_may_grant_more_drafts_than_are_proposed(most: int, tiny_checkpoint: Checkpoint) -> None:
    folder, wanted = tiny_checkpoint("qwen3"), asked()
    plain = Server(make_runner(folder)).run(wanted)
    proposer = Knowing(texts(wanted, plain), 0.7)
    proposer.most = most  # type: ignore[misc]
    got = answers(drafting_server(make_device_runner(folder, proposer=proposer)).run(wanted))
    assert {key: each[:3] for key, each in got.items()} == {key: each[:3] for key, each in answers(plain).items()}


def test_a_proposer_is_refused_where_positions_are_planned_on_the_host(tiny_checkpoint: Checkpoint) -> None:
    attention = FlashInferAttention(MirrorAttention(), Wrappers())
    with pytest.raises(ValueError, match="attention that reads positions on the device"):
        make_device_runner(
            tiny_checkpoint("qwen3"), attention=attention, step_kernels=ReferenceStep(), proposer=Knowing([], 1.0)
        )
