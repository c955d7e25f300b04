"""The interface of the part of a model that a rank's process runs."""

from typing import Protocol

from penstock.messages import Capacity, Grammar, StepPlan, StepResult


class RankRunner(Protocol):
    """The part of the model that a rank holds."""

    @property
    def max_outstanding(self) -> int:
        """The number of plans that may be submitted before the first one's result is taken."""

    @property
    def capacity(self) -> Capacity: ...

    def learn(self, result: StepResult) -> None:
        """On a rank that does not sample: take an earlier plan's result before a plan that needs it is submitted."""

    def prepare(self, grammar: Grammar) -> bool:
        """Start to compile a grammar, on the rank that samples."""

    def submit(self, plan: StepPlan) -> None: ...

    @property
    def ready(self) -> bool:
        """True when `take` would not block."""

    def take(self) -> StepResult | None:
        """Return the oldest plan's result on the rank that samples, None on the others. Blocks until it is there."""
