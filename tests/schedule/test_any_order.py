"""Everything that can happen to a scheduler, in any order, against an executor that checks every slot it reads.

After every event the scheduler proves its books (`Simulation` calls `check`), a plan must come forth whenever there is
work and nothing is outstanding, and in the end every choice has exactly the tokens that no scheduling at all gives.
Only requests with a deadline are dropped, and only before they start.
"""

import os

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from penstock.messages import GenerateRequest, SamplingParams, TenantShare, Window
from tests.plan_checks import VOCABULARY, logprob_row, mix
from tests.schedule.invariants import check_scheduler
from tests.schedule.policies import AnyOrder
from tests.schedule.simulated import Simulation, expected_output, simulation

WINDOWS = [(0,), (0, 8), (6,), (0, 1), (5, 0, 9), (Window(6, chunked=True), 0), (Window(8, chunked=True),)]
MAX_MODEL_LEN = 40

# Few prompts with common beginnings, so that sequences meet in the prefix cache.
prompts = st.builds(
    lambda stem, length, tail: (*(mix(stem, i) % VOCABULARY for i in range(length)), *tail),
    st.integers(0, 1),
    st.integers(0, 22),
    st.lists(st.integers(0, 3), min_size=1, max_size=2),
)
SHARES = [
    TenantShare(),
    TenantShare(weight=3.0, kv_share=0.3, quantum=30.0),
    TenantShare(rank=1, held_back=2, step_tokens=3, claims=False),
    TenantShare(rank=2, max_wait=0.01),
]
# Seconds. A step takes a millisecond and a tenth of one for each token.
patience = st.none() | st.sampled_from([0.0, 0.001, 0.003, 0.01, 1.0])


class SchedulerMachine(RuleBasedStateMachine):
    sim: Simulation

    @initialize(
        windows=st.sampled_from(WINDOWS),
        blocks=st.integers(12, 26),
        depth=st.integers(1, 4),
        late_ids=st.booleans(),
        drafts=st.integers(0, 3),
        speculation=st.sampled_from(["off", "ngram", "suffix"]),
        seqs=st.integers(1, 5),
        extra_budget=st.integers(0, 24),
        caching=st.booleans(),
        failures=st.booleans(),
        target_step_time=st.sampled_from([0.0, 0.0, 0.001, 0.002]),
        order=st.none() | st.integers(0, 2**32),
        tenants=st.booleans(),
    )
    def start(
        self,
        windows: tuple[int, ...],
        blocks: int,
        depth: int,
        late_ids: bool,
        drafts: int,
        speculation: str,
        seqs: int,
        extra_budget: int,
        caching: bool,
        failures: bool,
        target_step_time: float,
        order: int | None,
        tenants: bool,
    ) -> None:
        """`order`: of a policy that changes it after each step. None: the scheduler's own."""

        def fails(sampling: SamplingParams, choice: int, length: int) -> bool:
            return failures and mix("failure", sampling.seed, choice, length) % 60 == 0

        self.sim = simulation(
            windows=windows,
            blocks=blocks,
            depth=depth,
            late_ids=late_ids,
            speculation=speculation,
            num_speculative_tokens=1 + drafts,
            max_step_drafts=4 + drafts,
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs + extra_budget,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=caching,
            target_step_time=target_step_time,
            tenants=tenants,
            policy=None if order is None else AnyOrder(order),
            executor={"fails": fails},
        )
        self.kept: dict[tuple[str, int], int] = {}  # finished from outside: tokens kept

    @rule(
        prompt=prompts,
        max_tokens=st.integers(0, 20),
        min_tokens=st.integers(0, 4),
        stops=st.sets(st.integers(0, VOCABULARY - 1), max_size=4),
        n=st.integers(1, 4),
        priority=st.integers(-2, 2),
        prompt_logprobs=st.booleans(),
        salt=st.sampled_from(["", "", "", "other"]),
        resume=st.integers(0, 6),
        predicted=st.sampled_from([0, 1, 3]),
        waits=st.tuples(patience, patience),
        tenant=st.sampled_from("abc"),
        share=st.none() | st.sampled_from(SHARES),
    )
    def add(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        min_tokens: int,
        stops: set[int],
        n: int,
        priority: int,
        prompt_logprobs: bool,
        salt: str,
        resume: int,
        predicted: int,
        waits: tuple[float | None, float | None],
        tenant: str,
        share: TenantShare | None,
    ) -> None:
        """`predicted`: 0: no prediction is sent; else every so many tokens of it are wrong. (1: none is right.)
        `waits`: until the deadline, and until that of the first token."""
        number = len(self.sim.requests)
        sampling = SamplingParams(
            seed=number % 3,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            stop_token_ids=tuple(sorted(stops)),
            logprobs=0 if number % 2 else None,
            prompt_logprobs=0 if prompt_logprobs else None,
        )
        request = GenerateRequest(
            request_id=f"r{number}", prompt_ids=prompt, sampling=sampling, n=n, priority=priority, cache_salt=salt
        )
        output, _ = expected_output(request, 0, MAX_MODEL_LEN)
        if predicted:
            prediction = [token + (i % predicted == predicted - 1) for i, token in enumerate(output)]
            request = msgspec.structs.replace(request, prediction_ids=tuple(prediction[:MAX_MODEL_LEN]))
        elif n == 1 and resume:
            request = GenerateRequest(
                request_id=f"r{number}", prompt_ids=prompt, sampling=sampling, output_ids=tuple(output[:resume])
            )
        deadline, first = (None if wait is None else self.sim.now + wait for wait in waits)
        given = {"deadline": deadline, "first_token_deadline": first, "tenant": tenant, "share": share}
        self.sim.add(msgspec.structs.replace(request, **given))

    @rule()
    def plan(self) -> None:
        self.sim.plan()

    @precondition(lambda self: self.sim.outstanding)
    @rule()
    def apply(self) -> None:
        self.sim.apply()

    @precondition(lambda self: self.sim.outstanding)
    @rule()
    def lose_memory(self) -> None:
        ended = {delta.request_id for delta in self.sim.lose_memory()}
        assert len(ended) <= 1
        assert not self.sim.scheduler.stats().running

    @rule(steps=st.integers(1, 6))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.sim.step()

    def live(self) -> list[tuple[str, int]]:
        dropped = self.sim.dropped
        return [key for key, each in self.sim.outputs.items() if each.finish_reason is None and key[0] not in dropped]

    @precondition(lambda self: self.live())
    @rule(data=st.data(), keep=st.integers(0, 10))
    def finish(self, data: st.DataObject, keep: int) -> None:
        key = data.draw(st.sampled_from(self.live()))
        keep = min(keep, len(self.sim.outputs[key].token_ids))
        self.sim.finish(*key, keep)
        self.kept[key] = keep

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.sim.abort(data.draw(st.sampled_from(self.live()))[0])

    @rule(share=st.floats(0.0, 1.0))
    def resize(self, share: float) -> None:
        """To any size in which one sequence fits."""
        scheduler = self.sim.scheduler
        needs = scheduler._cache.demand(MAX_MODEL_LEN - 1)
        pools = zip(needs, scheduler._cache.pools, strict=True)
        scheduler.resize(tuple(need + 1 + int(share * (pool.size - need - 1)) for need, pool in pools))
        check_scheduler(scheduler)

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.004]))
    def limit_steps(self, seconds: float) -> None:
        self.sim.scheduler.limit_steps(seconds)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.sim.scheduler.reset_prefix_cache()
        check_scheduler(self.sim.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "sim"):
            return
        self.sim.run()
        self.sim.check_drained()
        for (name, choice), output in self.sim.outputs.items():
            request = self.sim.requests[name]
            if name in self.sim.dropped and output.finish_reason is None:
                assert request.deadline is not None or request.first_token_deadline is not None
                assert output.token_ids == [*request.output_ids]
            elif (name, choice) in self.kept:
                expected, _ = expected_output(request, choice, MAX_MODEL_LEN)
                assert output.token_ids == expected[: self.kept[name, choice]]
            elif output.finish_reason in ("abort", "error"):
                expected, _ = expected_output(request, choice, MAX_MODEL_LEN)
                assert output.token_ids == expected[: len(output.token_ids)]
            else:
                self.sim.check_output(name, choice)
                self.check_prompt_logprobs(request, choice, output.prompt_logprobs)

    def check_prompt_logprobs(self, request: GenerateRequest, choice: int, rows: bytes) -> None:
        asked = choice == 0 and request.sampling.prompt_logprobs is not None
        complete = b"".join(map(logprob_row, request.prompt_ids[1:]))
        done_before = len(self.sim.outputs[request.request_id, choice].token_ids) == len(request.output_ids)
        if not done_before:
            assert rows == (complete if asked else b"")


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=int(os.environ.get("PENSTOCK_TEST_EXAMPLES", "150")), stateful_step_count=30
)
