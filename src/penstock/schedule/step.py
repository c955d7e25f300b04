"""A step while it is planned, and while its plan is outstanding."""

import msgspec

from penstock.messages import BlockCopy, NewSequence, SequenceResult, StepPlan, Work
from penstock.schedule.sequence import Phase, Sequence


class Outstanding(msgspec.Struct, frozen=True):
    """A plan whose result has not been applied, with the data that `apply` needs."""

    plan_id: int
    planned_at: float  # seconds
    sequences: tuple[Sequence, ...]  # one for each of `work`
    work: tuple[Work, ...]
    num_tokens: int  # that the work computes
    decodes: int  # units that continue an output by one token, drafts aside
    tails: tuple[tuple[int, ...], ...]  # blocks it copies from, per group; held until then

    @staticmethod
    def check(work: Work, answer: SequenceResult) -> None:
        """Raise ValueError when `answer` is not one of this unit of work."""
        count, most = len(answer.token_ids), work.sample + len(work.draft_ids)
        answered = work.sample <= count <= most or answer.error or (answer.pooled and not count)
        if answer.seq != work.seq or not answered:
            raise ValueError(f"{count} tokens of sequence {answer.seq} do not answer {work}")

    def largest(self) -> Sequence | None:
        """The sequence with most tokens, of equal ones the last in order. None if all have ended."""
        units = zip(self.sequences, self.work, strict=True)
        live = [(work.count, sequence.order, sequence) for sequence, work in units if sequence.phase is not Phase.DONE]
        return max(live)[-1] if live else None


class StepBuilder(msgspec.Struct):
    """Collects the work of a step, until `seal` makes it a plan."""

    budget: int  # tokens that may still be computed
    computed: int = 0  # tokens that the work computes
    decodes: int = 0  # units that continue an output by one token, drafts aside
    sequences: list[Sequence] = []
    work: list[Work] = []
    new: list[NewSequence] = []
    blocks: list[tuple[int, tuple[tuple[int, ...], ...]]] = []
    copies: list[BlockCopy] = []
    tails: list[tuple[int, ...]] = []

    def introduce(self, sequence: Sequence) -> None:
        """Add a sequence that is new to the executor."""
        self.new.append(
            NewSequence(
                sequence.id,
                tuple(sequence.tokens),
                sequence.num_prompt,
                sequence.computed,
                tuple(map(tuple, sequence.tables)),
                sequence.request.message.sampling,
                sequence.choice,
                sequence.request.message.grammar,
                sequence.request.message.pooling,
            )
        )

    def add(self, sequence: Sequence, end: int) -> None:
        """Compute the sequence's tokens up to `end`."""
        count = end - sequence.planned
        sample = end == sequence.expected
        self.work.append(sequence.decode if sample and count == 1 else Work(sequence.id, count, sample))
        self.sequences.append(sequence)
        self.budget -= count
        self.computed += count
        sequence.planned = end
        if sample:
            sequence.expected = end + 1
            self.decodes += count == 1 and end > sequence.num_prompt

    def seal(self, plan_id: int, gone: tuple[int, ...], now: float) -> tuple[StepPlan, Outstanding]:
        """Return the plan, and what `apply` needs of it."""
        work = tuple(self.work)
        plan = StepPlan(plan_id, work, tuple(self.new), tuple(self.blocks), tuple(self.copies), gone)
        sequences, tails = tuple(self.sequences), tuple(self.tails)
        return plan, Outstanding(plan_id, now, sequences, work, self.computed, self.decodes, tails)
