"""An engine's life on one thread: load, say that it is ready, step, say why it ends."""

import contextlib
import logging
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from penstock.config.engine import EngineConfig
from penstock.engine.core import EngineCore
from penstock.engine.executor import InProcessExecutor
from penstock.engine.port import Port
from penstock.engine.wire import Failed, Ready
from penstock.families import load_spec
from penstock.messages import Capacity, EngineInfo, Executor
from penstock.schedule import Scheduler, SchedulerConfig

TRACEBACK_LINES = 6  # of an unforeseen error, in the reason given to the client; the log has all of them

log = logging.getLogger(__name__)


class Backend(NamedTuple):
    """What executes an engine's plans."""

    executor: Callable[[EngineConfig], Executor]
    eos_token_ids: Callable[[EngineConfig], tuple[int, ...]]


def model_eos(config: EngineConfig) -> tuple[int, ...]:
    return load_spec(Path(config.model)).eos_token_ids


MODEL = Backend(InProcessExecutor, model_eos)


class Announcing(Port, Protocol):
    def announce(self, event: Ready | Failed) -> None:
        """Say that the engine is ready, or that it ends; what was posted before goes first."""
        ...


def live(config: EngineConfig, backend: Backend, port: Announcing) -> bool:
    """Run an engine to its end. True when it was told to stop, False when it failed; either way the client knows."""
    try:
        limits = scheduler_config(config)
        eos_token_ids = backend.eos_token_ids(config)
        with contextlib.closing(backend.executor(config)) as executor:
            capacity = executor.start()
            scheduler = Scheduler(limits, capacity, incarnation=config.incarnation)
            core = EngineCore(scheduler, executor, port, capacity, incarnation=config.incarnation)
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
    )


def reason_for(error: Exception) -> str:
    """The message alone where it was written for a user; else the error with where it came from, and all in the log.

    Written for a user: what the system says about files, and what our own code raises about values.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    ours = "penstock" in {name.partition(".")[0] for name in (type(error).__module__, frame.f_globals["__name__"])}
    if isinstance(error, OSError) or (ours and isinstance(error, ValueError)):
        return str(error)
    log.error("the engine failed", exc_info=error)
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return "\n".join([f"{type(error).__name__}: {error}", *lines[-TRACEBACK_LINES:-1]])
