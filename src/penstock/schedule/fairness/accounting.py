"""Measures what each sequence uses of the engine."""

from penstock.schedule.sequence import Phase
from penstock.schedule.step import Outstanding

CONTEXT = 8192  # tokens that a token attends to, for which it costs twice as much as without context


class StepAccounts:
    """Divides the time of each step among the sequences in it, by their computed tokens and the context of these.

    Every second in which the engine has work belongs to a step, so the parts of all sequences add up to the engine's
    busy time. The time of a step in which no sequence is left is added to the next one.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._busy = False
        self._since = -1.0  # when the last step ended, if there has been work since
        self._left = 0.0  # seconds that belong to no sequence yet

    def note(self, step: Outstanding, now: float) -> list[float]:
        """Divide the seconds of a step whose result has come at `now`. Call it before the result is applied. The time
        from `now` belongs to the next step, if there is more work. Return the seconds of each unit of work; 0 for a
        sequence that has ended."""
        seconds = self._left + now - (self._since if self._since >= 0.0 else step.planned_at)
        parts = [
            0.0
            if sequence.phase is Phase.DONE
            else work.count * (1.0 + (sequence.computed + 0.5 * work.count) / CONTEXT)
            for sequence, work in zip(step.sequences, step.work, strict=True)
        ]
        total = sum(parts)
        if self._busy:
            self._since = now
        self._left = 0.0 if total else seconds
        if not total:
            return parts
        per_part, per_slot = seconds / total, seconds / self._block_size
        for sequence, work, part in zip(step.sequences, step.work, parts, strict=True):
            if part and (usage := sequence.usage) is not None:
                usage.seconds += per_part * part
                usage.block_seconds += per_slot * sequence.slots
                usage.computed += work.count
                if usage.reached > sequence.computed and sequence.phase is Phase.RUNNING:
                    usage.repeated += min(work.count - work.drafts, usage.reached - sequence.computed)
        return [per_part * part for part in parts]

    def work(self, busy: bool) -> None:
        """Note whether there is work."""
        self._busy = busy
        if not busy:
            self._since = -1.0
