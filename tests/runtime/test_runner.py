"""The runner's contract: plans in, results out, and an error of one sequence does not affect others."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from penstock.messages import (
    BlockCopy,
    GenerateRequest,
    NewSequence,
    SamplingParams,
    SequenceResult,
    StepPlan,
    Work,
    unpack_rows,
)
from penstock.runtime.in_flight import HIDDEN_NOT_FINITE as NOT_FINITE
from penstock.runtime.runner import ModelRunner
from tests.checkpoints import tiny_model
from tests.models.serving import Server, make_device_runner, make_runner, outputs

Checkpoint = Callable[..., Path]
MakeRunner = Callable[..., ModelRunner]
GREEDY = SamplingParams(seed=0, max_tokens=32, temperature=0.0, ignore_eos=True)
BAD_TOKEN = 306


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.randrange(BAD_TOKEN) for _ in range(length))


def new(
    seq: int,
    tokens: tuple[int, ...],
    *,
    first_block: int,
    computed: int = 0,
    sampling: SamplingParams = GREEDY,
    num_prompt: int = 0,
) -> NewSequence:
    """A sequence in blocks of 4 from `first_block` on, for a model with one KV group."""
    blocks = (tuple(range(first_block, first_block + 16)),)
    return NewSequence(seq, tokens, num_prompt or len(tokens), computed, blocks, sampling, 0)


class Driver:
    """Numbers plans, and expects no error where results are asked for by `tokens`."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.plan_id = 0

    def step(self, *work: Work, **changes: object) -> tuple[SequenceResult, ...]:
        self.plan_id += 1
        result = self.runner.execute(StepPlan(self.plan_id, work, **changes))  # type: ignore[arg-type]
        answers = result.results
        assert result.plan_id == self.plan_id and [r.seq for r in answers] == [w.seq for w in work]
        return answers

    def tokens(self, seq: int, count: int) -> list[int]:
        """`count` decode steps."""
        decoded = []
        for _ in range(count):
            (result,) = self.step(Work(seq, 1, True))
            assert not result.error
            decoded += result.token_ids
        return decoded


@pytest.fixture(params=[make_runner, make_device_runner, partial(make_device_runner, enforce_eager=True)])
def make(request: pytest.FixtureRequest) -> MakeRunner:
    """Makes runners of one kind."""
    return request.param


@pytest.fixture
def driver(make: MakeRunner, tiny_checkpoint: Checkpoint) -> Driver:
    return Driver(make(tiny_checkpoint("llama2"), max_num_seqs=4, block_size=4))


def greedy(driver: Driver, tokens: tuple[int, ...], count: int) -> list[int]:
    """Runs the sequence alone, with one prefill, and removes it."""
    (first,) = driver.step(Work(99, len(tokens), True), new=(new(99, tokens, first_block=400),))
    decoded = [*first.token_ids, *driver.tokens(99, count - 1)]
    driver.step(gone=(99,))
    return decoded


def test_chunks_sample_at_the_last_token_only(driver: Driver) -> None:
    tokens = prompt(23)
    expected = greedy(driver, tokens, 5)
    (first,) = driver.step(Work(1, 9, False), new=(new(1, tokens, first_block=1),))
    assert first == SequenceResult(1)
    (second,) = driver.step(Work(1, 5, False))
    assert second == SequenceResult(1)
    (last,) = driver.step(Work(1, 9, True))
    assert [*last.token_ids, *driver.tokens(1, 4)] == expected


def test_resumed_from_the_middle(driver: Driver) -> None:
    tokens = prompt(11)
    expected = greedy(driver, tokens, 12)
    known = (*tokens, *expected[:5])
    (result,) = driver.step(Work(1, len(known), True), new=(new(1, known, first_block=1, num_prompt=11),))
    assert [*result.token_ids, *driver.tokens(1, 6)] == expected[5:]


def test_prefix_hit_and_copied_tail(driver: Driver) -> None:
    """A second sequence starts from the first's blocks: whole ones shared, the one it will write into copied."""
    tokens = prompt(14)
    expected = greedy(driver, tokens, 8)
    driver.step(Work(1, 14, True), new=(new(1, tokens, first_block=1),))
    driver.tokens(1, 3)
    table = (1, 2, 3, 40, 41, 42)
    fork = NewSequence(2, tokens, 14, 13, (table,), GREEDY, 1)
    (result,) = driver.step(Work(2, 1, True), new=(fork,), copies=(BlockCopy(0, 4, 40),))
    assert [*result.token_ids, *driver.tokens(2, 7)] == expected
    assert driver.tokens(1, 4) == expected[4:8]


def test_rows_and_blocks_are_used_again(driver: Driver) -> None:
    tokens = [prompt(9, seed) for seed in range(6)]
    expected = [greedy(driver, t, 3) for t in tokens]
    for i, t in enumerate(tokens):
        gone = (i - 1,) if i else ()
        (result,) = driver.step(Work(i, 9, True), new=(new(i, t, first_block=1),), gone=gone)
        assert [*result.token_ids, *driver.tokens(i, 2)] == expected[i]


@pytest.mark.parametrize("part", ["before the step", "after the step"])
def test_a_runner_that_forgets_goes_on_as_if_it_were_new(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """A step fails, as for lack of memory. No edit of its rows' logits is left for those that follow."""
    tokens = prompt(11)
    expected = greedy(driver, tokens, 12)
    banned = msgspec.structs.replace(GREEDY, logit_bias=dict.fromkeys(expected, -100.0), logprobs=3)
    runner = driver.runner
    (biased,) = driver.step(Work(1, 11, True), new=(new(1, tokens, first_block=1, sampling=banned),))
    assert biased.token_ids != tuple(expected[:1])
    jobs = runner._jobs
    with monkeypatch.context() as patched:
        run = jobs._run

        def fail(*given: object) -> None:
            if part == "after the step":
                run(*given)  # type: ignore[arg-type]
            raise MemoryError("no memory")

        patched.setattr(jobs, "_run", fail)
        with pytest.raises(MemoryError):
            # Its row is the one that the biased sequence leaves.
            driver.step(Work(2, 11, True), gone=(1,), new=(new(2, tokens, first_block=20),))
    runner.forget()
    (first,) = driver.step(Work(2, 11, True), new=(new(2, tokens, first_block=20),))
    assert [*first.token_ids, *driver.tokens(2, 11)] == expected
    (again,) = driver.step(Work(1, 11, True), new=(new(1, tokens, first_block=1, sampling=banned),))
    assert again == biased


def test_blocks_appended_as_a_sequence_grows(driver: Driver) -> None:
    tokens = prompt(7)
    expected = greedy(driver, tokens, 10)
    start = NewSequence(1, tokens, 7, 0, ((9, 5),), GREEDY, 0)
    (result,) = driver.step(Work(1, 7, True), new=(start,))
    got = [*result.token_ids, *driver.tokens(1, 1)]
    for block in (30, 2):
        (result,) = driver.step(Work(1, 1, True), blocks=((1, ((block,),)),))
        got += [*result.token_ids, *driver.tokens(1, 3)]
    assert got == expected


@pytest.mark.parametrize("block_size", [4, 16])  # torch's attention, and where there are native kernels theirs
@pytest.mark.parametrize("variant", ["qwen3", "gemma3", "gemma4_shared"])
def test_what_a_page_held_before_does_not_matter(
    variant: str, block_size: int, make: MakeRunner, tiny_checkpoint: Checkpoint
) -> None:
    requests = [
        GenerateRequest(request_id=str(n), prompt_ids=prompt(n, n), sampling=GREEDY, n=2) for n in (1, 6, 21, 40)
    ]
    expected = outputs(Server(make(tiny_checkpoint(variant), block_size=block_size)).run(requests))
    poisoned = make(tiny_checkpoint(variant), block_size=block_size)
    for pages in poisoned.pages.groups:
        pages[1:] = torch.nan
    assert outputs(Server(poisoned, budget=50).run(requests)) == expected


def poison(make: MakeRunner, tiny_checkpoint: Checkpoint) -> Driver:
    """A model whose embedding of BAD_TOKEN is NaN, and which never chooses it by itself."""

    def edit(parameters: dict[str, torch.Tensor]) -> None:
        parameters["embedding.weight"][BAD_TOKEN] = torch.nan
        parameters["head.weight"][BAD_TOKEN] = 0.0

    return Driver(make(tiny_checkpoint("llama2"), max_num_seqs=4, block_size=4, edit=edit))


def test_a_row_that_is_not_finite_fails_alone(make: MakeRunner, tiny_checkpoint: Checkpoint) -> None:
    driver = poison(make, tiny_checkpoint)
    good, bad = prompt(10), (*prompt(5), BAD_TOKEN)
    expected = greedy(driver, good, 6)
    results = driver.step(
        Work(1, 10, True), Work(2, 6, True), new=(new(1, good, first_block=1), new(2, bad, first_block=20))
    )
    assert results[1].error == NOT_FINITE and not results[1].token_ids
    got = [*results[0].token_ids]
    # An outstanding plan may go on with the failed one: it fails again, and the others do not notice.
    results = driver.step(Work(1, 1, True), Work(2, 1, True))
    assert results[1].error == NOT_FINITE
    got += [*results[0].token_ids, *driver.tokens(1, 2)]
    # Its blocks serve another.
    (result,) = driver.step(Work(3, 10, True), new=(new(3, good, first_block=20),), gone=(2,))
    assert [*result.token_ids, *driver.tokens(3, 5)] == expected
    assert [*got, *driver.tokens(1, 2)] == expected


def test_a_chunk_that_is_not_finite_fails_before_it_can_be_shared(
    make: MakeRunner, tiny_checkpoint: Checkpoint
) -> None:
    driver = poison(make, tiny_checkpoint)
    tokens = (BAD_TOKEN, *prompt(20))
    sampling = SamplingParams(seed=0, max_tokens=1, prompt_logprobs=2)
    (result,) = driver.step(Work(1, 8, False), new=(new(1, tokens, first_block=1, sampling=sampling),))
    assert result == SequenceResult(1, error=NOT_FINITE)


def test_sampling_parameters_that_fail_are_the_sequences_own(driver: Driver) -> None:
    impossible = SamplingParams(seed=0, max_tokens=4, temperature=0.0, logit_bias={999: 1.0})
    tokens = prompt(5)
    expected = greedy(driver, tokens, 2)
    results = driver.step(
        Work(1, 5, True),
        Work(2, 5, True),
        new=(new(1, tokens, first_block=1, sampling=impossible), new(2, tokens, first_block=20)),
    )
    assert "999" in results[0].error
    assert [*results[1].token_ids, *driver.tokens(2, 1)] == expected
    driver.step(gone=(1, 2))
    assert greedy(driver, tokens, 2) == expected


def test_a_ban_that_has_ended_leaves_nothing_behind(make: MakeRunner, tiny_checkpoint: Checkpoint) -> None:
    driver = Driver(make(tiny_checkpoint("llama2"), max_num_seqs=4))
    tokens = prompt(9)
    expected = greedy(driver, tokens, 12)
    later = tuple(set(expected[5:]) - set(expected[:5]))
    assert later
    sampling = SamplingParams(seed=0, max_tokens=32, temperature=0.0, min_tokens=5, stop_token_ids=later)
    (first,) = driver.step(Work(1, 9, True), new=(new(1, tokens, first_block=1, sampling=sampling),))
    assert [*first.token_ids, *driver.tokens(1, 11)] == expected


@pytest.mark.parametrize("chunk", [200, 33])
def test_prompt_logprobs(chunk: int, driver: Driver) -> None:
    tokens = prompt(150)
    sampling = SamplingParams(seed=0, max_tokens=1, temperature=0.0, prompt_logprobs=2, logprobs=1)
    start = NewSequence(1, tokens, 150, 0, (tuple(range(1, 40)),), sampling, 0)
    data, done = b"", 0
    while done < len(tokens):
        count = min(chunk, len(tokens) - done)
        (result,) = driver.step(Work(1, count, done + count == len(tokens)), new=() if done else (start,))
        data += result.prompt_logprobs
        done += count
    with torch.no_grad():
        expected = tiny_model("llama2")(torch.tensor([tokens])).logits[0].log_softmax(-1)
    rows = list(unpack_rows(data, 2))
    assert [row.token_id for row in rows] == list(tokens[1:])
    for row, logprobs in zip(rows, expected, strict=False):
        assert row.logprob == pytest.approx(logprobs[row.token_id].item(), abs=1e-4)
        assert [p for _, p in row.top] == pytest.approx(logprobs.topk(2).values.tolist(), abs=1e-4)
    (last,) = unpack_rows(result.logprobs, 1)
    assert last.token_id == result.token_ids[0] == expected[-1].argmax()


def test_contradictory_plans_are_refused(driver: Driver) -> None:
    start = new(1, prompt(6), first_block=1)
    with pytest.raises(RuntimeError, match="sequence 1, which is not known"):
        driver.step(Work(1, 1, True))
    driver.step(Work(1, 3, False), new=(start,))
    with pytest.raises(RuntimeError, match="sequence 1 is new"):
        driver.step(new=(start,))
    with pytest.raises(RuntimeError, match="3 tokens remain"):
        driver.step(Work(1, 4, False))
    with pytest.raises(RuntimeError, match="samples"):
        driver.step(Work(1, 2, True))
    driver.step(new=tuple(new(i, prompt(3), first_block=40) for i in (2, 3, 4)))
    with pytest.raises(RuntimeError, match="max_num_seqs=4"):
        driver.step(new=(new(5, prompt(3), first_block=40),))


def test_a_plan_of_more_tokens_than_a_step_can_have_is_refused(make: MakeRunner, tiny_checkpoint: Checkpoint) -> None:
    driver = Driver(make(tiny_checkpoint("llama2"), max_num_seqs=4, max_num_batched_tokens=8))
    start = new(1, prompt(9), first_block=1)
    with pytest.raises(RuntimeError, match="a plan has 9 tokens; a step has at most 8"):
        driver.step(Work(1, 9, True), new=(start,))


def test_timing_adds_up(driver: Driver) -> None:
    timing = driver.runner.execute(StepPlan(1, (Work(1, 6, True),), (new(1, prompt(6), first_block=1),))).timing
    assert timing.sample > 0 and timing.forward > 0 and timing.forward + timing.sample <= timing.total
