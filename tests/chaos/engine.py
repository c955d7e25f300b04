"""An engine with faults: python -m tests.chaos.engine, as penstock.engine.process is started.

Its executor is the model's own, within a wrapper that acts at the boundaries of steps. A request brings its fault as
its seed (`fault_seed`). The product has no hook for this: only tests.chaos.server starts this engine.
"""

import enum
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from penstock.config.engine import EngineConfig
from penstock.engine.executor import InProcessExecutor
from penstock.engine.main import EngineBackend, model_eos
from penstock.engine.process import serve
from penstock.messages import Capacity, Grammar, StepPlan, StepResult

COMMAND = (sys.executable, "-m", "tests.chaos.engine")
FIRED = "CHAOS_FIRED"  # environment variable: the folder that remembers faults that happen once
STALL_SECONDS = 3600.0

_MARK = 0xC4A0 << 16
_REPEATED = 1 << 15
_MOST_STEPS = 4095


class Fault(enum.IntEnum):
    """What happens in a step."""

    EXCEPTION = 1
    NOT_FINITE = 2  # NaN among the keys and values that the sequence has just written
    NO_MEMORY = 3
    STALL = 4
    EXIT = 5
    SEGFAULT = 6
    NO_MEMORY_AT_END = 7  # of a step that was computed


class Planned(NamedTuple):
    fault: Fault
    step: int  # of the sequence's own steps, from 0
    repeated: bool  # in every engine; else once
    seed: int


def fault_seed(fault: Fault, step: int = 0, *, repeated: bool = False) -> int:
    """The seed of a request that has this fault in one of its steps, of which the prompt's is 0."""
    if not 0 <= step <= _MOST_STEPS:
        raise ValueError(f"step {step} is not between 0 and {_MOST_STEPS}")
    return _MARK | (_REPEATED if repeated else 0) | fault << 12 | step


def planned(seed: int | None) -> Planned | None:
    """The fault that a seed means, if any."""
    if seed is None or seed >> 16 != _MARK >> 16:
        return None
    return Planned(Fault(seed >> 12 & 7), seed & _MOST_STEPS, bool(seed & _REPEATED), seed)


class FaultyExecutor:
    """A model's executor in this process, in which requests have faults."""

    result_at = 0.0  # `result` blocks

    def __init__(self, config: EngineConfig) -> None:
        self._executor = InProcessExecutor(config)
        self._block_size = config.block_size
        self._planned: dict[int, Planned] = {}  # by sequence
        self._steps: dict[int, int] = {}
        self._computed: dict[int, int] = {}  # tokens of which the sequence has keys and values
        self._blocks: dict[int, list[int]] = {}  # of the first KV group
        self._fails_at_end = False  # the outstanding step

    def start(self) -> Capacity:
        return self._executor.start()

    def prepare(self, grammar: Grammar) -> bool:
        return self._executor.prepare(grammar)

    def health(self) -> None:
        self._executor.health()

    def trim(self, limits: Sequence[int]) -> None:
        self._executor.trim(limits)

    def recover(self, error: Exception) -> bool:
        return self._executor.recover(error)

    def close(self) -> None:
        self._executor.close()

    def submit(self, plan: StepPlan) -> None:
        self._follow(plan)
        for work in plan.work:
            found = self._planned.get(work.seq)
            if found is None:
                continue
            step, self._steps[work.seq] = self._steps[work.seq], self._steps[work.seq] + 1
            if step >= found.step and self._is_due(found, work.seq):
                del self._planned[work.seq]
                self._happen(found.fault, work.seq)
        self._executor.submit(plan)
        for work in plan.work:
            if work.seq in self._computed:
                self._computed[work.seq] += work.count

    def result(self) -> StepResult:
        result = self._executor.result()
        if self._fails_at_end:
            self._fails_at_end = False
            torch.empty(1 << 50)
        return result

    def _follow(self, plan: StepPlan) -> None:
        """Keep the state of sequences that have a fault."""
        for seq in plan.gone:
            for kept in (self._planned, self._steps, self._computed, self._blocks):
                kept.pop(seq, None)
        for new in plan.new:
            if (found := planned(new.sampling.seed)) is not None:
                self._planned[new.seq], self._steps[new.seq] = found, 0
                self._computed[new.seq], self._blocks[new.seq] = new.num_computed, list(new.blocks[0])
        for seq, groups in plan.blocks:
            if seq in self._blocks:
                self._blocks[seq] += groups[0]

    def _is_due(self, found: Planned, seq: int) -> bool:
        if found.fault is Fault.NOT_FINITE and self._computed[seq] % self._block_size == 0:
            return False  # its last block is full, so others may read it
        if found.repeated:
            return True
        try:
            (Path(os.environ[FIRED]) / str(found.seed)).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _happen(self, fault: Fault, seq: int) -> None:
        match fault:
            case Fault.EXCEPTION:
                raise RuntimeError("the device has burnt out")
            case Fault.NO_MEMORY:
                bytearray(1 << 60)
            case Fault.NO_MEMORY_AT_END:
                self._fails_at_end = True
            case Fault.STALL:
                time.sleep(STALL_SECONDS)
            case Fault.EXIT:
                os._exit(3)
            case Fault.SEGFAULT:
                os.kill(os.getpid(), signal.SIGSEGV)
            case Fault.NOT_FINITE:
                runner = self._executor._runner
                assert runner is not None
                runner.pages.groups[0][self._blocks[seq][self._computed[seq] // self._block_size]] = float("nan")


BACKEND = EngineBackend(FaultyExecutor, model_eos)

if __name__ == "__main__":
    sys.exit(serve(BACKEND))
