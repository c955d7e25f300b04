"""What a rank's process asks of the part of the model that it holds."""

from typing import Protocol

from penstock.messages import Capacity, StepPlan, StepResult


class Runner(Protocol):
    """The part of the model that a rank holds."""

    @property
    def ahead(self) -> int:
        """Plans that it takes before the first one's result is asked for."""
        ...

    @property
    def capacity(self) -> Capacity: ...

    def learn(self, result: StepResult) -> None:
        """On a rank that does not sample: what an earlier plan gave, before one that needs it is submitted."""
        ...

    def submit(self, plan: StepPlan) -> None: ...

    @property
    def ready(self) -> bool:
        """Whether the oldest plan's result is there."""
        ...

    def take(self) -> StepResult | None:
        """The oldest plan's result, on the rank that samples; None on others."""
        ...


class HostRunner(Protocol):
    """One that computes a plan when it is told to."""

    @property
    def capacity(self) -> Capacity: ...
    def learn(self, result: StepResult) -> None: ...
    def execute(self, plan: StepPlan) -> StepResult | None: ...


class AtOnce:
    """A HostRunner as a Runner: a plan waits until its result is asked for, and no other is taken meanwhile."""

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
