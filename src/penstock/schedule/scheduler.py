"""The scheduler: a state machine from events to plans. No clock, no threads, no I/O; time is an argument."""

from collections import deque
from functools import partial

from penstock.messages import (
    Capacity,
    EngineStats,
    FinishReason,
    GenerateRequest,
    RequestRejected,
    SequenceResult,
    StepPlan,
    StepResult,
    TokenDelta,
    Work,
    row_size,
)
from penstock.schedule import log as events
from penstock.schedule.admission import check_memory, check_request
from penstock.schedule.cache import KVCache
from penstock.schedule.config import SchedulerConfig
from penstock.schedule.drafts.speculation import NO_DRAFTS, Speculation
from penstock.schedule.late import first_due, late_requests
from penstock.schedule.leases import BlockLeases
from penstock.schedule.live_requests import LiveRequests
from penstock.schedule.log import Event, EventLog, plan_digest
from penstock.schedule.planner import Planner
from penstock.schedule.policy import DueOrder, Policy
from penstock.schedule.sequence import Phase, Request, Sequence
from penstock.schedule.step import Outstanding
from penstock.schedule.step_model import StepModel, StepSize


class Scheduler:
    """Plans the steps of one executor. Up to `capacity.depth` plans may be outstanding."""

    def __init__(
        self,
        config: SchedulerConfig,
        capacity: Capacity,
        *,
        log: EventLog | None = None,
        incarnation: int = 0,
        policy: Policy | None = None,
    ) -> None:
        """Without `policy`, the order is DueOrder. A replay always uses DueOrder, since the log names no policy."""
        self._config = config
        self._depth = capacity.depth
        self._vocab_size = capacity.vocab_size
        self._log = log
        self._incarnation = incarnation
        self._output = capacity.output
        self._cache = KVCache(capacity, config.enable_prefix_caching)
        self.watch_blocks, self.block_changes = self._cache.watch, self._cache.changes  # see there
        self.leases = BlockLeases(self._cache, self._record)
        self._live = LiveRequests(policy or DueOrder(), config, capacity.block_size)
        self.first_due = partial(first_due, self._live, config.max_num_seqs)  # see there
        self._charge = self._live.waiting.charge
        self._speculation = Speculation(config, self._cache) if config.speculation != "off" else None
        self._model = StepModel()
        self._learns = config.target_step_time > 0  # step times are measured; also once a request has had a deadline
        self._planner = Planner(config, capacity, self._cache, self._live, self._speculation, self._model)
        self._applied_at = 0.0  # when the last result came
        self._outstanding: deque[Outstanding] = deque()
        self._sizes: deque[StepSize] = deque()  # of the outstanding plans, from the first one that is measured
        self._next_sequence = self._next_plan = 1
        self._steps = self._computed_tokens = self._decode_tokens = 0
        self._record(events.Started(config, capacity, incarnation))

    # -- requests come and go ---------------------------------------------------------------------------------

    def add(self, request: GenerateRequest, now: float) -> list[TokenDelta]:
        """Queue a request. Raises RequestRejected if it can never be served.

        Returns the deltas of choices that have ended already: a resumed request may bring its last token with it.
        """
        if request.request_id in self._live.requests:
            raise RequestRejected(f"request id {request.request_id!r} is in use: give every request its own id")
        check_request(request, self._config, self._vocab_size, self._output)
        state = Request(request, request.arrival or now, self._cache.keys.root(request.cache_salt))
        for i in range(request.n):
            choice = request.first_choice + i
            state.choices[choice] = Sequence(self._next_sequence + i, state, choice, self._config.max_model_len)
        ended = [(s, reason) for s in state.choices.values() if (reason := s.ended_before()) is not None]
        if len(ended) < request.n:
            check_memory(request, self._config, self._cache)
        self._record(events.Added(request, now))
        self._next_sequence += request.n
        self._live.add(state)
        self._learns = self._learns or request.deadline is not None or request.first_token_deadline is not None
        return [
            self._end(s, reason, s.num_output, now, stop_token=s.tokens[-1] if reason == "stop" else None)
            for s, reason in ended
        ]

    def finish(self, request_id: str, choice: int, reason: FinishReason, keep: int, now: float) -> list[TokenDelta]:
        """End one choice and keep its first `keep` output tokens. Unknown ids are ignored."""
        state = self._live.requests.get(request_id)
        sequence = state.choices.get(choice) if state is not None else None
        if sequence is None:
            return []
        self._record(events.Finished(request_id, choice, reason, keep, now))
        return [self._end(sequence, reason, min(max(keep, 0), sequence.num_output), now)]

    def abort(self, request_id: str, now: float) -> list[TokenDelta]:
        """End all choices of a request. Unknown ids are ignored."""
        state = self._live.requests.get(request_id)
        if state is None:
            return []
        self._record(events.Aborted(request_id, now))
        return self._end_request(state, "abort", "", now)

    def drop_late(self, now: float) -> list[tuple[str, float]]:
        """End waiting requests that would miss their deadline even if they started now. Return the id of each, and by
        how many seconds it would be late. Only requests that the next step can start are checked."""
        if not self._learns or not self._live.waiting:
            return []
        late = late_requests(self._live, self._cache, self._config, self._model, now)
        for state, _ in late:
            self._end_request(state, "error", "", now)
        if late:
            self._record(events.Dropped(now))
        return [(state.message.request_id, seconds) for state, seconds in late]

    def reset_prefix_cache(self) -> None:
        """Forget what is cached; running sequences keep their blocks."""
        self._record(events.CacheReset())
        self._cache.forget()

    def resize(self, limits: tuple[int, ...]) -> None:
        """See Planner.resize."""
        self._planner.resize(limits)
        self._record(events.Resized(limits))

    def limit_steps(self, seconds: float) -> None:
        """Plan steps with prompts that take no longer than this, also if nothing decodes. 0: as configured."""
        self._record(events.StepsLimited(seconds))
        self._planner.longest_step, self._learns = seconds, True

    # -- planning ---------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """Return the next step, or None when there is nothing to do until a request is added or a result applied."""
        if len(self._outstanding) >= self._depth or not self._live.requests:
            return None
        if self._log is not None:
            self._log.append(events.Planned(now))
        step = self._planner.next_step(self._outstanding, now)
        if not step.work:
            return None
        if self._learns:
            self._sizes.append(StepSize.of(step))
        gone = self._planner.gone
        plan, outstanding = step.seal(self._next_plan, tuple(gone), now)
        if gone:
            gone.clear()
        self._next_plan += 1
        self._outstanding.append(outstanding)
        self._cache.submitted(plan.plan_id)
        if self._log is not None:
            self._log.append(events.Submitted(plan.plan_id, plan_digest(plan)))
        return plan

    def begun(self, plan: StepPlan) -> list[str]:
        """Return the ids of the requests whose sequences start with `plan`, which must be the latest one."""
        new = {sequence.seq for sequence in plan.new}
        return [each.request_id for each in self._outstanding[-1].sequences if each.id in new]

    # -- results ----------------------------------------------------------------------------------------------

    def apply(self, result: StepResult, now: float) -> list[TokenDelta]:
        """Apply the result of the oldest outstanding plan. Raises ValueError for any other result, after which this
        scheduler cannot go on."""
        if not self._outstanding:
            raise ValueError(f"plan {result.plan_id} is answered, but no plan is outstanding")
        step = self._outstanding[0]
        if result.plan_id != step.plan_id or len(result.results) != len(step.work):
            answers, due = f"{len(result.results)} results", f"{len(step.work)} for plan {step.plan_id}"
            raise ValueError(f"plan {result.plan_id} is answered with {answers}; due are {due}")
        if self._log is not None:
            self._log.append(events.Applied(result, now))
        self._outstanding.popleft()
        began, self._applied_at = max(step.planned_at, self._applied_at), now
        if self._speculation is not None:
            overlapped = self._outstanding or began > step.planned_at
            self._speculation.note(step, result, None if overlapped else now - began)
        if self._sizes and len(self._sizes) > len(self._outstanding):
            self._model.note(self._sizes.popleft(), now - began)
        self._cache.applied(step.plan_id, step.tails)
        self._steps += 1
        self._computed_tokens += step.num_tokens
        self._decode_tokens += step.decodes
        if self._charge is not None:
            self._charge(step, result.results, now)
        deltas: list[TokenDelta] = []
        incarnation = self._incarnation
        for sequence, work, given in zip(step.sequences, step.work, result.results, strict=True):
            ids, length = given.token_ids, len(sequence.tokens)
            # The common case, written out: a decode step whose token does not end the sequence.
            if (
                work is sequence.decode
                and length < sequence.plain_below
                and len(ids) == 1
                and given.seq == sequence.id
                and ids[0] not in sequence.stops
            ):
                sequence.tokens += ids
                sequence.computed = length
                sequence.last_token = now
                if length >= sequence.next_fill:
                    self._cache.settle(sequence)
                at = length - sequence.num_prompt
                deltas.append(
                    TokenDelta(
                        sequence.request_id, sequence.choice, at, ids, logprobs=given.logprobs, incarnation=incarnation
                    )
                )
                continue
            step.check(work, given)
            if sequence.phase is Phase.DONE:
                continue
            if given.error:
                deltas += self._end_request(sequence.request, "error", given.error, now)
            elif (delta := self._advance(sequence, work, given, now)) is not None:
                deltas.append(delta)
        return deltas

    def start_over(self, error: str, now: float) -> list[TokenDelta]:
        """Start all sequences over, because the executor has forgotten them: the outstanding plans have no results. The
        request with most tokens in the newest plan ends with `error`; all others are preempted."""
        self._record(events.StartedOver(error, now))
        largest = self._outstanding[-1].largest()
        for step in self._outstanding:
            self._cache.applied(step.plan_id, step.tails)
            if self._speculation is not None:
                self._speculation.dropped(step)
        self._outstanding, self._sizes = deque(), deque()
        self._planner.start_over()
        return [] if largest is None else self._end_request(largest.request, "error", error, now)

    def _advance(self, sequence: Sequence, work: Work, given: SequenceResult, now: float) -> TokenDelta | None:
        """Apply the result of one unit of work. Return its delta, or None if there is nothing for the client."""
        running = sequence.phase is Phase.RUNNING
        if not running and sequence.wants_rows:
            return None  # preempted meanwhile, and the whole prompt is to be computed again before the first delta
        ids, logprobs = given.token_ids, given.logprobs
        tokens, length = sequence.tokens, len(sequence.tokens)
        reason: FinishReason | None = None
        for token in ids:
            tokens.append(token)
            if token in sequence.stops and len(tokens) > sequence.min_length:
                reason = "stop"
                break
            if len(tokens) >= sequence.limit:
                reason = "length"
                break
        if running:
            self._confirm(sequence, work, given)
            if not ids and sequence.computed + 1 >= sequence.limit:
                reason = "length"  # nothing was to be sampled
        else:
            sequence.expected = len(tokens)
        if given.pooled:
            reason = "stop"
        if not ids and reason is None:
            return None
        if len(ids) > len(tokens) - length:  # it ended before the last of several accepted tokens
            ids = ids[: len(tokens) - length]
            logprobs = logprobs[: len(ids) * row_size(sequence.request.message.sampling.logprobs or 0)]
        sequence.last_token = now
        prompt_logprobs = b"" if sequence.first_token >= 0 else self._first_token(sequence, now)
        timing = None
        if reason is not None:
            timing = sequence.timing(now)
            self._remove(sequence)
        return TokenDelta(
            sequence.request_id,
            sequence.choice,
            length - sequence.num_prompt,
            ids,
            reason,
            ids[-1] if ids and reason == "stop" else None,
            sequence.request.cached_tokens,
            logprobs,
            prompt_logprobs,
            "",
            timing,
            self._incarnation,
            given.pooled,
        )

    def _confirm(self, sequence: Sequence, work: Work, given: SequenceResult) -> None:
        """Count the unit's tokens as computed, except refused drafts."""
        if given.prompt_logprobs:
            sequence.add_rows(given.prompt_logprobs)
        computed = sequence.computed + work.count
        if work.draft_ids:
            refused = 1 + len(work.draft_ids) - len(given.token_ids)
            if sequence.usage is not None:
                sequence.usage.rejected += refused
            sequence.planned -= refused
            sequence.expected -= refused
            # Accepted drafts after the token that ended the sequence do not count either.
            computed = min(computed - refused, len(sequence.tokens))
        sequence.computed = computed
        if computed >= sequence.next_fill:
            self._cache.settle(sequence)
        if given.token_ids and computed == len(sequence.tokens) - 1:
            sequence.plain_below = sequence.limit - 1

    def _first_token(self, sequence: Sequence, now: float) -> bytes:
        """Note that the prompt is computed, and queue the request's other choices. Return the prompt's logprobs."""
        sequence.first_token = now
        self._live.release(sequence.request)
        rows, sequence.rows = sequence.rows, None
        return bytes(rows or b"")

    # -- ends -------------------------------------------------------------------------------------------------

    def _end_request(self, state: Request, reason: FinishReason, error: str, now: float) -> list[TokenDelta]:
        return [self._end(s, reason, s.num_output, now, error=error) for s in list(state.choices.values())]

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        keep: int,
        now: float,
        *,
        error: str = "",
        stop_token: int | None = None,
    ) -> TokenDelta:
        """End a choice with no further token."""
        timing = sequence.timing(now)
        self._remove(sequence)
        return TokenDelta(
            *(sequence.request_id, sequence.choice, keep, (), reason, stop_token, sequence.request.cached_tokens),
            error=error,
            timing=timing,
            incarnation=self._incarnation,
        )

    def _remove(self, sequence: Sequence) -> None:
        if sequence.phase is Phase.RUNNING:
            self._planner.forget(sequence)
        if self._speculation is not None:
            self._speculation.ended(sequence)
        self._live.remove(sequence)

    # -- inspection -------------------------------------------------------------------------------------------

    def has(self, request_id: str) -> bool:
        """Return whether a request is here and has not ended."""
        return request_id in self._live.requests

    @property
    def has_work(self) -> bool:
        """True while a plan is outstanding or a request has not ended."""
        return bool(self._live.requests or self._outstanding)

    @property
    def num_running(self) -> int:
        """The number of sequences that have blocks and take part in steps."""
        return len(self._live.running)

    @property
    def prompt_tokens(self) -> int:
        """The tokens computed so far that continue no output."""
        return self._computed_tokens - self._decode_tokens

    def stats(
        self, step_seconds: float = 0.0, forward_seconds: float = 0.0, sample_seconds: float = 0.0
    ) -> EngineStats:
        """Return gauges and counters. The engine measures the seconds and passes them in."""
        drafts = NO_DRAFTS if self._speculation is None else self._speculation.counts
        return EngineStats(
            steps=self._steps,
            running=len(self._live.running),
            waiting=len(self._live.waiting),
            blocks_total=self._cache.blocks_total,
            blocks_held=tuple([pool.held for pool in self._cache.pools]),
            blocks_cached=tuple([pool.reusable for pool in self._cache.pools]),
            preemptions=self._planner.preemptions,
            prefix_queries=self._planner.prefix_queries,
            prefix_hits=self._planner.prefix_hits,
            computed_tokens=self._computed_tokens,
            decode_tokens=self._decode_tokens,
            drafts=drafts.units,
            draft_tokens=drafts.tokens,
            accepted_tokens=drafts.accepted,
            accepted_at=drafts.accepted_at,
            step_seconds=step_seconds,
            forward_seconds=forward_seconds,
            sample_seconds=sample_seconds,
        )

    def _record(self, event: Event) -> None:
        if self._log is not None:
            self._log.append(event)
