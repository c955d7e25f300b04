"""Plans are submitted by hand to a runner with two outstanding, on a MirrorDevice (see test_device_runner)."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.kernels.batch_arrays import ALL_BANNED, NOT_FINITE
from penstock.messages import (
    NewSequence,
    SamplingParams,
    SequenceResult,
    StepPlan,
    Work,
    unpack_rows,
)
from penstock.runtime.in_flight import HIDDEN_NOT_FINITE, STATUS_ERRORS
from penstock.runtime.runner import ModelRunner
from tests.models.serving import make_device_runner
from tests.runtime.test_runner import BAD_TOKEN, GREEDY, new, prompt

Checkpoint = Callable[..., Path]
DECODE = (Work(1, 1, True),)


class Ahead:
    """Submits plans to a runner before it takes the results of earlier ones."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.plan_id = 0

    def submit(self, *work: Work, **changes: Any) -> None:
        self.plan_id += 1
        self.runner.submit(StepPlan(self.plan_id, work, **changes))

    def result(self) -> tuple[SequenceResult, ...]:
        return self.runner.result().results

    def step(self, *work: Work, **changes: Any) -> tuple[SequenceResult, ...]:
        """Submits a plan and returns the result of the one before."""
        self.submit(*work, **changes)
        return self.result()

    def tokens(self, tokens: tuple[int, ...], count: int, **how: Any) -> list[int]:
        """Generates `count` tokens of one sequence alone, then removes it."""
        self.submit(Work(99, len(tokens), True), new=(new(99, tokens, first_block=400, **how),))
        found = [self.step(Work(99, 1, True)) for _ in range(count - 1)]
        found.append(self.result())
        self.submit(gone=(99,))
        assert self.result() == ()
        return [token for (result,) in found for token in result.token_ids]


def ids(*results: SequenceResult) -> list[int]:
    assert not any(result.error for result in results)
    return [token for result in results for token in result.token_ids]


@pytest.fixture
def ahead(tiny_checkpoint: Checkpoint) -> Ahead:
    return Ahead(make_device_runner(tiny_checkpoint("llama2"), max_num_seqs=4, block_size=4))


def test_two_plans_may_be_outstanding_and_no_more(ahead: Ahead) -> None:
    expected = ahead.tokens(prompt(9), 3)
    ahead.submit(Work(1, 9, True), new=(new(1, prompt(9), first_block=1),))
    ahead.submit(*DECODE)
    with pytest.raises(RuntimeError, match="one too many: 2 are outstanding"):
        ahead.submit(*DECODE)
    first, second, third = ahead.result(), ahead.step(*DECODE), ahead.result()
    assert ids(*first, *second, *third) == expected
    with pytest.raises(RuntimeError, match="no plan is outstanding"):
        ahead.result()


def test_a_row_is_anothers_while_a_plan_knows_it_as_its_former_sequences(tiny_checkpoint: Checkpoint) -> None:
    ahead = Ahead(make_device_runner(tiny_checkpoint("llama2"), max_num_seqs=1, block_size=4))
    drawn = SamplingParams(seed=5, max_tokens=32, repetition_penalty=1.3, logprobs=1, logit_bias={5: 1.0})
    one, other = prompt(9), prompt(14, seed=1)
    want = ahead.tokens(one, 2, sampling=drawn), ahead.tokens(other, 3)
    ahead.submit(Work(1, 9, True), new=(new(1, one, first_block=1, sampling=drawn),))
    first = ahead.step(*DECODE)
    second = ahead.step(Work(2, 14, True), new=(new(2, other, first_block=30),), gone=(1,))
    assert ids(*first, *second) == want[0]
    assert len(list(unpack_rows(second[0].logprobs, 1))) == 1
    (third,), (fourth,), (fifth,) = ahead.step(Work(2, 1, True)), ahead.step(Work(2, 1, True)), ahead.result()
    assert ids(third, fourth, fifth) == want[1]
    assert not third.logprobs


def poison(tiny_checkpoint: Checkpoint) -> Ahead:
    """A model whose embedding of BAD_TOKEN is NaN, and which never chooses it by itself."""

    def edit(parameters: dict[str, torch.Tensor]) -> None:
        parameters["embedding.weight"][BAD_TOKEN] = torch.nan
        parameters["head.weight"][BAD_TOKEN] = 0.0

    return Ahead(make_device_runner(tiny_checkpoint("llama2"), max_num_seqs=4, block_size=4, edit=edit))


@pytest.mark.parametrize(("length", "error"), [(5, HIDDEN_NOT_FINITE), (0, STATUS_ERRORS[NOT_FINITE])])
def test_who_fails_fails_in_the_next_plan_too_and_alone(length: int, error: str, tiny_checkpoint: Checkpoint) -> None:
    """Found over all tokens of a prompt, or, where every token computed samples, in the logits."""
    ahead = poison(tiny_checkpoint)
    good, bad = prompt(10), (*prompt(length), BAD_TOKEN)
    expected = ahead.tokens(good, 6)
    ahead.submit(Work(1, 10, True), new=(new(1, good, first_block=1),))
    first = ahead.step(Work(1, 1, True), Work(2, len(bad), True), new=(new(2, bad, first_block=20),))
    both = (Work(1, 1, True), Work(2, 1, True))
    second, failed = ahead.step(*both)
    assert failed == SequenceResult(2, error=error)
    # It is known by now, and another takes its place.
    third, still = ahead.step(*DECODE, Work(3, 10, True), new=(new(3, good, first_block=20),), gone=(2,))
    assert still == SequenceResult(2, error=error)
    fourth, other = ahead.step(Work(1, 1, True), Work(3, 1, True))
    assert ids(*first, second, third, fourth, ahead.result()[0]) == expected[:5]
    assert ids(other) == expected[:1]


def test_a_row_with_every_token_banned_says_so(ahead: Ahead) -> None:
    everything = SamplingParams(
        seed=0, max_tokens=9, min_tokens=3, stop_token_ids=tuple(range(BAD_TOKEN + 1)), logprobs=1
    )
    expected = ahead.tokens(prompt(6), 2)
    ahead.submit(
        Work(1, 6, True),
        Work(2, 6, True),
        new=(new(1, prompt(6), first_block=1), new(2, prompt(6), first_block=20, sampling=everything)),
    )
    (first, banned), (second,) = ahead.step(*DECODE), ahead.result()
    assert banned == SequenceResult(2, error=STATUS_ERRORS[ALL_BANNED])
    assert ids(first, second) == expected


def test_padding_writes_to_no_page(ahead: Ahead) -> None:
    """Three sequences in a graph of four: it writes only their pages, and nothing behind their tokens."""
    pages = ahead.runner.pages.groups[0]
    pages[:] = 77.0
    starts = {1: 1, 2: 30, 3: 60}
    ahead.submit(
        *(Work(seq, 6, True) for seq in starts),
        new=tuple(new(seq, prompt(6, seq), first_block=block) for seq, block in starts.items()),
    )
    decode = tuple(Work(seq, 1, True) for seq in starts)
    for _ in range(4):
        ahead.step(*decode)
    ahead.result()
    written = {block + i for block in starts.values() for i in range(3)}
    untouched = [block for block in range(len(pages)) if block not in written]
    assert (pages[untouched] == 77.0).all()
    for block in starts.values():
        assert (pages[block : block + 2] != 77.0).all()
        assert (pages[block + 2, ..., :2, :] != 77.0).all() and (pages[block + 2, ..., 2:, :] == 77.0).all()


def test_while_the_same_rows_decode_nothing_is_sent_but_new_blocks(ahead: Ahead) -> None:
    runner = ahead.runner
    drawn = SamplingParams(seed=1, max_tokens=99, top_p=0.9, repetition_penalty=1.2, logprobs=1)
    starts = [
        NewSequence(seq, prompt(4, seq), 4, 0, ((10 * seq, 10 * seq + 1),), sampling, 0)
        for seq, sampling in ((1, GREEDY), (2, drawn))
    ]
    ahead.submit(Work(1, 4, True), Work(2, 4, True), new=tuple(starts))
    decode = Work(1, 1, True), Work(2, 1, True)
    ahead.step(*decode)
    sent = runner.bytes_sent
    for _ in range(3):
        ahead.step(*decode)
    assert runner.bytes_sent == sent
    ahead.step(*decode, blocks=((1, ((12,),)), (2, ((22,),))))
    of_blocks = runner.bytes_sent - sent
    assert 0 < of_blocks < 100
    for _ in range(3):
        ahead.step(*decode)
    assert runner.bytes_sent == sent + of_blocks
    ahead.step(decode[1], gone=(1,))
    assert runner.bytes_sent > sent + of_blocks


def test_capturing_shows_how_far_it_is(tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_device_runner(tiny_checkpoint("llama2"), max_num_seqs=4, capture=False)
    for terminal, progress, shown in ((True, True, True), (False, True, False), (True, False, False)):
        said = io.StringIO()
        monkeypatch.setattr(said, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setattr(sys, "stderr", said)
        runner.capture(progress)
        assert ("capturing CUDA graphs" in said.getvalue()) == shown


@pytest.mark.parametrize("extra", [{}, {"logprobs": 1}, {"logit_bias": {5: 1.0}}], ids=str)
def test_every_rank_of_a_stage_would_broadcast_as_many_tokens(extra: dict[str, Any], ahead: Ahead) -> None:
    """Three sequences in a graph of four: a rank that only replays takes part with padding, whatever a row asks for."""
    lengths: list[int] = []

    class Stage:
        broadcasts_tokens = True

        def broadcast(self, tokens: torch.Tensor) -> None:
            lengths.append(len(tokens))

        def send(self, states: torch.Tensor) -> None: ...

        def receive(self, states: torch.Tensor) -> None: ...

    ahead.runner._eager._mesh = Stage()  # type: ignore[assignment]
    asking = SamplingParams(seed=1, max_tokens=99, **extra)
    starts = [(1, GREEDY), (2, asking), (3, GREEDY)]
    ahead.submit(
        *(Work(seq, 6, True) for seq, _ in starts),
        new=tuple(new(seq, prompt(6, seq), first_block=30 * seq, sampling=sampling) for seq, sampling in starts),
    )
    decode = tuple(Work(seq, 1, True) for seq, _ in starts)
    for _ in range(3):
        ahead.step(*decode)
    ahead.result()
    assert lengths == [3, 4, 4, 4]
