"""Tenants share an engine by what they have been served: VTC's bound and order, classes, shares of memory."""

from collections import Counter
from itertools import combinations

import pytest

from penstock.messages import GenerateRequest, StepPlan, TenantShare, TokenDelta
from penstock.schedule import Event, replay
from penstock.schedule.fairness.fair_queue import ENTRY_TOKENS, PRESENT_SECONDS, FairQueue
from tests.schedule.fair_workloads import STEPS, WORKLOADS, Arrival, arrivals, published_order
from tests.schedule.policies import GivenOrder
from tests.schedule.simulated import Simulation, request, simulation

PLACES = 4
BLOCKS = 65


class Shared:
    """A simulated engine of several tenants, with what each has been served by the prices of the paper."""

    def __init__(self, *, fair: bool = True, share: TenantShare | None = None, **limits: object) -> None:
        self.share = share or TenantShare()
        given = {"blocks": BLOCKS, "max_num_seqs": PLACES, "max_num_batched_tokens": 128, **limits}
        self.log: list[Event] = []
        self.sim: Simulation = simulation(tenants=fair, log=self.log, **given)  # type: ignore[arg-type]
        self.served: Counter[str] = Counter()
        self.order: list[str] = []  # requests in the order of their starts
        self.started: set[str] = set()
        self._names: list[str] = []  # by the number of the sequence
        self._seen = 0

    def add(self, name: str, each: Arrival, **fields: object) -> None:
        share = fields.pop("share", self.share)
        made = request(name, each.prompt, each.output, tenant=each.tenant, share=share, ignore_eos=True, **fields)
        self._names.append(name)
        self.sim.add(made)

    def step(self) -> list[TokenDelta]:
        deltas = self.sim.step()
        for plan in self.sim.plans[self._seen :]:
            self._note(plan)
        self._seen = len(self.sim.plans)
        for delta in deltas:
            self.served[self._tenant(delta.request_id)] += 2 * len(delta.token_ids)
        return deltas

    def waiting(self) -> set[str]:
        return {each.request.message.tenant for each in self.sim.scheduler._live.waiting}

    def _note(self, plan: StepPlan) -> None:
        for new in plan.new:
            name = self._names[new.seq - 1]
            if name not in self.started:
                self.started.add(name)
                self.order.append(name)
                self.served[self._tenant(name)] += len(new.token_ids) - new.num_computed

    def _tenant(self, name: str) -> str:
        return self.sim.requests[name].tenant


def bound(longest: int, quantum: float = 0.0) -> float:
    """Theorem 4.4, with what a quantum adds. The batch holds at most what the KV cache does."""
    return 2 * max(longest, 2 * (BLOCKS - 1) * 4) + quantum


@pytest.mark.parametrize("quantum", [0.0, 60.0])
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_service_of_waiting_tenants_stays_within_the_bound(name: str, quantum: float) -> None:
    """For each two tenants, over each interval in which both wait."""
    trace = arrivals(name)
    shared = Shared(share=TenantShare(quantum=quantum))
    longest = max(each.prompt for found in trace.values() for _, each in found)
    extremes: dict[tuple[str, str], tuple[float, float]] = {}  # of the difference, while both wait
    compared = step = 0
    while step < STEPS or shared.sim.scheduler.has_work:
        for request_id, each in trace.get(step, ()):
            shared.add(request_id, each)
        shared.step()
        waiting = shared.waiting()
        for pair in combinations(sorted({each.tenant for found in trace.values() for _, each in found}), 2):
            if not set(pair) <= waiting:
                extremes.pop(pair, None)
                continue
            gap = shared.served[pair[0]] - shared.served[pair[1]]
            least, most = extremes.get(pair, (gap, gap))
            extremes[pair] = least, most = min(least, gap), max(most, gap)
            compared += 1
            assert most - least <= bound(longest, quantum)
        step += 1
    if name != "on_off_less":  # there the light tenant starts at once, so both never wait
        assert compared > 5, "no two tenants waited: the bound was not tested"
    for request_id in shared.sim.requests:
        shared.sim.check_output(request_id)


@pytest.mark.parametrize("name", WORKLOADS)
def test_requests_start_in_the_order_of_the_published_algorithm(name: str) -> None:
    trace = arrivals(name)
    shared = Shared(
        share=TenantShare(claims=False), blocks=400, max_num_batched_tokens=1024, enable_prefix_caching=False
    )
    for step in range(STEPS):
        for request_id, each in trace.get(step, ()):
            shared.add(request_id, each)
        shared.step()
    expected = published_order(trace, PLACES, STEPS)
    assert len(expected) > 30
    assert shared.order == expected


@pytest.mark.parametrize("name", ["overload", "poisson_short_long", "dist_shift"])
def test_fairness_costs_no_throughput(name: str) -> None:
    """Tokens for the time of the simulated machine, against first come, first served."""
    seconds = {}
    for fair in (True, False):
        shared = Shared(fair=fair)
        trace = arrivals(name)
        for step in range(STEPS):
            for request_id, each in trace.get(step, ()):
                shared.add(request_id, each)
            shared.step()
        shared.sim.run()
        seconds[fair] = shared.sim.now
    assert seconds[True] <= seconds[False] / 0.98


def test_a_tenant_with_three_times_the_weight_is_served_three_times_as_much() -> None:
    shared = Shared()
    for number in range(60):
        shared.add(f"a{number}", Arrival(0, "a", 6, 6), share=TenantShare(weight=3.0))
        shared.add(f"b{number}", Arrival(0, "b", 6, 6), share=TenantShare(weight=1.0))
    while shared.waiting() == {"a", "b"}:
        shared.step()
    assert shared.served["a"] / shared.served["b"] == pytest.approx(3.0, rel=0.1)


def test_with_time_as_the_price_tenants_get_equal_time() -> None:
    """One has long prompts, and the other long outputs. By tokens, their time would differ."""
    shared, seconds = Shared(blocks=400), Counter[str]()
    share = TenantShare(input_price=0.0, output_price=0.0, step_price=1.0, claims=False)
    for number in range(60):
        shared.add(f"prompts{number}", Arrival(0, "prompts", 60, 2), share=share)
        shared.add(f"outputs{number}", Arrival(0, "outputs", 4, 16), share=share)
    while shared.waiting() == {"prompts", "outputs"}:
        for delta in shared.step():
            if delta.timing is not None and delta.timing.usage is not None:
                seconds[shared._tenant(delta.request_id)] += delta.timing.usage.step_seconds
    assert seconds["prompts"] / seconds["outputs"] == pytest.approx(1.0, rel=0.1)


def test_a_tenant_that_returns_has_saved_up_nothing() -> None:
    shared = Shared()
    shared.add("b-first", Arrival(0, "b", 6, 4))
    for number in range(80):
        shared.add(f"a{number}", Arrival(0, "a", 6, 6))
    while shared.served["a"] < 300:
        shared.step()
    before = shared.served.copy()
    for number in range(40):
        shared.add(f"b{number}", Arrival(0, "b", 6, 6))
    for _ in range(30):
        shared.step()
    gained = shared.served - before
    assert gained["b"] - gained["a"] <= bound(6)
    assert gained["a"] > 0


def test_a_light_tenant_takes_places_up_to_its_part_and_no_tenant_loses_its_last() -> None:
    """A tenant that fills the batch with long outputs gives places to one with little to do, all in the same step."""
    shared = Shared(blocks=400, max_num_seqs=8)
    for number in range(40):
        shared.add(f"heavy{number}", Arrival(0, "heavy", 4, 50))
    for _ in range(5):
        shared.step()
    for number in range(3):
        shared.add(f"light{number}", Arrival(0, "light", 4, 10))
    shared.step()
    assert all(shared.sim.outputs[f"light{number}", 0].token_ids for number in range(3))
    running = Counter(each.request.message.tenant for each in shared.sim.scheduler._live.running)
    assert running == {"heavy": 5, "light": 3}
    before = shared.sim.scheduler.stats().preemptions
    assert before == 3
    shared.sim.run()
    shared.sim.check_drained()
    assert shared.sim.scheduler.stats().preemptions == before, "each gave way once"
    for name in shared.sim.requests:
        shared.sim.check_output(name)


def test_a_tenant_that_returns_starts_in_the_next_step() -> None:
    """At any time, whether a place of the batch is free or not."""
    for steps in range(3, 16):
        shared = Shared(blocks=400)
        for number in range(40):
            shared.add(f"heavy{number}", Arrival(0, "heavy", 6, 4 + number % 5))
        for _ in range(steps):
            shared.step()
        shared.add("light", Arrival(0, "light", 6, 8))
        shared.step()
        assert len(shared.sim.outputs["light", 0].token_ids) == 1


def test_long_prompts_of_others_leave_a_short_step_to_a_tenant_with_little_to_do() -> None:
    shared = Shared(blocks=600, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=512)
    for number in range(12):
        shared.add(f"heavy{number:02}", Arrival(0, "heavy", 400, 8))
    for _ in range(3):
        shared.step()
    shared.add("light", Arrival(0, "light", 20, 8))
    before = len(shared.sim.plans)
    shared.step()
    (plan,) = shared.sim.plans[before:]
    assert sum(work.count for work in plan.work) <= 20 + ENTRY_TOKENS + 8
    assert len(shared.sim.outputs["light", 0].token_ids) == 1
    shared.step()
    prompts = [work.count for work in shared.sim.plans[-1].work if work.count > 1]
    assert sum(prompts) == 128, "a tenant with little to do was here lately: others get half of a step"
    shared.sim.now += PRESENT_SECONDS
    shared.step()
    assert sum(work.count for work in shared.sim.plans[-1].work) == 256, "and later the whole"


def test_a_tenant_with_little_to_do_gets_blocks_of_one_that_holds_nearly_all() -> None:
    """There are places, but no blocks. It gets what it needs within its part, and nothing is taken back from it."""
    shared = Shared(blocks=33, max_num_seqs=8, max_model_len=128)
    for number in range(8):
        shared.add(f"heavy{number}", Arrival(0, "heavy", 30, 60))
    for _ in range(6):
        shared.step()
    assert {each.request.message.tenant for each in shared.sim.scheduler._live.running} == {"heavy"}
    shared.add("light", Arrival(0, "light", 24, 8))
    for _ in range(4):
        shared.step()
    assert shared.sim.outputs["light", 0].token_ids
    shared.sim.run()
    assert shared.sim.outputs["light", 0].final.timing.preemptions == 0  # type: ignore[union-attr]
    for name in shared.sim.requests:
        shared.sim.check_output(name)


BATCH = TenantShare(rank=1, held_back=2, step_tokens=6)


def test_a_class_leaves_reserved_places_free_and_gives_way() -> None:
    shared = Shared(blocks=400)
    for number in range(12):
        shared.add(f"batch{number}", Arrival(0, "t", 6, 30), share=BATCH)
    for _ in range(8):
        shared.step()
        assert len(shared.sim.scheduler._live.running) <= PLACES - 2
    for number in range(3):
        shared.add(f"now{number}", Arrival(0, "t", 6, 4))
    shared.step()
    running = [each.request_id for each in shared.sim.scheduler._live.running]
    assert {"now0", "now1"} <= set(running)
    shared.step()
    assert "now2" in {each.request_id for each in shared.sim.scheduler._live.running}, "it takes a place of the class"
    shared.sim.run()
    for name in shared.sim.requests:
        shared.sim.check_output(name)


def test_prompts_of_a_class_have_few_tokens_in_a_step_beside_another_class() -> None:
    shared = Shared(blocks=400, max_model_len=128)
    shared.add("now", Arrival(0, "t", 4, 40))
    shared.step()
    shared.add("batch", Arrival(0, "t", 60, 4), share=BATCH)
    begun = len(shared.sim.plans)
    while shared.sim.outputs["batch", 0].finish_reason is None:
        shared.step()
    for plan in shared.sim.plans[begun:]:
        assert sum(work.count for work in plan.work) <= 1 + 6
    shared.sim.run()
    for seconds, most in ((PRESENT_SECONDS - 1, 6), (2, 60)):  # since the last sequence of the other class
        shared.sim.now += seconds
        shared.add(f"after {seconds}", Arrival(0, "t", 60, 1), share=BATCH)
        shared.step()
        assert sum(work.count for work in shared.sim.plans[-1].work) == most
        shared.sim.run()


def test_a_request_that_has_waited_for_the_longest_time_of_its_class_comes_first() -> None:
    shared = Shared(max_num_seqs=1)
    slow = TenantShare(rank=1, max_wait=0.05)
    shared.add("batch", Arrival(0, "t", 4, 4), share=slow)
    for number in range(40):
        shared.add(f"now{number:02}", Arrival(0, "t", 4, 8))
    shared.sim.run()
    timing = shared.sim.outputs["batch", 0].final.timing  # type: ignore[union-attr]
    assert timing is not None
    assert 0.05 <= timing.queued < 0.05 + 3 * 8 * 0.0015
    assert shared.sim.outputs["now39", 0].final.timing.queued > timing.queued  # type: ignore[union-attr]


def test_the_tenant_most_over_its_part_of_the_blocks_is_preempted() -> None:
    """Both run out of blocks. The one with the smaller share gives way, though the other came last."""
    shared = Shared(blocks=18, max_num_seqs=3)
    shared.add("first", Arrival(0, "a", 8, 40), share=TenantShare(kv_share=1.0))
    shared.add("large", Arrival(0, "b", 8, 40), share=TenantShare(kv_share=0.1))
    shared.add("late", Arrival(0, "c", 8, 40), share=TenantShare(kv_share=1.0))
    while not shared.sim.scheduler.stats().preemptions:
        shared.step()
    assert "large" not in {each.request_id for each in shared.sim.scheduler._live.running}
    shared.sim.run()
    for name in shared.sim.requests:
        shared.sim.check_output(name)


def test_a_log_replays_to_the_same_plans() -> None:
    shared = Shared(share=TenantShare(quantum=20.0))
    trace = arrivals("poisson_overload")
    for step in range(60):
        for request_id, each in trace.get(step, ()):
            share = BATCH if request_id.endswith("3") else TenantShare(weight=2.0 if each.tenant == "a" else 1.0)
            shared.add(request_id, each, share=share)
        shared.step()
    assert replay(shared.log) == shared.sim.plans


def test_with_one_tenant_nothing_is_counted_and_plans_are_as_without_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    for fair in (True, False):
        shared = Shared(fair=fair)
        for number in range(20):
            shared.add(f"r{number}", Arrival(0, "only", 4 + number % 7, 10))
        shared.sim.run()
        plans.append(shared.sim.plans)
        if fair:
            queue = shared.sim.scheduler._live.waiting
            assert isinstance(queue, FairQueue)
            assert [tenant.served for tenant in queue.counters.tenants.values()] == [0.0]
    assert plans[0] == plans[1]


def test_the_parts_of_all_requests_are_the_time_of_the_steps() -> None:
    shared = Shared()
    trace = arrivals("poisson_short_long")
    busy, last = 0.0, 0.0
    seconds = 0.0
    for step in range(100):
        for request_id, each in trace.get(step, ()):
            shared.add(request_id, each)
        last, worked = shared.sim.now, shared.sim.scheduler.has_work
        for delta in shared.step():
            if delta.timing is not None and delta.timing.usage is not None:
                seconds += delta.timing.usage.step_seconds
        busy += shared.sim.now - last if worked else 0.0
    for name in list(shared.sim.requests):
        for delta in shared.sim.scheduler.abort(name, shared.sim.now):
            assert delta.timing is not None
            seconds += delta.timing.usage.step_seconds if delta.timing.usage else 0.0
    assert seconds == pytest.approx(busy, rel=0.001)


def test_another_tenants_cached_prefix_changes_no_plan() -> None:
    plans = []
    for warm in (True, False):
        shared = Shared(blocks=200)
        prompt = tuple(range(1, 25))
        if warm:
            shared.sim.add(_with(prompt, "theirs", "b"))
        else:
            shared.sim.add(_with(prompt[::-1], "theirs", "b"))
        shared.sim.run()
        before = len(shared.sim.plans)
        shared.sim.add(_with(prompt, "mine", "a"))
        shared.sim.run()
        final = shared.sim.outputs["mine", 0].final
        assert final is not None and final.cached_tokens == 0
        plans.append([[(work.seq, work.count) for work in plan.work] for plan in shared.sim.plans[before:]])
    assert plans[0] == plans[1]


def _with(prompt: tuple[int, ...], name: str, tenant: str) -> GenerateRequest:
    return request(name, prompt, 6, tenant=tenant, cache_salt=f"{tenant}:", share=TenantShare(), ignore_eos=True)


def _prefix_hits(*, fair: bool, quantum: float = 0.0) -> int:
    """Tokens of prompts that were found in the cache: five tenants, each with a prefix of its own, and a cache with
    room for few of them. Without `fair`, all requests of a tenant run before those of the next one."""
    names = [f"t{tenant}-{number}" for number in range(24) for tenant in range(5)]
    policy = None if fair else GivenOrder(**{name: float(name[1]) for name in names})
    sim = simulation(policy=policy, tenants=fair, blocks=26, max_num_seqs=2, max_num_batched_tokens=64)
    for name in names:
        prefix = [1 + int(name[1])] * 24
        prompt = (*prefix, *(40 + ord(char) % 10 for char in name))
        share = TenantShare(quantum=quantum) if fair else None
        sim.add(request(name, prompt, 4, tenant=name[:2], share=share, cache_salt=name[:2], ignore_eos=True))
    sim.run()
    return sim.scheduler.stats().prefix_hits


def test_a_quantum_keeps_common_prefixes_cached() -> None:
    first, fair, quantum = _prefix_hits(fair=False), _prefix_hits(fair=True), _prefix_hits(fair=True, quantum=400.0)
    assert fair < 0.95 * first, "the workload is to be one in which taking turns costs hits"
    assert quantum >= 0.95 * first


def test_a_cap_on_prompts_delays_no_decode_of_the_class() -> None:
    """One sequence of the class decodes through block borders while a long prompt of the same class uses up the cap."""
    shared = Shared(blocks=400, max_model_len=128)
    share = TenantShare(rank=1, step_tokens=4)
    shared.add("now", Arrival(0, "t", 4, 60))
    shared.add("short", Arrival(0, "t", 3, 20), share=share)
    for _ in range(2):
        shared.step()
    shared.add("long", Arrival(0, "t", 80, 4), share=share)
    while shared.sim.outputs["short", 0].finish_reason is None:
        before = len(shared.sim.outputs["short", 0].token_ids)
        shared.step()
        assert len(shared.sim.outputs["short", 0].token_ids) == before + 1
