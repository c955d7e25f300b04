"""The interface of the part of a model that a rank's process runs."""

from typing import Protocol

from penstock.messages import Capacity, StepPlan, StepResult


class RankRunner(Protocol):
    """The part of the model that a rank holds."""

    @property
    def ahead(self) -> int:
        """The number of plans that may be submitted before the first one's result is taken."""
        ...

    @property
    def capacity(self) -> Capacity: ...

    def learn(self, result: StepResult) -> None:
        """On a rank that does not sample: take an earlier plan's result before a plan that needs it is submitted."""
        ...

    def submit(self, plan: StepPlan) -> None: ...

    @property
    def ready(self) -> bool:
        """True when `take` would not block."""
        ...

    def take(self) -> StepResult | None:
        """Return the oldest plan's result on the rank that samples, None on the others. Blocks until it is there."""
        ...


class HostRunner(Protocol):
    """A runner that computes a plan when `execute` is called."""

    @property
    def capacity(self) -> Capacity: ...
    def learn(self, result: StepResult) -> None: ...
    def execute(self, plan: StepPlan) -> StepResult | None: ...


class BlockingRunner:
    """A HostRunner as a RankRunner: `take` computes the plan, and one plan is submitted at a time."""

    ahead = 1
    ready = True

    def __init__(self, runner: HostRunner) -> None:
        self._runner = runner
        self._plan = StepPlan(0, ())
        self.capacity = runner.capacity
        self.learn = runner.learn

    def submit(self, plan: StepPlan) -> None:
        self._plan = plan

    def take(self) -> StepResult | None:
        return self._runner.execute(self._plan)
