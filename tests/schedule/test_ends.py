"""How a choice ends: stop tokens, limits, errors, aborts, and what a client gets of it."""

import msgspec
import pytest

from penstock.messages import SequenceResult, StepResult
from tests.plan_checks import VOCABULARY
from tests.schedule.simulated import Simulation, expected_output, request, simulation


def stop_at(sim: Simulation, index: int, **fields: object) -> None:
    """Add request "a" with the token it will give at `index` as a stop token."""
    base = request("a", max_tokens=12)
    output, _ = expected_output(base, 0, sim.config.max_model_len)
    first = output.index(output[index])
    assert first == index, "choose another index: the token comes earlier"
    sim.add(request("a", max_tokens=12, stop_token_ids=(output[index],), **fields))


class TestEnds:
    def test_a_stop_token_is_given_and_named(self) -> None:
        sim = simulation()
        stop_at(sim, 4)
        sim.run()
        output = sim.outputs["a", 0]
        assert len(output.token_ids) == 5
        assert output.finish_reason == "stop"
        assert output.final is not None
        assert output.final.stop_token == output.token_ids[-1]
        sim.check_output("a")

    def test_min_tokens_come_before_a_stop(self) -> None:
        """All tokens but one stop, so that the first not masked ends it."""
        sim = simulation()
        everything = tuple(range(1, VOCABULARY))
        sim.add(request("a", max_tokens=9, stop_token_ids=everything, min_tokens=4))
        sim.add(request("b", max_tokens=9, stop_token_ids=everything))
        sim.run()
        assert [len(sim.outputs[name, 0].token_ids) for name in "ab"] == [5, 1]

    def test_a_stop_token_among_the_first_min_tokens_does_not_stop(self) -> None:
        """Samplers mask it; one that did not would not end the choice too soon."""
        sim = simulation()
        sim.add(request("a", stop_token_ids=(5,), min_tokens=2))
        for index, reason in enumerate([None, None, "stop"]):
            plan = sim.scheduler.plan(0.0)
            assert plan is not None
            answer = SequenceResult(plan.work[0].seq, (5,))
            (delta,) = sim.scheduler.apply(StepResult(plan.plan_id, (answer,)), 0.0)
            assert (delta.offset, delta.finish_reason) == (index, reason)

    def test_the_models_own_stop_tokens_unless_ignored(self) -> None:
        sim = simulation()
        sim.add(request("a", max_tokens=5, eos_token_ids=tuple(range(VOCABULARY))))
        sim.add(request("b", max_tokens=5, eos_token_ids=tuple(range(VOCABULARY)), ignore_eos=True))
        sim.run()
        assert [len(sim.outputs[name, 0].token_ids) for name in "ab"] == [1, 5]

    def test_max_model_len(self) -> None:
        sim = simulation(max_model_len=12)
        sim.add(request("a", 8, 100))
        sim.run()
        assert len(sim.outputs["a", 0].token_ids) == 4
        assert sim.outputs["a", 0].finish_reason == "length"

    def test_no_tokens_asked_for(self) -> None:
        sim = simulation()
        sim.add(request("a", max_tokens=0, n=2))
        assert [sim.outputs["a", i].finish_reason for i in (0, 1)] == ["length", "length"]
        sim.check_drained()
        assert sim.plan() is None

    def test_finish_truncates(self) -> None:
        sim = simulation()
        sim.add(request("a", max_tokens=20))
        sim.add(request("b", max_tokens=20))
        for _ in range(6):
            sim.step()
        sim.finish("a", 0, keep=3)
        assert sim.outputs["a", 0].final is not None
        assert (sim.outputs["a", 0].final.offset, sim.outputs["a", 0].finish_reason) == (3, "stop")
        assert sim.outputs["a", 0].token_ids == expected_output(sim.requests["a"], 0, 64)[0][:3]
        sim.run()
        sim.check_output("b")
        sim.check_drained()

    def test_finish_keeps_no_more_than_there_is(self) -> None:
        sim = simulation()
        sim.add(request("a"))
        sim.step()
        sim.finish("a", 0, keep=100)
        assert len(sim.outputs["a", 0].token_ids) == 1

    @pytest.mark.parametrize("depth", [1, 3])
    @pytest.mark.parametrize("steps", range(4))
    def test_abort_at_any_moment(self, depth: int, steps: int) -> None:
        sim = simulation(depth=depth, max_num_batched_tokens=8)
        sim.add(request("a", 12, 9, n=2))
        sim.add(request("b", 5, 9))
        for _ in range(steps):
            sim.step()
        sim.plan()
        sim.abort("a")
        assert [sim.outputs["a", i].finish_reason for i in (0, 1)] == ["abort", "abort"]
        sim.run()
        sim.check_output("b")
        sim.check_drained()

    def test_ids_not_known_are_ignored(self) -> None:
        sim = simulation()
        sim.add(request("a", max_tokens=1))
        assert sim.scheduler.finish("a", 5, "stop", 0, 0.0) == []
        assert sim.scheduler.finish("b", 0, "stop", 0, 0.0) == []
        assert sim.scheduler.abort("b", 0.0) == []
        sim.run()
        assert sim.scheduler.finish("a", 0, "stop", 0, 0.0) == []

    def test_a_failed_request_fails_alone(self) -> None:
        doomed = request("bad", 9, 8, n=2)
        sim = simulation(
            executor={"fails": lambda sampling, choice, n: sampling.seed == doomed.sampling.seed and n > 11}
        )
        sim.add(request("a", 9, 12))
        sim.add(doomed)
        sim.run()
        sim.check_output("a")
        sim.check_drained()
        for choice in (0, 1):
            final = sim.outputs["bad", choice].final
            assert final is not None
            assert (final.finish_reason, final.error) == ("error", "simulated failure")
        # Its blocks hold garbage where it failed; whoever shares its prompt must not see any of it.
        sim.add(request("c", doomed.prompt_ids, 12, seed=3))
        sim.run()
        sim.check_output("c")

    @pytest.mark.parametrize(
        "wrong",
        [
            StepResult(2, (SequenceResult(1, (1,)),)),
            StepResult(1, ()),
            StepResult(1, (SequenceResult(2, (1,)),)),
            StepResult(1, (SequenceResult(1, (1, 2)),)),
            StepResult(1, (SequenceResult(1),)),
        ],
    )
    def test_an_executor_that_breaks_the_contract_is_refused(self, wrong: StepResult) -> None:
        for decodes in (False, True):
            sim = simulation()
            with pytest.raises(ValueError, match="no plan is outstanding"):
                sim.scheduler.apply(StepResult(1, ()), 0.0)
            sim.add(request("a"))
            if decodes:
                assert sim.scheduler.plan(0.0) is not None
                assert sim.scheduler.apply(StepResult(1, (SequenceResult(1, (5,)),)), 0.0)
            plan = sim.scheduler.plan(0.0)
            assert plan is not None
            result = msgspec.structs.replace(wrong, plan_id=wrong.plan_id - 1 + plan.plan_id)
            with pytest.raises(ValueError, match=r"plan|answer"):
                sim.scheduler.apply(result, 0.0)
