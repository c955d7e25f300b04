"""An engine's life on one thread: load, say that it is ready, step, say why it ends."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from penstock.config.engine import EngineConfig
from penstock.engine.core import EngineCore
from penstock.engine.executor import InProcessExecutor
from penstock.engine.port import Port
from penstock.engine.reason import reason_for
from penstock.engine.wire import Failed, Ready
from penstock.families import load_spec
from penstock.messages import Capacity, EngineInfo, Executor
from penstock.schedule import Scheduler, SchedulerConfig


class Backend(NamedTuple):
    """What executes an engine's plans."""

    executor: Callable[[EngineConfig], Executor]
    eos_token_ids: Callable[[EngineConfig], tuple[int, ...]]


def model_eos(config: EngineConfig) -> tuple[int, ...]:
    return load_spec(Path(config.model)).eos_token_ids


def model_executor(config: EngineConfig) -> Executor:
    """In this process where one rank has the whole model, unless told otherwise."""
    if config.split.world == 1 and config.distributed_executor == "auto":
        return InProcessExecutor(config)
    from penstock.engine.workers import WorkersExecutor  # here and not above: only who has ranks needs it

    return WorkersExecutor(config)


MODEL = Backend(model_executor, model_eos)


class Announcing(Port, Protocol):
    def announce(self, event: Ready | Failed) -> None:
        """Say that the engine is ready, or that it ends; what was posted before goes first."""
        ...


def live(
    config: EngineConfig, backend: Backend, port: Announcing, *, settled: Callable[[], None] = lambda: None
) -> bool:
    """Run an engine to its end. True when it was told to stop, False when it failed; either way the client knows.
    `settled` is called once all is loaded."""
    try:
        limits = scheduler_config(config)
        eos_token_ids = backend.eos_token_ids(config)
        with contextlib.closing(backend.executor(config)) as executor:
            capacity = executor.start()
            scheduler = Scheduler(limits, capacity, incarnation=config.incarnation)
            core = EngineCore(scheduler, executor, port, capacity, incarnation=config.incarnation)
            settled()
            port.announce(Ready(describe(config, capacity, eos_token_ids), scheduler.stats()))
            port.announce(Failed(core.run()))
    except Exception as error:
        port.announce(Failed(reason_for(error)))
        return False
    return True


def scheduler_config(config: EngineConfig) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        max_waiting=config.max_waiting,
        enable_prefix_caching=config.enable_prefix_caching,
    )


def describe(config: EngineConfig, capacity: Capacity, eos_token_ids: tuple[int, ...]) -> EngineInfo:
    return EngineInfo(
        model=config.name,
        revision=config.revision,
        vocab_size=capacity.vocab_size,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        block_size=capacity.block_size,
        num_blocks=tuple(group.num_blocks for group in capacity.groups),
        dtype=config.dtype,
        incarnation=config.incarnation,
        pid=os.getpid(),
        eos_token_ids=eos_token_ids,
        memory=capacity.memory,
        cpu=next(iter(cpus)) if len(cpus := os.sched_getaffinity(0)) == 1 else None,
    )
