"""A runner on a device with two plans outstanding gives the tokens of a CPU runner with one.

The device is a MirrorDevice, which runs nothing before a result is requested: no plan can depend on a result that the
host has not taken.
"""

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from penstock.config import EngineConfig
from penstock.messages import (
    GenerateRequest,
    StepPlan,
    TokenDelta,
    unpack_rows,
)
from penstock.runtime.runner import ModelRunner
from tests.invariance.test_batch_invariance import renamed, requests
from tests.models.serving import Server, make_device_runner, make_runner
from tests.schedule.invariants import check_scheduler

Checkpoint = Callable[..., Path]


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
    check_scheduler(two.scheduler)


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
    check_scheduler(server.scheduler)


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
        check_scheduler(server.scheduler)
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
