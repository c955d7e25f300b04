"""A loop that runs the scheduler and the simulated executor on a virtual clock."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from penstock.messages import (
    Capacity,
    GenerateRequest,
    Identity,
    KVGroup,
    SamplingParams,
    StepPlan,
    TokenDelta,
    Window,
)
from penstock.schedule import EventLog, Scheduler, SchedulerConfig
from penstock.schedule.policy import Policy
from tests.plan_checks import VOCABULARY, SimulatedExecutor, logprob_row, mix, prefix_hashes, sample
from tests.schedule.invariants import check_scheduler


@dataclass
class Output:
    """What a client has of one choice."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: bytes = b""
    prompt_logprobs: bytes = b""
    finish_reason: str | None = None
    final: TokenDelta | None = None


class Simulation:
    """A scheduler, its executor and a clock that moves with the tokens computed. Everything is checked all the time."""

    def __init__(
        self,
        config: SchedulerConfig,
        capacity: Capacity,
        *,
        log: EventLog | None = None,
        policy: Policy | None = None,
        **executor: Any,
    ) -> None:
        self.config = config
        self.capacity = capacity
        self.scheduler = Scheduler(config, capacity, log=log, policy=policy)
        self.executor = SimulatedExecutor(capacity, config, lambda: self.now, **executor)
        self.now = 0.0
        self.token_seconds = 0.0001
        self.plans: list[StepPlan] = []
        self.dropped: list[str] = []  # requests that would have been late
        self.step_seconds: Callable[[StepPlan], float] = lambda plan: (
            0.001 + self.token_seconds * sum(work.count for work in plan.work)
        )
        self.requests: dict[str, GenerateRequest] = {}
        self.outputs: dict[tuple[str, int], Output] = {}

    @property
    def outstanding(self) -> int:
        return len(self.executor.outstanding)

    def add(self, request: GenerateRequest) -> None:
        deltas = self.scheduler.add(request, self.now)
        self.requests[request.request_id] = request
        for i in range(request.n):
            self.outputs[request.request_id, request.first_choice + i] = Output(list(request.output_ids))
        self._take(deltas)

    def finish(self, request_id: str, choice: int, keep: int) -> None:
        self._take(self.scheduler.finish(request_id, choice, "stop", keep, self.now))

    def abort(self, request_id: str) -> None:
        self._take(self.scheduler.abort(request_id, self.now))

    def plan(self) -> StepPlan | None:
        """Plan and submit. Fails where there is work, nothing is outstanding and yet nothing is planned."""
        self.dropped += [name for name, _ in self.scheduler.drop_late(self.now)]
        plan = self.scheduler.plan(self.now)
        check_scheduler(self.scheduler)
        if plan is None:
            assert self.outstanding or not self.scheduler.has_work, "no progress"
            return None
        self.plans.append(plan)
        self.executor.submit(plan)
        self.now += self.step_seconds(plan)
        return plan

    def apply(self) -> list[TokenDelta]:
        deltas = self.scheduler.apply(self.executor.result(), self.now)
        self._take(deltas)
        return deltas

    def lose_memory(self) -> list[TokenDelta]:
        """The newest plan has failed for lack of memory."""
        self.executor.recover(MemoryError())
        deltas = self.scheduler.start_over("no memory", self.now)
        check_scheduler(self.scheduler)
        self._take(deltas)
        return deltas

    def step(self) -> list[TokenDelta]:
        """Plan as far ahead as the depth allows, then apply one result."""
        while self.plan() is not None:
            pass
        return self.apply() if self.outstanding else []

    def run(self, limit: int = 10_000) -> None:
        """Until everything has ended."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {limit} steps")

    def check_drained(self) -> None:
        """Nothing runs, and no block is held by anybody."""
        assert not self.scheduler.has_work
        stats = self.scheduler.stats()
        assert stats.running == stats.waiting == 0
        assert set(stats.blocks_held) == {0}
        check_scheduler(self.scheduler)

    def check_output(self, request_id: str, choice: int = 0) -> None:
        """The choice has ended with exactly the tokens of no scheduling at all."""
        expected, reason = expected_output(self.requests[request_id], choice, self.config.max_model_len)
        output = self.outputs[request_id, choice]
        assert (output.token_ids, output.finish_reason) == (expected, reason)

    def _take(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            output = self.outputs[delta.request_id, delta.choice]
            assert output.finish_reason is None, "a delta after the last"
            if delta.finish_reason is None or delta.token_ids:
                assert delta.offset == len(output.token_ids), "tokens are missing or doubled"
            assert delta.offset <= len(output.token_ids)
            sampling = self.requests[delta.request_id].sampling
            if sampling.logprobs is not None:
                assert delta.logprobs == b"".join(map(logprob_row, delta.token_ids))
            output.token_ids[delta.offset :] = delta.token_ids
            output.prompt_logprobs += delta.prompt_logprobs
            if delta.finish_reason is not None:
                assert delta.timing is not None
                output.finish_reason, output.final = delta.finish_reason, delta
        check_scheduler(self.scheduler)


def request(request_id: str, prompt: Iterable[int] | int = 8, max_tokens: int = 8, **fields: Any) -> GenerateRequest:
    """A request whose prompt, where only its length is given, depends on the id. Fields go where they belong."""
    if isinstance(prompt, int):
        prompt = [mix(request_id, i) % VOCABULARY for i in range(prompt)]
    own = {name: fields.pop(name) for name in list(fields) if name in GenerateRequest.__struct_fields__}
    sampling = SamplingParams(**{"seed": mix(request_id) % 2**32, "max_tokens": max_tokens, **fields})
    return GenerateRequest(request_id=request_id, prompt_ids=tuple(prompt), sampling=sampling, **own)


def expected_output(request: GenerateRequest, choice: int, max_model_len: int) -> tuple[list[int], str]:
    """The tokens of a choice and why it ends, from no scheduling at all."""
    sampling = request.sampling
    output: list[int] = []
    last = prefix_hashes(request.prompt_ids)[-1]
    while len(output) < sampling.max_tokens and len(request.prompt_ids) + len(output) < max_model_len:
        token = sample(last, sampling, choice, len(output))
        last = mix(last, token)
        output.append(token)
        if token in sampling.stops() and len(output) > sampling.min_tokens:
            return output, "stop"
    return output, "length"


def simulation(
    *,
    blocks: int | tuple[int, ...] = 65,
    windows: tuple[int | Window, ...] = (0,),
    block_size: int = 4,
    depth: int = 1,
    late_ids: bool = True,
    executor: dict[str, Any] | None = None,
    log: EventLog | None = None,
    policy: Policy | None = None,
    **limits: Any,
) -> Simulation:
    """A small engine; `blocks` per group includes the null block."""
    counts = blocks if isinstance(blocks, tuple) else (blocks,) * len(windows)
    seen = (each if isinstance(each, Window) else Window(each) for each in windows)
    groups = tuple(map(KVGroup, counts, seen))
    capacity = Capacity(block_size, groups, depth, Identity("simulated"), vocab_size=2**32, late_ids=late_ids)
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64, **limits}
    return Simulation(SchedulerConfig(**limits), capacity, log=log, policy=policy, **(executor or {}))
