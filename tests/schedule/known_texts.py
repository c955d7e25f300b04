"""An executor that knows every output beforehand, on a virtual clock whose steps take what a cost function says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.messages import (
    Capacity,
    EngineStats,
    GenerateRequest,
    Identity,
    KVGroup,
    SamplingParams,
    SequenceResult,
    StepPlan,
    StepResult,
    Work,
)
from penstock.schedule import EventLog, Scheduler, SchedulerConfig

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


@dataclass
class KnownTexts:
    """Answers plans from the known outputs."""

    texts: dict[tuple[int, ...], list[int]]  # prompt -> prompt and output
    rows: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)  # tokens so far, and all
    forced: Forced | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        for seq in plan.gone:
            del self.rows[seq]
        for new in plan.new:
            self.rows[new.seq] = list(new.token_ids), self.texts[new.token_ids[: new.num_prompt]]
        results = tuple(SequenceResult(work.seq, self._next(work)) for work in plan.work)
        forced = [(work.seq, self.forced(*self.rows[work.seq])) for work in plan.work if self.forced is not None]
        return StepResult(plan.plan_id, results, forced=tuple(each for each in forced if each[1]))

    def _next(self, work: Work) -> tuple[int, ...]:
        if not work.sample:
            return ()
        tokens, whole = self.rows[work.seq]
        given: list[int] = []
        for draft in (*work.draft_ids, None):
            given.append(whole[len(tokens)] if len(tokens) < len(whole) else 0)
            tokens.append(given[-1])
            if given[-1] != draft:
                break
        return tuple(given)


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
    capacity = Capacity(16, (KVGroup(blocks),), 1, Identity("known"), vocab_size=1 << 20)
    scheduler = Scheduler(config, capacity, log=log)
    executor = KnownTexts({tuple(text.prompt): [*text.prompt, *text.output] for text in texts}, forced=forced)
    outputs: list[list[int]] = [[] for _ in texts]
    ended = [0.0 for _ in texts]
    now, sent, running = 1.0, 0, 0
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
                now,
            )
            sent, running = sent + 1, running + 1
        plan = scheduler.plan(now)
        assert plan is not None
        result = executor.execute(plan)
        now += cost(len(plan.work), sum(work.count for work in plan.work))
        for delta in scheduler.apply(result, now):
            outputs[int(delta.request_id)] += delta.token_ids
            if delta.finish_reason is not None:
                running -= 1
                ended[int(delta.request_id)] = now - 1.0
    return Outcome(now - 1.0, scheduler.stats(), outputs, ended)
