"""The executor that runs a model in the engine's own process."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from penstock.config.engine import EngineConfig
from penstock.engine.grammars import EngineGrammars
from penstock.messages import Capacity, Grammar, StepLease, StepPlan, StepResult
from penstock.priority import LOWEST, run_at
from penstock.runtime.loading.preload import Preload
from penstock.runtime.loading.quick_torch import import_torch

if TYPE_CHECKING:
    from penstock.runtime.device import DevicePage
    from penstock.runtime.encoder_runner import EncoderRunner
    from penstock.runtime.runner import ModelRunner


class InProcessExecutor:
    """Passes plans to a runner, which computes them in `result` on a CPU, and from `submit` on on a GPU."""

    result_at = 0.0  # `result` blocks

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._runner: ModelRunner | EncoderRunner | None = None
        self.submit: Callable[[StepPlan], None] = _not_started
        self.result: Callable[[], StepResult] = _not_started

    def start(self) -> Capacity:
        """Load the model. Raises what loading raises: CheckpointError, UnsupportedModel, DoesNotFit, OSError."""
        config, preload = self._config, None
        if config.device == "cpu":
            preload = run_at(LOWEST, partial(Preload, config)) if config.replaces else Preload(config)
        from penstock.runtime.loading.load import load_runner  # not above: it imports torch

        self._runner = runner = load_runner(config, preload)
        runner.use_grammars(EngineGrammars(config, runner.capacity.vocab_size))
        self.submit, self.result = runner.submit, runner.result
        return runner.capacity

    def prepare(self, grammar: Grammar) -> bool:
        """See Executor."""
        return self._runner is None or self._runner.prepare(grammar)

    def recover(self, error: Exception) -> bool:
        """See Executor."""
        from penstock.runtime.out_of_memory import is_out_of_memory  # not above: it imports torch

        if self._runner is None or not is_out_of_memory(error):
            return False
        self._runner.forget()
        return True

    def trim(self, limits: Sequence[int]) -> None:
        """See Executor."""
        if self._runner is not None:
            self._runner.trim(limits)

    def page(self, block: int) -> "DevicePage | memoryview":
        """See HasPages (tier/open.py)."""
        return self._paged.page(block)

    def host_memory(self, size: int) -> memoryview:
        """See HasPages."""
        return self._paged.host_memory(size)

    @property
    def _paged(self) -> "ModelRunner":
        from penstock.runtime.runner import ModelRunner  # not above: it imports torch

        if not isinstance(self._runner, ModelRunner):
            raise ValueError("--kv-disk: this model keeps no pages of its texts: leave it out")
        return self._runner

    def health(self) -> None:
        """Never raises: the runner ends with the engine."""

    def close(self) -> None:
        """Free the model's memory. May be called at any time, also twice."""
        runner, self._runner = self._runner, None
        self.submit = self.result = _not_started
        if runner is not None:
            runner.close()


def step_lease(config: EngineConfig) -> StepLease | None:
    """Return the engine's turns on the processors; None if it shares them with no other engine. Called on the thread of
    the engine's loop. Raises OSError."""
    if config.lease is None:
        return None
    from penstock.runtime.step_lease import SharedProcessors  # not above: it imports torch

    return SharedProcessors(config.lease)


def import_runtime() -> None:
    """Imports what `start` needs, torch above all. An error is not raised here: `start` meets it again."""
    with contextlib.suppress(Exception):
        import_torch()
        import penstock.runtime.loading.cpu
        import penstock.runtime.loading.load  # noqa: F401


def _not_started(*_: object) -> NoReturn:
    raise RuntimeError("the executor has not been started, or is closed")
