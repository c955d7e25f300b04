"""A runner on a device with two plans outstanding gives the tokens of a CPU runner with one.

The device is a MirrorDevice, which runs nothing before a result is requested: no plan can depend on a result that the
host has not taken.
"""

import io
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace

from penstock.config import EngineConfig
from penstock.kernels.batch_arrays import ALL_BANNED, NOT_FINITE
from penstock.messages import (
    GenerateRequest,
    NewSequence,
    SamplingParams,
    SequenceResult,
    StepPlan,
    TokenDelta,
    Work,
    unpack_rows,
)
from penstock.runtime.in_flight import HIDDEN_NOT_FINITE, STATUS_ERRORS
from penstock.runtime.runner import ModelRunner
from tests.invariance.test_batch_invariance import renamed, requests
from tests.models.serving import Server, make_device_runner, make_runner
from tests.runtime.test_runner import BAD_TOKEN, GREEDY, new, prompt

Checkpoint = Callable[..., Path]
DECODE = (Work(1, 1, True),)


class Answer(NamedTuple):
    """One choice, as a client has it."""

    tokens: tuple[int, ...]
    reason: str | None
    error: str
    scores: list[float]  # of its tokens and the best beside each, and of the prompt's


def answers(deltas: Iterable[TokenDelta], logprobs: int = 2, prompt_logprobs: int = 1) -> dict[tuple[str, int], Answer]:
    """Returns the choices by (request id, choice)."""
    given: dict[tuple[str, int], Answer] = {}
    for delta in deltas:
        key = delta.request_id, delta.choice
        had = given.get(key, Answer((), None, "", []))
        rows = [*unpack_rows(delta.logprobs, logprobs), *unpack_rows(delta.prompt_logprobs, prompt_logprobs)]
        scores = [number for row in rows for number in (row.logprob, *(value for _, value in row.top))]
        given[key] = Answer((*had.tokens, *delta.token_ids), delta.finish_reason, delta.error, had.scores + scores)
    return given


def assert_same(got: Iterable[TokenDelta], want: Iterable[TokenDelta]) -> None:
    ours, theirs = answers(got), answers(want)
    assert ours.keys() == theirs.keys()
    for key, answer in theirs.items():
        assert ours[key][:3] == answer[:3], key
        assert ours[key].scores == pytest.approx(answer.scores, abs=1e-4)
    assert all(answer.reason for answer in theirs.values())


def wave() -> list[GenerateRequest]:
    """Greedy and drawn in every way, with edits, stops, logprobs, prompt logprobs and several choices."""
    extras: tuple[dict[str, Any], ...] = (
        {},
        {"logprobs": 2},
        {"stop_token_ids": tuple(range(0, 300, 9))},
        {"stop_token_ids": tuple(range(0, 300, 5)), "min_tokens": 6, "logprobs": 2},
        {"prompt_logprobs": 1, "logit_bias": {7: 2.0, 11: -3.0}},
        {"repetition_penalty": 1.3, "min_tokens": 3, "stop_token_ids": tuple(range(0, 300, 4))},
        {"max_tokens": 1},
        {"frequency_penalty": 0.5, "logit_bias": dict.fromkeys(range(20, 29), 1.5), "logprobs": 2},
    )
    made = []
    for i, each in enumerate(requests("qwen3")[:16]):
        sampling = replace(each.sampling, **extras[(i + i // 8) % len(extras)])
        made.append(replace(each, sampling=sampling, n=2 if i % 7 == 3 else 1))
    return made


SCENARIOS: dict[str, dict[str, Any]] = {
    "together": {},
    "in chunks": {"budget": 24},
    "preempted": {"blocks": 13},
    "from the cache": {"caching": True, "blocks": 100, "budget": 60},
    "one": {"max_num_seqs": 1, "budget": 8},
}


CASES = [
    *(("qwen3", False, scenario) for scenario in SCENARIOS),
    *(("gemma3", False, scenario) for scenario in ("in chunks", "preempted", "from the cache")),
    *(("qwen3", True, scenario) for scenario in ("together", "preempted")),
]


@pytest.mark.parametrize(("variant", "eager", "scenario"), CASES)
def test_tokens_are_those_of_one_plan_at_a_time(
    variant: str, eager: bool, scenario: str, tiny_checkpoint: Checkpoint
) -> None:
    folder, how = tiny_checkpoint(variant), SCENARIOS[scenario]
    asked = wave()
    plain, device = make_runner(folder), make_device_runner(folder, enforce_eager=eager)
    assert (plain.capacity.depth, device.capacity.depth) == (1, 2)
    one, two = Server(plain, **how), Server(device, **how)
    assert_same(two.run(asked), one.run(asked))
    if scenario == "preempted":
        assert one.scheduler.stats().preemptions > 0 and two.scheduler.stats().preemptions > 0
    if scenario == "from the cache":
        again = renamed(asked, "again-")
        assert_same(two.run(again), one.run(again))
        assert two.scheduler.stats().prefix_hits > 0
    two.scheduler.check()


# -- one plan behind another, by hand -------------------------------------------------------------------------------


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


# -- under a scheduler ----------------------------------------------------------------------------------------------


def test_a_stop_is_seen_one_step_late_and_its_token_dropped(tiny_checkpoint: Checkpoint) -> None:
    folder = tiny_checkpoint("qwen3")
    asked = [
        replace(each, sampling=replace(each.sampling, stop_token_ids=tuple(range(0, 300, 6))))
        for each in requests("qwen3")[:8]
    ]
    expected = answers(Server(make_runner(folder)).run(asked))
    stopped = {key[0] for key, answer in expected.items() if answer.reason == "stop"}
    runner = make_device_runner(folder)
    server = Server(runner)
    sampled: dict[int, int] = {}
    submit = runner.submit

    def counted(plan: StepPlan) -> None:
        for work in plan.work:
            sampled[work.seq] = sampled.get(work.seq, 0) + work.sample
        submit(plan)

    runner.submit = counted  # type: ignore[method-assign]
    got = answers(server.run(asked))
    assert got == expected and stopped
    for seq, request in enumerate(asked, 1):  # sequences are numbered as requests come
        late = request.request_id in stopped
        assert sampled[seq] - len(got[request.request_id, 0].tokens) == late


@pytest.mark.parametrize("when", [1, 2, 3, 7])
def test_an_abort_with_plans_outstanding_touches_nobody_else(when: int, tiny_checkpoint: Checkpoint) -> None:
    folder = tiny_checkpoint("qwen3")
    asked = requests("qwen3")[:6]
    expected = answers(Server(make_runner(folder), blocks=40).run(asked))
    server = Server(make_device_runner(folder), blocks=40, max_num_seqs=4)
    for request in asked:
        server.scheduler.add(request, 0.0)
    deltas: list[TokenDelta] = []
    for _ in range(when):
        deltas += server.step() or []
    plan = server.scheduler.plan(0.0)
    if plan is not None:
        server.runner.submit(server.scattered.plan(plan))
    deltas += server.scheduler.abort("2", 0.0)
    while (more := server.step()) is not None:
        deltas += more
    got = answers(deltas)
    assert got.pop(("2", 0)).reason == "abort"
    del expected["2", 0]
    assert got == expected
    server.scheduler.check()


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_a_requests_own_whatever_happens(seed: int, tiny_checkpoint: Checkpoint) -> None:
    """Requests arrive, are aborted and end early at random times while blocks are scarce."""
    source = random.Random(seed)
    folder, asked = tiny_checkpoint("qwen3"), wave()
    alone = answers(Server(make_runner(folder), max_num_seqs=1).run(asked))
    runner = make_device_runner(folder, max_num_seqs=6)
    how = {"budget": source.choice([16, 40, 400]), "blocks": source.randint(12, 30), "caching": bool(seed % 2)}
    server = Server(runner, max_num_seqs=6, **how)
    coming, deltas, ended = list(asked), list[TokenDelta](), set[str]()
    while coming or server.scheduler.has_work:
        if coming and source.random() < 0.4:
            server.scheduler.add(coming.pop(), 0.0)
        live = [request.request_id for request in asked if request not in coming]
        if live and source.random() < 0.1:
            name = source.choice(live)
            plan = server.scheduler.plan(0.0)
            if plan is not None:
                runner.submit(server.scattered.plan(plan))
            gone = (
                server.scheduler.abort(name, 0.0)
                if source.random() < 0.5
                else server.scheduler.finish(name, 0, "stop", 2, 0.0)
            )
            ended.update(delta.request_id for delta in gone)
            deltas += [replace(delta, offset=0) for delta in gone]
        deltas += server.step() or []
        server.scheduler.check()
    assert ended
    for (name, choice), answer in answers(deltas).items():
        own = alone[name, choice].tokens
        assert not answer.error
        assert answer.tokens == (own[: len(answer.tokens)] if name in ended else own), (name, choice)


async def test_an_engine_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real model behind EngineCore and InProcessExecutor, on a device runner instead of a CPU runner."""
    from tests.engine import test_model

    expected = await test_model.answers(in_process=True)
    loaded: list[ModelRunner] = []

    def load(config: EngineConfig, *_: object) -> ModelRunner:
        loaded.append(make_device_runner(test_model.MODEL, max_num_seqs=config.max_num_seqs))
        return loaded[0]

    monkeypatch.setattr("penstock.runtime.loading.load.load_runner", load)
    given = await test_model.answers(in_process=True)
    assert loaded and loaded[0].capacity.depth == 2
    assert [answer.choices for answer in given] == [answer.choices for answer in expected]
