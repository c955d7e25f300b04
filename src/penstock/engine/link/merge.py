"""Steps that wait for a slow reader, merged into one."""

from penstock.engine.link.wire import Step
from penstock.messages import BlockChanges, DeltaBuffer

MAX_BLOCK_KEYS = 1 << 16  # in the reports of blocks that wait; older reports are dropped, which the reader sees


class StepBuffer:
    """Steps that wait for a reader, merged into one."""

    def __init__(self) -> None:
        self._deltas = DeltaBuffer()
        self._step = Step()
        self._waits = False
        self._keys = 0  # in the reports of blocks

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
        if step.blocks:
            self._push_blocks(step.blocks)

    def _push_blocks(self, reports: list[BlockChanges]) -> None:
        self._step.blocks.extend(reports)
        self._keys += sum(len(report.stored) + len(report.removed) for report in reports)
        while self._keys > MAX_BLOCK_KEYS and len(self._step.blocks) > 1:
            dropped = self._step.blocks.pop(0)
            self._keys -= len(dropped.stored) + len(dropped.removed)

    def take(self) -> Step:
        """Remove all and return them as one step, with the latest stats."""
        step, self._step, self._waits, self._keys = self._step, Step(), False, 0
        step.deltas = self._deltas.take()
        return step
