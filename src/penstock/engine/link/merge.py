"""Steps that wait for a slow reader, merged into one."""

from penstock.engine.link.wire import Step
from penstock.messages import DeltaBuffer


class StepBuffer:
    """Steps that wait for a reader, merged into one."""

    def __init__(self) -> None:
        self._deltas = DeltaBuffer()
        self._step = Step()
        self._waits = False

    def __bool__(self) -> bool:
        return self._waits

    def push(self, step: Step) -> None:
        self._waits = True
        self._step.stats = step.stats or self._step.stats
        for delta in step.deltas:
            self._deltas.push(delta)
        self._step.rejected.extend(step.rejected)
        self._step.aborted.extend(step.aborted)
        self._step.replies.extend(step.replies)
        self._step.begun.extend(step.begun)

    def take(self) -> Step:
        """Remove all and return them as one step, with the latest stats."""
        step, self._step, self._waits = self._step, Step(), False
        step.deltas = self._deltas.take()
        return step
