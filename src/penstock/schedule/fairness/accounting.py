"""Measures what each sequence uses of the engine."""

from collections import defaultdict

from penstock.schedule.sequence import Phase, SequenceUsage
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

    def note(self, step: Outstanding, now: float) -> dict[str, float]:
        """Divide the seconds of a step whose result has come at `now`. Call it before the result is applied. The time
        from `now` belongs to the next step, if there is more work. Return the milliseconds of each tenant."""
        seconds = self._left + now - (self._since if self._since >= 0.0 else step.planned_at)
        live, total = [], 0.0
        for sequence, work in zip(step.sequences, step.work, strict=True):
            if sequence.phase is not Phase.DONE:
                count = work.count
                part = count * (1.0 + (sequence.computed + 0.5 * count) / CONTEXT)
                total += part
                live.append((sequence, count - work.drafts, count, part))
        self._left = 0.0 if live else seconds
        if self._busy:
            self._since = now
        milliseconds = defaultdict[str, float](float)
        for sequence, sure, count, part in live:
            usage = sequence.usage
            if usage is None:
                usage = sequence.usage = SequenceUsage()
            start = sequence.computed
            usage.computed += count
            own = seconds * part / total
            usage.seconds += own
            milliseconds[sequence.request.message.tenant] += own * 1000
            usage.block_seconds += seconds * sequence.slots / self._block_size
            if usage.reached > start:
                usage.repeated += min(sure, usage.reached - start)
            usage.reached = max(usage.reached, start + sure)
        return milliseconds

    def work(self, busy: bool) -> None:
        """Note whether there is work."""
        self._busy = busy
        if not busy:
            self._since = -1.0
