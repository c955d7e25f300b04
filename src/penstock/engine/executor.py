"""The executor that runs a model in the engine's own process."""

from collections import deque
from typing import TYPE_CHECKING

from penstock.config.engine import EngineConfig
from penstock.messages import Capacity, StepPlan, StepResult

if TYPE_CHECKING:
    from penstock.runtime import ModelRunner


class InProcessExecutor:
    """Computes a plan when its result is asked for: on a CPU nothing runs beside the host, so why sooner."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._runner: ModelRunner | None = None
        self._plans: deque[StepPlan] = deque()

    def start(self) -> Capacity:
        """Load the model. Raises what loading raises: CheckpointError, UnsupportedModel, DoesNotFit, OSError."""
        from penstock.runtime import load_runner  # here and not above: it imports torch

        self._runner = load_runner(self._config)
        return self._runner.capacity

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def result(self) -> StepResult:
        if self._runner is None:
            raise RuntimeError("the executor has not been started, or is closed")
        result = self._runner.execute(self._plans.popleft())
        if result is None:
            raise RuntimeError("the runner is one rank of several: its plans belong to WorkersExecutor")
        return result

    def health(self) -> None:
        """Nothing ends here but with the engine."""

    def close(self) -> None:
        """Give the model's memory back. May be called at any time, also twice."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()
