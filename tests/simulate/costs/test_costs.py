"""The cost of steps: computed, counted from plans, and fitted."""

import json
import random
from pathlib import Path

import pytest

from penstock.messages import Work
from penstock.simulate.build import size_group
from penstock.simulate.costs.counter import StepCounter
from penstock.simulate.costs.devices import DEVICES, find_device
from penstock.simulate.costs.fitted import KNOTS, FittedCost, FittedEngine, MeasuredStep, fit, measured_steps
from penstock.simulate.costs.work import StepLoad
from penstock.simulate.models import find_spec, model_names
from penstock.simulate.prices import load_prices
from penstock.simulate.scenario import ReplicaSpec
from tests.schedule.simulated import request, simulation


def seconds(load: StepLoad, **fields: object) -> float:
    spec = ReplicaSpec(kv_tokens=16, **fields)  # type: ignore[arg-type]
    return size_group(spec, load_prices(), Path()).cost.seconds(load)


@pytest.mark.parametrize("name", model_names())
def test_every_model_has_a_cost(name: str) -> None:
    assert find_spec(name).num_parameters() > 1e8
    one = seconds(StepLoad(1, 100, 0, 0, 0, 1), model=name, device="B200")
    many = seconds(StepLoad(64, 64 * 1000, 0, 0, 0, 64), model=name, device="B200")
    assert 1e-4 < one < many < 0.1


def test_a_step_takes_no_less_than_reading_the_weights_and_no_less_than_the_operations() -> None:
    """Of an 8B model in bf16: 15 GB at a decode step, 15 GFLOP for each token of a prompt."""
    for name, device in DEVICES.items():
        decode = seconds(StepLoad(1, 1, 0, 0, 0, 1), model="llama-3.1-8b", device=name)
        assert 15.0e9 / device.bandwidth < decode < 3 * 15.0e9 / device.bandwidth + 0.01, name
        prefill = seconds(StepLoad(0, 0, 4096, 4096 * 2048, 4096, 1), model="llama-3.1-8b", device=name)
        assert 4096 * 14e9 / device.flops < prefill < 4 * 4096 * 14e9 / device.flops + 0.05, name


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"tensor": 4}, {"tensor": 1}),
        ({"quantization": "fp8"}, {"quantization": "none"}),
        ({"quantization": "int4"}, {"quantization": "fp8"}),
        ({"device": "H200"}, {"device": "H100"}),
        ({"model": "llama-3.1-8b"}, {"model": "llama-3.1-70b"}),
    ],
)
def test_what_makes_a_step_shorter(less: dict[str, object], more: dict[str, object]) -> None:
    load = StepLoad(8, 8000, 0, 0, 0, 8)
    assert seconds(load, **{"device": "H100", **less}) < seconds(load, **{"device": "H100", **more})


def test_stages_keep_the_time_and_overlap() -> None:
    spec = ReplicaSpec(model="llama-3.1-70b", device="H100", pipeline=4, kv_tokens=16)
    cost = size_group(spec, load_prices(), Path()).cost
    assert cost.stages == 4
    alone = seconds(StepLoad(1, 1, 0, 0, 0, 1), model="llama-3.1-70b", device="H100")
    assert cost.seconds(StepLoad(1, 1, 0, 0, 0, 1)) == pytest.approx(alone, rel=0.1)


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(ValueError, match="'V100' is not known: name one of A100"):
        find_device("V100")
    with pytest.raises(ValueError, match="'nothing' is not known: give a folder"):
        find_spec("nothing")


def test_the_counter_follows_every_plan() -> None:
    """Beside the executor that checks each slot: equal positions after every plan."""
    one = simulation(blocks=40, max_num_batched_tokens=16, max_num_seqs=4)
    counter, chance, added = StepCounter(), random.Random(3), 0
    for step in range(300):
        if chance.random() < 0.3 and added < 40:
            one.add(request(f"r{added}", chance.randrange(1, 30), chance.randrange(1, 20)))
            added += 1
        if (plan := one.plan()) is not None:
            load = counter.count(plan)
            assert load.tokens == sum(work.count for work in plan.work)
            assert load.sampled == sum(work.sample for work in plan.work)
            assert load.decodes == sum(work.sample and work.count == 1 for work in plan.work)
            sequences = one.executor._sequences.values()
            assert counter.stored == sum(sequence.position for sequence in sequences)
            one.apply()
        assert step < 299 or added == 40
    assert counter.stored >= 0


def test_drafts_are_refused() -> None:
    one = simulation(speculation="ngram", num_speculative_tokens=4, max_step_drafts=8)
    one.add(request("a", [1, 2, 3] * 8, 4))
    counter = StepCounter()
    plan = one.plan()
    assert plan is not None
    counter.count(plan)
    work = Work(plan.work[0].seq, 3, True, (1, 2))
    with pytest.raises(ValueError, match="--speculation off"):
        counter.count(type(plan)(2, (work,)))


def test_a_fit_finds_the_cost_that_made_the_steps() -> None:
    """With noise of 5% and a few steps that took three times as long."""
    chance = random.Random(1)
    steps = []
    for _ in range(2000):
        decodes = chance.randrange(0, 40)
        prompt = chance.choice([0, 0, chance.randrange(1, 500)])
        load = StepLoad(
            decodes, decodes * chance.randrange(1, 900), prompt, prompt * 300, prompt, decodes + (prompt > 0)
        )
        if load.tokens:
            took = _true(load) * chance.gauss(1.0, 0.05) * (3.0 if chance.random() < 0.01 else 1.0)
            steps.append(MeasuredStep(load, took))
    cost = fit(steps)
    assert len(cost.factors) == len(KNOTS) + 6 and min(cost.factors) >= 0
    errors = [cost.seconds(step.work) / _true(step.work) - 1 for step in steps]
    assert sorted(map(abs, errors))[int(0.95 * len(errors))] < 0.1


def _true(load: StepLoad) -> float:
    tiles = -(-load.tokens // 16)
    return 0.004 + 0.001 * tiles + 2e-7 * load.decode_context + 1e-8 * load.prompt_pairs + 3e-5 * load.sampled


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="3 steps were measured"):
        fit([MeasuredStep(StepLoad(1, 1, 0, 0, 0, 1), 0.1)] * 3)


def test_a_log_is_measured_from_result_to_result() -> None:
    events: list = []
    one = simulation(log=events, blocks=100)
    one.token_seconds = 0.002
    one.add(request("a", 20, 30))
    one.run()
    steps = measured_steps(events)
    assert [step.work.tokens for step in steps][:2] == [20, 1]
    assert steps[0].seconds == pytest.approx(0.001 + 20 * 0.002) and steps[1].seconds == pytest.approx(0.003)


def test_a_cost_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_text(json.dumps({"factors": [1.0]}))
    with pytest.raises(ValueError, match=r"cost\.json is wrong .*: make it with penstock simulate --fit"):
        FittedEngine.read(tmp_path / "cost.json")
    assert FittedCost((1.0,) + (0.0,) * 20).seconds(StepLoad(1, 1, 0, 0, 0, 1)) == 1.0
