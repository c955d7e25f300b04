"""An executor without a model. It checks every plan, and its tokens and step times are functions of the plan."""

from collections import deque
from collections.abc import Callable, Sequence

from penstock.messages import (
    Capacity,
    Clock,
    Grammar,
    NewSequence,
    SamplingParams,
    SequenceResult,
    StepPlan,
    StepResult,
    StepTiming,
    Work,
)
from penstock.schedule import SchedulerConfig
from tests.plan_checks.slots import KVSlots, PlanError
from tests.plan_checks.tokens import SimulatedSequence, hashed_token, logprob_row, prefix_hashes


class SimulatedExecutor:
    """An Executor that never blocks. A plan takes `seconds(plan)` on `clock`, and PlanError reports a wrong plan.

    A plan starts when it is submitted or when the plan before it ends, whichever is later. Its result can be taken at
    its end (`result_at`).
    """

    def __init__(
        self,
        capacity: Capacity,
        limits: SchedulerConfig,
        clock: Clock,
        *,
        seconds: Callable[[StepPlan], float] = lambda plan: 0.0,
        next_token: Callable[[SimulatedSequence], int] = hashed_token,
        fails: Callable[[SamplingParams, int, int], bool] = lambda sampling, choice, length: False,
        checks_slots: bool = True,
    ) -> None:
        """`fails(sampling, choice, tokens so far)`: whether a sequence fails in this step and all later ones.
        `checks_slots`: check each slot of the KV cache (see slots.py), in time quadratic in a sequence's length."""
        self.capacity = capacity
        self._limits = limits
        self._clock = clock
        self._seconds, self._next_token, self._fails = seconds, next_token, fails
        self._sequences: dict[int, SimulatedSequence] = {}
        self._slots = KVSlots(capacity, self._sequences) if checks_slots else None
        self.outstanding: deque[tuple[float, StepResult]] = deque()  # (when the result can be taken, result)
        self._last_plan = 0
        self._free_at = 0.0  # when the last plan ends

    def start(self) -> Capacity:
        return self.capacity

    def prepare(self, grammar: Grammar) -> bool:
        """Always True: no token depends on a grammar."""
        return True

    def submit(self, plan: StepPlan) -> None:
        """Check a plan and compute its result. Raises PlanError."""
        self._check(plan)
        self._last_plan = plan.plan_id
        unknown = self._sampled()
        if not self.capacity.late_ids:
            self._check_stage(plan, unknown)
        if self._slots is not None:
            self._slots.submitted()
        self._update(plan)
        results = tuple([self._compute(work, unknown) for work in plan.work])
        seconds = self._seconds(plan)
        self._free_at = max(self._clock(), self._free_at) + seconds
        self.outstanding.append((self._free_at, StepResult(plan.plan_id, results, StepTiming(seconds, 0.0, seconds))))

    @property
    def result_at(self) -> float:
        """See Executor."""
        return self.outstanding[0][0]

    def result(self) -> StepResult:
        """Return the oldest result. Raises RuntimeError before `result_at`."""
        if self._clock() < self.result_at:
            raise RuntimeError(f"it is {self._clock()} s, and the result comes at {self.result_at} s")
        if self._slots is not None:
            self._slots.taken()
        return self.outstanding.popleft()[1]

    def recover(self, error: Exception) -> bool:
        """Forget everything after a MemoryError, which a subclass may raise."""
        if not isinstance(error, MemoryError):
            return False
        self._sequences.clear()
        self.outstanding.clear()
        self._free_at = 0.0
        if self._slots is not None:
            self._slots.forget()
        return True

    def trim(self, limits: Sequence[int]) -> None:
        """Does nothing: there is no memory."""

    def health(self) -> None:
        """Never raises."""

    def close(self) -> None:
        """Does nothing: there is nothing to free."""

    # -- one plan ---------------------------------------------------------------------------------------------

    def _check(self, plan: StepPlan) -> None:
        """Raise PlanError if the plan has the wrong number, is one too many, or is larger than a step may be."""
        if plan.plan_id != self._last_plan + 1:
            raise PlanError(f"plan {plan.plan_id} follows plan {self._last_plan}")
        if len(self.outstanding) >= self.capacity.depth:
            raise PlanError(f"plan {plan.plan_id} is one too many: {self.capacity.depth} may be outstanding")
        tokens, most = sum([work.count for work in plan.work]), self._limits.max_num_batched_tokens
        if not 0 < tokens <= most:
            raise PlanError(f"a plan computes {tokens} tokens: 1 to {most} are allowed")
        if len({work.seq for work in plan.work}) < len(plan.work):
            raise PlanError(f"a sequence has two units of work in one plan: {plan.work}")

    def _sampled(self) -> set[int]:
        """Return the sequences whose last tokens the scheduler does not have: outstanding plans sample them."""
        return {given.seq for _, result in self.outstanding for given in result.results if given.token_ids}

    def _check_stage(self, plan: StepPlan, unknown: set[int]) -> None:
        """Raise PlanError if a pipeline's plan needs a token of an outstanding plan, or has more than its share of the
        tokens."""
        if late := unknown & {work.seq for work in plan.work}:
            raise PlanError(f"the last tokens of sequences {sorted(late)} are not known yet")
        tokens = sum([work.count for work in plan.work])
        share = -(-self._limits.max_num_batched_tokens // self.capacity.depth)
        if tokens > share:
            raise PlanError(f"a plan computes {tokens} tokens: the share of one in {self.capacity.depth} is {share}")

    def _update(self, plan: StepPlan) -> None:
        """Apply the plan's changes to sequences, block tables and pages."""
        for seq in plan.gone:
            del self._sequences[self._known(seq).seq]
        for new in plan.new:
            self._introduce(new)
        for seq, blocks in plan.blocks:
            if not any(blocks):
                raise PlanError(f"sequence {seq} gets no block")
            for table, ids in zip(self._known(seq).tables, blocks, strict=True):
                table.extend(ids)
        if self._slots is not None and plan.copies:
            self._slots.copy(plan.copies)
        if len(self._sequences) > self._limits.max_num_seqs:
            raise PlanError(f"{len(self._sequences)} sequences, max_num_seqs={self._limits.max_num_seqs}")

    def _known(self, seq: int) -> SimulatedSequence:
        if seq not in self._sequences:
            raise PlanError(f"sequence {seq} is unknown")
        return self._sequences[seq]

    def _introduce(self, new: NewSequence) -> None:
        if new.seq in self._sequences:
            raise PlanError(f"sequence {new.seq} is not new")
        if not 0 <= new.num_computed < len(new.token_ids):
            raise PlanError(f"sequence {new.seq} has {len(new.token_ids)} tokens, computed: {new.num_computed}")
        self._sequences[new.seq] = SimulatedSequence(
            new.seq,
            list(new.token_ids),
            new.num_prompt,
            new.num_computed,
            [list(table) for table in new.blocks],
            new.sampling,
            new.choice,
        )

    def _compute(self, work: Work, unknown: set[int]) -> SequenceResult:
        """Return the result of one unit of work. Raises PlanError."""
        sequence = self._known(work.seq)
        tokens, start = sequence.tokens, sequence.position
        end = start + work.count - work.drafts
        if end <= start or (end != len(tokens) if work.sample else end >= len(tokens) or work.drafts):
            raise PlanError(f"{work} does not fit {len(tokens)} tokens, of which {start} are computed")
        if work.drafts and work.seq in unknown:
            raise PlanError(f"drafts of sequence {work.seq} do not follow its last token")
        sequence.failed = sequence.failed or self._fails(sequence.sampling, sequence.choice, len(tokens))
        if sequence.failed:
            return self._fail(sequence, work)
        if self._slots is not None:
            hashes = sequence.hashes()
            if work.drafts:
                hashes = [*hashes, *prefix_hashes(work.draft_ids, hashes[-1])]
            self._slots.compute(sequence, hashes, work.count)
        sequence.position = end
        prompt_logprobs = b""
        if (top := sequence.sampling.prompt_logprobs) is not None:
            scored = tokens[start + 1 : min(end + 1, sequence.num_prompt)]
            prompt_logprobs = b"".join([logprob_row(token, top) for token in scored])
        if not work.sample:
            return SequenceResult(work.seq, prompt_logprobs=prompt_logprobs)
        accepted = self._sample(sequence, work)
        top = sequence.sampling.logprobs
        logprobs = b"" if top is None else b"".join([logprob_row(token, top) for token in accepted])
        return SequenceResult(work.seq, accepted, logprobs, prompt_logprobs)

    def _sample(self, sequence: SimulatedSequence, work: Work) -> tuple[int, ...]:
        """Append the next token, and one more for each accepted draft. Raises PlanError beyond the length limits."""
        tokens, before = sequence.tokens, len(sequence.tokens)
        for draft in (*work.draft_ids, None):
            tokens.append(self._next_token(sequence))
            if tokens[-1] != draft:
                break
        sequence.position = len(tokens) - 1
        limit = min(sequence.num_prompt + sequence.sampling.max_tokens, self._limits.max_model_len)
        if len(tokens) > limit:
            raise PlanError(f"sequence {sequence.seq} is planned to {len(tokens)} tokens, its limit is {limit}")
        return tuple(tokens[before:])

    def _fail(self, sequence: SimulatedSequence, work: Work) -> SequenceResult:
        """Return an error in place of a result, after storing garbage in the sequence's slots."""
        if self._slots is not None:
            self._slots.spoil(sequence, work.count)
        sequence.position += work.count
        if work.sample:
            sequence.tokens += [0] * (sequence.position + 1 - len(sequence.tokens))
        return SequenceResult(sequence.seq, error="simulated failure")
