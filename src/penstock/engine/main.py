"""An engine's main function: load, announce that it is ready, step, announce why it ends."""

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import msgspec

from penstock.config.engine import EngineConfig
from penstock.config.kv_disk import read_kv_disk
from penstock.engine.core import EngineCore
from penstock.engine.error_text import error_text
from penstock.engine.executor import InProcessExecutor, step_lease
from penstock.engine.link.channel import Channel
from penstock.engine.link.wire import Ended, Ready
from penstock.families import load_spec
from penstock.messages import Capacity, EngineInfo, Executor, StepLease
from penstock.schedule import EventFile, Scheduler, SchedulerConfig

if TYPE_CHECKING:
    from penstock.engine.tier.open import PageFolder

logger = logging.getLogger(__name__)


class EngineBackend(NamedTuple):
    """Makes the executor of an engine's plans, and its turns on shared processors. Reads the model's end-of-sequence
    tokens."""

    executor: Callable[[EngineConfig], Executor]
    eos_token_ids: Callable[[EngineConfig], tuple[int, ...]]
    lease: Callable[[EngineConfig], StepLease | None] = lambda config: None


def model_eos(config: EngineConfig) -> tuple[int, ...]:
    return load_spec(Path(config.model)).eos_token_ids


def model_executor(config: EngineConfig) -> Executor:
    """Return an executor in this process for a model of one rank, else one with a process for each rank."""
    if config.split.world == 1 and config.distributed_executor == "auto":
        return InProcessExecutor(config)
    from penstock.engine.ranks.workers import WorkersExecutor  # not above: only an engine with ranks needs it

    return WorkersExecutor(config)


MODEL_BACKEND = EngineBackend(model_executor, model_eos, step_lease)


def run_engine(
    config: EngineConfig, backend: EngineBackend, channel: Channel, *, on_loaded: Callable[[], None] = lambda: None
) -> bool:
    """Run an engine to its end. True after a Stop, False after a failure; the client gets the reason of either.
    `on_loaded` is called when the model is loaded."""
    try:
        limits = scheduler_config(config)
        with contextlib.ExitStack() as held:
            folder = held.enter_context(contextlib.closing(_page_folder(config))) if config.kv_disk else None
            log = _event_log(held, config.event_log) if config.event_log else None
            executor = held.enter_context(contextlib.closing(backend.executor(config)))
            capacity = executor.start()
            if limits.speculation != "off":
                limits = _exact_speculation(limits, capacity, config.device)
            scheduler = Scheduler(limits, capacity, log=log, incarnation=config.incarnation)
            tiers = None
            if folder is not None or config.kv_host or config.pages is not None:
                from penstock.engine.tier.open import open_tiers

                opened = open_tiers(
                    folder, config.kv_host, config.pages, scheduler, executor, capacity, channel.waker()
                )
                tiers = held.enter_context(opened)
            core = EngineCore(
                *(scheduler, executor, channel.post, capacity),
                incarnation=config.incarnation,
                clock=time.monotonic,
                lease=backend.lease(config),
                tiers=tiers,
            )
            on_loaded()
            eos_token_ids = backend.eos_token_ids(config)
            info = engine_info(config, capacity, eos_token_ids, 0 if tiers is None else tiers.page_port)
            channel.announce(Ready(info, scheduler.stats()))
            channel.announce(Ended(core.run(channel)))
    except Exception as error:
        channel.announce(Ended(error_text(error)))
        return False
    return True


def _page_folder(config: EngineConfig) -> "PageFolder":
    from penstock.engine.tier.open import PageFolder  # not above: only an engine with a disk tier needs it

    return PageFolder(read_kv_disk(config.kv_disk))


def _event_log(held: contextlib.ExitStack, path: str) -> EventFile:
    """Begin a log. What an earlier engine has written is kept as PATH.1: this start may follow a crash, whose cause is
    there."""

    def failed(error: OSError) -> None:
        logger.error("the event log ends here: %s cannot be written: %s (--event-log)", path, error.strerror)

    path = os.path.realpath(path)
    with contextlib.suppress(OSError):  # else the log is overwritten
        if os.path.isfile(path) and os.path.getsize(path):
            os.replace(path, f"{path}.1")
    return EventFile(held.enter_context(_open_private(path)), failed)


def _open_private(path: str) -> IO[bytes]:
    """Open a file that only its owner can read, as it holds what users sent. Nothing is buffered."""
    return open(path, "wb", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600))


def scheduler_config(config: EngineConfig) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        target_step_time=config.target_itl / 1000,
        enable_prefix_caching=config.enable_prefix_caching,
        speculation=config.speculation,
        num_speculative_tokens=config.num_speculative_tokens,
        max_step_drafts=config.max_step_drafts,
        tenants=config.has_tenants,
    )


def _exact_speculation(limits: SchedulerConfig, capacity: Capacity, device: str) -> SchedulerConfig:
    """Return the limits, without speculation if drafts would change tokens on a CPU. A GPU keeps it: without
    --deterministic the other requests in a batch change tokens there, too."""
    if device == "cuda":
        changes = "" if capacity.exact_drafts else "; without --deterministic drafts may change tokens, as a batch may"
        logger.warning("speculation was never measured on a GPU: compare it with --speculation off%s", changes)
    elif not capacity.exact_drafts:
        logger.warning("speculation is off: without native kernels a product rounds by its number of rows")
        return msgspec.structs.replace(limits, speculation="off")
    return limits


def engine_info(
    config: EngineConfig, capacity: Capacity, eos_token_ids: tuple[int, ...], page_port: int = 0
) -> EngineInfo:
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
        identity=capacity.identity,
        max_step_tokens=config.max_num_batched_tokens,
        role=config.role,
        region=config.region,
        page_port=page_port,
        cpu=next(iter(cpus)) if len(cpus := os.sched_getaffinity(0)) == 1 else None,
    )
