"""An executor that computes nothing: its steps take what a cost model says. It is made for speed.

`SimulatedExecutor` checks every plan and every slot of the cache, for tests of the scheduler.
"""

from collections import deque
from collections.abc import Callable

from penstock.messages import Capacity, Grammar, SequenceResult, StepPlan, StepResult, StepTiming
from penstock.simulate.clock import NANO, EventClock
from penstock.simulate.costs.counter import StepCounter
from penstock.simulate.costs.work import StepCostModel

NEVER = float("inf")


class Machine:
    """The device, or the group of devices, that executes steps. Engines that share one wait for each other's steps."""

    def __init__(self) -> None:
        self.free_at = 0  # nanoseconds


class CostedExecutor:
    """An Executor on a virtual clock. A sequence's output tokens all are its request's seed (see SimulatedRequest)."""

    def __init__(self, capacity: Capacity, clock: EventClock, cost: StepCostModel, machine: Machine) -> None:
        self.capacity = capacity
        self.counter = StepCounter()
        self.slowdown = 1.0  # times the seconds of a step
        self.stalled = False  # no further result comes
        self.useful: Callable[[], int] | None = None  # the rows of a step that serve a request; None: all
        self.busy = self.rows = 0  # nanoseconds, and rows x nanoseconds, of all steps so far
        self._clock, self._cost, self._machine = clock, cost, machine
        self._tokens: dict[int, SequenceResult] = {}  # what a sequence samples, always
        self._outstanding: deque[tuple[int, StepResult]] = deque()
        self._results: tuple[SequenceResult, ...] = ()

    def start(self) -> Capacity:
        return self.capacity

    def prepare(self, grammar: Grammar) -> bool:
        """Always True: no token depends on a grammar."""
        return True

    def submit(self, plan: StepPlan) -> None:
        work = self.counter.count(plan)
        if not self.counter.repeated:
            tokens = self._tokens
            for seq in plan.gone:
                del tokens[seq]
            for new in plan.new:
                tokens[new.seq] = SequenceResult(new.seq, (new.sampling.seed,))
            self._results = tuple([tokens[each.seq] if each.sample else SequenceResult(each.seq) for each in plan.work])
        seconds = self._cost.seconds(work) * self.slowdown
        took, machine = round(seconds * NANO), self._machine
        begin = max(self._clock.ns, machine.free_at)
        occupied = took // self._cost.stages
        machine.free_at = begin + occupied
        self.busy += occupied
        self.rows += occupied * (len(plan.work) if self.useful is None else self.useful())
        timing = StepTiming(seconds, 0.0, seconds)
        self._outstanding.append((begin + took, StepResult(plan.plan_id, self._results, timing)))

    @property
    def result_at(self) -> float:
        """See Executor."""
        return NEVER if self.stalled else self._outstanding[0][0] / NANO

    def result(self) -> StepResult:
        """Returns the oldest result, from `result_at` on."""
        return self._outstanding.popleft()[1]

    def recover(self, error: Exception) -> bool:
        """Returns False: no allocation fails here."""
        return False

    def health(self) -> None:
        """Never raises."""

    def close(self) -> None:
        """Does nothing: there is nothing to free."""
