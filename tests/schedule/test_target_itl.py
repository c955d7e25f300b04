"""Prompts are cut so that steps with decoding sequences take the target time, by what was learned of step times."""

import random

import pytest

from penstock.messages import Capacity, GenerateRequest, KVGroup, PoolingParams, SamplingParams, StepPlan, Window
from penstock.schedule import Event, Scheduler, SchedulerConfig, replay
from penstock.schedule.step_model import LEAST_CHUNK, StepModel, StepSize
from tests.schedule.simulated import Simulation, request, simulation

TARGET = 0.05
READERS = 6
PROMPT = 600


class Machine:
    """Seconds of steps: fixed, for each decode, for each token of a prompt and for each token it attends to."""

    def __init__(self, noise: float = 0.0) -> None:
        self._rng = random.Random(1)
        self._noise = noise
        self._positions: dict[int, int] = {}

    def seconds(self, plan: StepPlan) -> float:
        for new in plan.new:
            self._positions[new.seq] = new.num_computed
        size = StepSize()
        for work in plan.work:
            position = self._positions[work.seq]
            self._positions[work.seq] += work.count
            if work.count == 1:
                size = size._replace(decodes=size.decodes + 1)
            else:
                pairs = work.count * (position + work.count / 2)
                size = size._replace(tokens=size.tokens + work.count, pairs=size.pairs + pairs)
        return true_seconds(size) * (1 + self._noise * self._rng.uniform(-1, 1))


def true_seconds(size: StepSize) -> float:
    return 0.01 + 0.0005 * size.decodes + 0.0004 * size.tokens + 1e-6 * size.pairs


def joined(target: float, *, noise: float = 0.0, log: list[Event] | None = None) -> tuple[Simulation, list[float]]:
    """A long prompt joins readers. Returns the gaps between their tokens while it is prefilled."""
    sim = simulation(
        max_num_seqs=16, max_num_batched_tokens=512, max_model_len=1024, blocks=1000, target_step_time=target, log=log
    )
    sim.step_seconds = Machine(noise).seconds
    for number in range(READERS):
        sim.add(request(f"reader{number}", 8, 300, ignore_eos=True))
    for _ in range(40):
        sim.step()
    for number in range(2):  # the first one teaches
        sim.add(request(f"long{number}", PROMPT, 2))
        gaps = []
        while not sim.outputs[f"long{number}", 0].token_ids:
            before = sim.now
            sim.step()
            gaps.append(sim.now - before)
    return sim, gaps


@pytest.mark.parametrize("noise", [0.0, 0.15])
def test_readers_keep_their_pace(noise: float) -> None:
    sim, gaps = joined(TARGET, noise=noise)
    assert max(gaps) <= 1.5 * TARGET
    # The target is used, not undercut: the mean is near it, but for the last and smaller chunk.
    assert sum(gaps[:-1]) / len(gaps[:-1]) > 0.8 * TARGET
    sim.run()
    for name, choice in sim.outputs:
        sim.check_output(name, choice)


def test_without_a_target_they_do_not() -> None:
    _, gaps = joined(0.0)
    assert max(gaps) > 4 * TARGET


def test_a_target_below_a_decode_step_lets_the_prompt_advance() -> None:
    sim, gaps = joined(0.001)
    assert len(gaps) <= PROMPT / LEAST_CHUNK + 2
    sim.run()
    sim.check_drained()


def test_a_prompt_alone_is_not_cut() -> None:
    sim = simulation(max_num_batched_tokens=512, max_model_len=1024, blocks=1000, target_step_time=TARGET)
    sim.add(request("long", PROMPT, 2))
    sim.run()
    assert [work.count for work in sim.plans[0].work] == [512]


def test_while_engines_compete_a_prompt_alone_is_cut_too() -> None:
    log: list[Event] = []
    sim = simulation(max_num_batched_tokens=512, max_model_len=1024, blocks=1000, log=log)
    sim.step_seconds = Machine(0.0).seconds
    sim.scheduler.limit_steps(TARGET)
    lasted = []
    for number in range(2):  # the first one teaches
        sim.add(request(f"long{number}", PROMPT, 2))
        lasted.clear()
        while not sim.outputs[f"long{number}", 0].token_ids:
            before = sim.now
            sim.step()
            lasted.append(sim.now - before)
    assert 0.8 * TARGET < max(lasted) <= 1.5 * TARGET and len(lasted) > 2
    sim.scheduler.limit_steps(0.0)
    sim.add(request("whole", PROMPT, 2))
    sim.run()
    assert max(work.count for plan in sim.plans[-3:] for work in plan.work) > 400
    assert replay(log) == sim.plans


def test_a_replay_cuts_the_same() -> None:
    log: list[Event] = []
    sim, _ = joined(TARGET, noise=0.1, log=log)
    sim.run()
    assert replay(log) == sim.plans


def test_the_model_learns_any_linear_machine() -> None:
    rng = random.Random(2)
    model = StepModel()
    assert model.seconds(StepSize(5)) == 0
    for _ in range(120):
        tokens = rng.choice((0, 0, rng.randrange(16, 512)))
        size = StepSize(rng.randrange(1, 33), tokens, tokens * rng.uniform(0, 8000))
        model.note(size, true_seconds(size))
    for size in (StepSize(3), StepSize(32), StepSize(16, 256, 256 * 4000.0), StepSize(1, 32, 0)):
        assert model.seconds(size) == pytest.approx(true_seconds(size), rel=0.05)


@pytest.mark.parametrize("noise", [0.0, 0.6])
def test_it_knows_how_far_steps_stray(noise: float) -> None:
    rng = random.Random(4)
    model, above = StepModel(), 0
    for number in range(600):
        size = StepSize(8, rng.randrange(16, 512), 1000.0)
        seconds = true_seconds(size) * (1 + noise * rng.random())
        above += number >= 200 and seconds > model.spread * model.seconds(size)
        model.note(size, seconds)
    assert above / 400 == pytest.approx(0.1, abs=0.05) if noise else model.spread < 1.06


def test_one_long_step_does_not_spoil_it() -> None:
    model = StepModel()
    for _ in range(50):
        model.note(StepSize(8), true_seconds(StepSize(8)))
    model.note(StepSize(8), 5.0)
    assert model.seconds(StepSize(8)) < 1.2 * true_seconds(StepSize(8))


def test_it_follows_a_machine_that_becomes_slower() -> None:
    model = StepModel()
    for factor in (1.0, 3.0):
        for number in range(100):
            size = StepSize(8, 64 * (number % 3), 6400.0 * (number % 3))
            model.note(size, factor * true_seconds(size))
    assert model.seconds(StepSize(8, 64, 6400.0)) == pytest.approx(3 * true_seconds(StepSize(8, 64, 6400.0)), rel=0.1)


def test_a_text_that_is_computed_as_a_whole_is_not_cut() -> None:
    capacity = Capacity(128, (KVGroup(9, Window(0)),), vocab_size=1000, output="vectors", keeps="nothing")
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=256, max_model_len=128), capacity)
    scheduler.limit_steps(0.001)
    for number in range(2):
        asked = GenerateRequest(
            request_id=f"text{number}",
            prompt_ids=tuple(range(100)),
            sampling=SamplingParams(seed=0, max_tokens=1),
            pooling=PoolingParams(),
        )
        scheduler.add(asked, 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None and [work.count for work in plan.work] == [100]
