"""Continuous batching: who computes how many tokens in a step, what is refused."""

import msgspec
import pytest

from penstock.messages import RequestRejected, StepPlan
from penstock.schedule import SchedulerConfig
from tests.plan_checks import logprob_row
from tests.schedule.simulated import Simulation, expected_output, request, simulation


def counts(plan: StepPlan | None) -> list[int]:
    assert plan is not None
    return [work.count for work in plan.work]


def test_one_request() -> None:
    sim = simulation()
    sim.add(request("a", 8, 5))
    sim.run()
    sim.check_drained()
    sim.check_output("a")
    assert [counts(plan) for plan in sim.plans] == [[8], [1], [1], [1], [1]]
    assert sim.outputs["a", 0].finish_reason == "length"


def test_requests_join_and_leave_a_running_batch() -> None:
    sim = simulation()
    sim.add(request("a", 8, 6))
    sim.step()
    sim.add(request("b", 5, 2))
    sim.step()
    assert counts(sim.plans[-1]) == [1, 5]
    sim.run()
    assert [len(plan.work) for plan in sim.plans] == [1, 2, 2, 1, 1, 1]
    sim.check_output("a")
    sim.check_output("b")


def test_a_plan_is_a_delta() -> None:
    sim = simulation(block_size=4)
    sim.add(request("a", 7, 8))
    for _ in range(5):
        sim.step()
    new = [len(plan.new) for plan in sim.plans]
    blocks = [[ids for _, groups in plan.blocks for ids in groups] for plan in sim.plans]
    assert new == [1, 0, 0, 0, 0]
    assert [len(ids) for ids in blocks] == [0, 0, 1, 0, 0]  # position 8 begins the third block


def test_a_long_prompt_is_computed_in_chunks() -> None:
    sim = simulation(max_num_batched_tokens=10)
    sim.add(request("a", 25, 2))
    sim.run()
    assert [counts(plan) for plan in sim.plans] == [[10], [10], [5], [1]]
    assert [plan.work[0].sample for plan in sim.plans] == [False, False, True, True]
    sim.check_output("a")


@pytest.mark.parametrize("arrival", [0.5, 2.0], ids=["prompt is older", "prompt is younger"])
def test_decoding_goes_on_beside_a_long_prompt(arrival: float) -> None:
    sim = simulation(max_num_batched_tokens=8)
    for name in "abcd":
        sim.add(request(name, 2, 20, arrival=1.0))
    sim.step()
    sim.add(request("long", 40, 2, arrival=arrival))
    for _ in range(10):
        sim.step()
        assert sorted(counts(sim.plans[-1])) == [1, 1, 1, 1, 4]
    sim.run()
    for name in (*"abcd", "long"):
        sim.check_output(name)


def test_two_prompts_share_what_is_left_of_the_budget() -> None:
    sim = simulation(max_num_batched_tokens=16)
    sim.add(request("a", 10, 2))
    sim.add(request("b", 10, 2))
    sim.run()
    assert [counts(plan) for plan in sim.plans] == [[10, 6], [1, 4], [1]]


def test_lower_priority_numbers_start_sooner() -> None:
    sim = simulation(max_num_seqs=1)
    for name, priority in (("a", 1), ("b", 1), ("c", 0)):
        sim.add(request(name, 4, 2, priority=priority, arrival=1.0))
    order = []
    while sim.scheduler.has_work:
        order += [delta.request_id for delta in sim.step() if delta.finish_reason]
    assert order == ["c", "a", "b"]


def test_at_most_max_num_seqs_run() -> None:
    sim = simulation(max_num_seqs=3)
    for i in range(10):
        sim.add(request(f"r{i}", 4, 3 + i % 3))
    sim.run()  # the executor checks the number of rows
    sim.check_drained()
    assert max(len(plan.work) for plan in sim.plans) == 3


class TestRefusals:
    def test_a_prompt_that_leaves_no_room(self) -> None:
        sim = simulation(max_model_len=20)
        with pytest.raises(RequestRejected, match=r"20 tokens.* 19 .*max_model_len=20.*shorten"):
            sim.add(request("a", 20))
        sim.add(request("b", 19))
        sim.run()
        sim.check_output("b")

    def test_a_request_larger_than_the_pool(self) -> None:
        sim = simulation(blocks=5)  # 16 tokens
        with pytest.raises(RequestRejected, match=r"need 5 KV blocks .* has 4: lower max_tokens=10"):
            sim.add(request("a", 8, 10))
        sim.add(request("b", 8, 9))  # the last token is never computed
        sim.run()
        sim.check_output("b")

    def test_a_window_needs_less(self) -> None:
        sim = simulation(blocks=4, windows=(8,))
        sim.add(request("a", 20, 30))
        sim.run()
        sim.check_output("a")
        narrow = simulation(blocks=3, windows=(8,))
        with pytest.raises(RequestRejected, match="need 3 KV blocks"):
            narrow.add(request("a", 20, 30))

    def test_an_id_in_use(self) -> None:
        sim = simulation()
        sim.add(request("a", 4, 1))
        with pytest.raises(RequestRejected, match="'a' is in use"):
            sim.add(request("a", 4, 1))
        sim.run()
        sim.add(request("a", 4, 1))

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"prompt": []}, "0 tokens"),
            ({"prompt": [-1]}, "token id -1"),
            ({"prompt": [2**32]}, "token id 4294967296"),
            ({"output_ids": (-5,)}, "token id -5"),
            ({"n": 0}, "n=0"),
            ({"n": 10**9}, "n=1000000000: ask for 1 to 1024 choices"),
            ({"first_choice": -1}, "first_choice=-1"),
            ({"arrival": float("nan")}, "arrival=nan"),
            ({"temperature": float("nan")}, "temperature is nan"),
            ({"stop_token_ids": (2**32,)}, "token id 4294967296"),
            ({"n": 2, "output_ids": (1,)}, "n=2 with output_ids"),
        ],
    )
    def test_a_malformed_request(self, fields: dict[str, object], message: str) -> None:
        sim = simulation()
        with pytest.raises(RequestRejected, match=message):
            sim.add(request("a", **fields))  # type: ignore[arg-type]
        sim.check_drained()

    @pytest.mark.parametrize(
        ("limits", "message"),
        [
            ({"max_num_seqs": 0}, "max_num_seqs=0"),
            ({"max_model_len": 0}, "max_model_len=0"),
            ({"speculation": "ngram", "max_step_drafts": 1}, "num_speculative_tokens=0"),
            ({"max_num_batched_tokens": 7}, "raise max_num_batched_tokens to 8"),
        ],
    )
    def test_limits_that_contradict(self, limits: dict[str, int], message: str) -> None:
        fields = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64, **limits}
        with pytest.raises(ValueError, match=message):
            SchedulerConfig(**fields)


class TestFromTheMiddle:
    def resumed(self, at: int, **fields: object) -> tuple[Simulation, list[int]]:
        sim = simulation()
        base = request("a", 9, 10, logprobs=0)
        output, _ = expected_output(base, 2, 64)
        sim.add(msgspec.structs.replace(base, output_ids=tuple(output[:at]), first_choice=2, **fields))
        return sim, output

    @pytest.mark.parametrize("at", [1, 5, 9])
    def test_goes_on_as_if_it_had_never_stopped(self, at: int) -> None:
        sim, _ = self.resumed(at)
        sim.run()
        sim.check_output("a", 2)
        assert len(sim.plans) == 10 - at

    def test_that_has_all_its_tokens(self) -> None:
        sim, output = self.resumed(10)
        final = sim.outputs["a", 2].final
        assert final is not None
        assert (final.offset, final.finish_reason, final.token_ids) == (len(output), "length", ())
        sim.check_drained()

    def test_that_has_reached_max_model_len(self) -> None:
        sim = simulation(max_model_len=12)
        sim.add(request("a", 8, 100, output_ids=(1, 2, 3, 4)))
        assert sim.outputs["a", 0].finish_reason == "length"

    def test_that_has_its_stop_token(self) -> None:
        sim = simulation()
        sim.add(request("a", output_ids=(1, 2), stop_token_ids=(2,)))
        final = sim.outputs["a", 0].final
        assert final is not None
        assert (final.offset, final.finish_reason, final.stop_token) == (2, "stop", 2)
        sim.add(request("b", output_ids=(1, 2), stop_token_ids=(2,), min_tokens=2))
        assert sim.outputs["b", 0].final is None


class TestPromptLogprobs:
    def rows(self, sim: Simulation, name: str) -> bytes:
        return b"".join(logprob_row(token) for token in sim.requests[name].prompt_ids[1:])

    @pytest.mark.parametrize("length", [1, 2, 9, 23])
    def test_given_whole_with_the_first_token(self, length: int) -> None:
        sim = simulation(max_num_batched_tokens=8)
        sim.add(request("a", length, 3, prompt_logprobs=0, n=2))
        deltas = []
        while sim.scheduler.has_work:
            deltas += sim.step()
        with_rows = [delta for delta in deltas if delta.prompt_logprobs]
        assert sim.outputs["a", 0].prompt_logprobs == self.rows(sim, "a")
        assert sim.outputs["a", 1].prompt_logprobs == b""
        assert all((delta.choice, delta.offset) == (0, 0) for delta in with_rows)

    def test_with_no_token_asked_for(self) -> None:
        sim = simulation(max_num_batched_tokens=8)
        sim.add(request("a", 20, 0, prompt_logprobs=0, n=2))
        assert sim.outputs["a", 1].finish_reason == "length"
        sim.run()
        assert sim.outputs["a", 0].prompt_logprobs == self.rows(sim, "a")
        assert sim.outputs["a", 0].finish_reason == "length"
        assert sum(work.count for plan in sim.plans for work in plan.work) == 19

    def test_the_prefix_cache_is_passed_by(self) -> None:
        sim = simulation()
        first = request("a", 16, 2)
        sim.add(first)
        sim.run()
        sim.add(request("b", first.prompt_ids, 2, prompt_logprobs=0))
        sim.run()
        assert sim.outputs["b", 0].prompt_logprobs == self.rows(sim, "b")
        assert sim.outputs["b", 0].final is not None
        assert sim.outputs["b", 0].final.cached_tokens == 0


def test_timing() -> None:
    sim = simulation(max_num_seqs=1, max_num_batched_tokens=4)
    sim.now = 10.0
    sim.add(request("a", 8, 3))
    sim.add(request("b", 4, 2, arrival=9.0))
    sim.run()
    times = {name: sim.outputs[name, 0].final.timing for name in "ab"}  # type: ignore[union-attr]
    step = [0.0014, 0.0011]  # of 4 tokens and of 1
    assert times["b"].queued == pytest.approx(1.0)
    assert times["b"].prefill == pytest.approx(step[0])
    assert times["b"].decode == pytest.approx(step[1])
    assert times["a"].queued == pytest.approx(step[0] + step[1])
    assert times["a"].prefill == pytest.approx(2 * step[0])
    assert times["a"].decode == pytest.approx(2 * step[1])


def test_stats() -> None:
    sim = simulation(max_num_seqs=2, windows=(0, 8))
    for name in "abc":
        sim.add(request(name, 8, 4))
    sim.step()
    stats = sim.scheduler.stats()
    assert (stats.steps, stats.running, stats.waiting, stats.computed_tokens) == (1, 2, 1, 16)
    assert (stats.blocks_total, stats.blocks_held) == ((64, 64), (4, 4))
    assert stats.kv_usage == 4 / 64
    sim.run()
    stats = sim.scheduler.stats()
    assert stats.blocks_cached[0] > 0
    assert (stats.prefill_tokens, stats.decode_tokens) == (3 * 8, 3 * 3)  # the first token of each is the prefill's


@pytest.mark.parametrize("depth", [1, 2])
def test_a_decode_is_not_a_prefill_however_short(depth: int) -> None:
    sim = simulation(depth=depth)
    for name, length in (("a", 1), ("b", 40), ("c", 17)):
        sim.add(request(name, length, 5))
        sim.run()
    stats = sim.scheduler.stats()
    assert stats.prefill_tokens + stats.prefix_hits == 1 + 40 + 17
    # At depth 2 a step is planned before it is known that the last token has come.
    assert 3 * 4 <= stats.decode_tokens <= 3 * (4 + depth - 1)


def test_every_delta_names_the_engines_life() -> None:
    from penstock.schedule import Scheduler

    sim = simulation()
    sim.scheduler = Scheduler(sim.config, sim.capacity, incarnation=7)
    sim.add(request("a"))
    sim.add(request("b"))
    deltas = [*sim.step(), *sim.scheduler.abort("a", 0.0), *sim.scheduler.finish("b", 0, "stop", 0, 0.0)]
    assert [delta.incarnation for delta in deltas] == [7] * 4
