"""The executor that runs a model in the engine's own process."""

from typing import TYPE_CHECKING

from penstock.config.engine import EngineConfig
from penstock.messages import Capacity, StepPlan, StepResult

if TYPE_CHECKING:
    from penstock.runtime import DeviceRunner, ModelRunner


class InProcessExecutor:
    """Hands plans to a runner: on a CPU they are computed when their results are asked for, on a GPU meanwhile."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._runner: DeviceRunner | ModelRunner | None = None

    def start(self) -> Capacity:
        """Load the model. Raises what loading raises: CheckpointError, UnsupportedModel, DoesNotFit, OSError."""
        from penstock.runtime.groundwork import Groundwork

        groundwork = Groundwork(self._config) if self._config.device == "cpu" else None
        from penstock.runtime import load_runner  # here and not above: it imports torch

        self._runner = load_runner(self._config, groundwork)
        return self._runner.capacity

    def submit(self, plan: StepPlan) -> None:
        self._started().submit(plan)

    def result(self) -> StepResult:
        return self._started().result()

    def health(self) -> None:
        """Nothing ends here but with the engine."""

    def close(self) -> None:
        """Give the model's memory back. May be called at any time, also twice."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def _started(self) -> "DeviceRunner | ModelRunner":
        if self._runner is None:
            raise RuntimeError("the executor has not been started, or is closed")
        return self._runner
