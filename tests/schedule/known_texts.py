"""An executor that knows every output beforehand, on a virtual clock whose steps take what a cost function says."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from penstock.messages import (
    Capacity,
    Clock,
    EngineStats,
    GenerateRequest,
    KVGroup,
    SamplingParams,
    StepResult,
)
from penstock.schedule import EventLog, Scheduler, SchedulerConfig
from tests.plan_checks import SimulatedExecutor, SimulatedSequence, VirtualClock

Cost = Callable[[int, int], float]  # (sequences, rows) -> seconds
Forced = Callable[[list[int], list[int]], tuple[int, ...]]  # (tokens so far, all) -> those that a grammar forces next


class Text(NamedTuple):
    """A request: prompt, output and, where the client expects one, the predicted output."""

    prompt: Sequence[int]
    output: Sequence[int]
    prediction: Sequence[int] = ()
    tenant: str = ""


class Outcome(NamedTuple):
    seconds: float
    stats: EngineStats
    outputs: list[list[int]]
    ended: list[float]  # when each text was complete


class KnownTexts(SimulatedExecutor):
    """Gives the known outputs, and says what a grammar forces next. A step takes `cost(sequences, rows)`."""

    def __init__(
        self,
        texts: Sequence[Text],
        limits: SchedulerConfig,
        clock: Clock,
        cost: Cost,
        *,
        blocks: int = 4096,
        forced: Forced | None = None,
    ) -> None:
        super().__init__(
            Capacity(16, (KVGroup(blocks),), vocab_size=1 << 20),
            limits,
            clock,
            seconds=lambda plan: cost(len(plan.work), sum(work.count for work in plan.work)),
            next_token=self._next,
            checks_slots=False,
        )
        self._texts = {tuple(text.prompt): [*text.prompt, *text.output] for text in texts}
        self._forced = forced

    def result(self) -> StepResult:
        result = super().result()
        if self._forced is None:
            return result
        sequences = [self._sequences[given.seq] for given in result.results]
        forced = ((each.seq, self._forced(each.tokens, self._whole(each))) for each in sequences)
        return msgspec.structs.replace(result, forced=tuple(each for each in forced if each[1]))

    def _next(self, sequence: SimulatedSequence) -> int:
        whole, at = self._whole(sequence), len(sequence.tokens)
        return whole[at] if at < len(whole) else 0

    def _whole(self, sequence: SimulatedSequence) -> list[int]:
        return self._texts[tuple(sequence.tokens[: sequence.num_prompt])]


def serve(
    texts: Sequence[Text],
    cost: Cost,
    speculation: str,
    *,
    batch: int = 1,
    max_num_seqs: int = 32,
    blocks: int = 4096,
    log: EventLog | None = None,
    most: int = 31,
    forced: Forced | None = None,
) -> Outcome:
    """Serve `texts`, `batch` at a time; each is sent when another has ended."""
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512,
        max_model_len=4096,
        enable_prefix_caching=False,
        speculation=speculation,  # type: ignore[arg-type]
        num_speculative_tokens=most if speculation != "off" else 0,
        max_step_drafts=32 if speculation != "off" else 0,
    )
    clock = VirtualClock(1.0)
    executor = KnownTexts(texts, config, clock, cost, blocks=blocks, forced=forced)
    scheduler = Scheduler(config, executor.capacity, log=log)
    outputs: list[list[int]] = [[] for _ in texts]
    ended = [0.0 for _ in texts]
    sent, running = 0, 0
    while running or sent < len(texts):
        while running < batch and sent < len(texts):
            text = texts[sent]
            scheduler.add(
                GenerateRequest(
                    request_id=str(sent),
                    prompt_ids=tuple(text.prompt),
                    sampling=SamplingParams(seed=0, max_tokens=len(text.output), temperature=0.0),
                    prediction_ids=tuple(text.prediction),
                    tenant=text.tenant,
                ),
                clock.now,
            )
            sent, running = sent + 1, running + 1
        plan = scheduler.plan(clock.now)
        assert plan is not None
        executor.submit(plan)
        clock.now = executor.result_at
        for delta in scheduler.apply(executor.result(), clock.now):
            outputs[int(delta.request_id)] += delta.token_ids
            if delta.finish_reason is not None:
                running -= 1
                ended[int(delta.request_id)] = clock.now - 1.0
    return Outcome(clock.now - 1.0, scheduler.stats(), outputs, ended)
