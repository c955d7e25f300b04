"""A real scheduler driving a real runner on a tiny checkpoint, with physical blocks in scattered order."""

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
from msgspec.structs import replace

from penstock.config import EngineConfig
from penstock.families import ModelSpec, load_spec
from penstock.kernels import (
    Kernels,
    Needs,
    PagedAttention,
    Platform,
    detect_platform,
    select_kernels,
    select_packing,
)
from penstock.messages import GenerateRequest, KVGroup, StepPlan, TokenDelta
from penstock.runtime.device import HostDevice
from penstock.runtime.pages import KVPages
from penstock.runtime.runner import ModelRunner
from penstock.runtime.step_kernels import StepKernels
from penstock.schedule import Scheduler, SchedulerConfig
from penstock.weights.load import load_parameters
from tests.kernels.triton.device import there
from tests.runtime.mirror_device import device_at, mirror_kernels

NUM_BLOCKS = 512
HERE = torch.device("cpu")


class Parts(NamedTuple):
    """What a runner is made of."""

    spec: ModelSpec
    parameters: dict[str, Any]
    kernels: Kernels
    config: EngineConfig

    @property
    def num_blocks(self) -> list[int]:
        return [NUM_BLOCKS] * len(self.spec.windows)


def parts(
    folder: Path,
    *,
    dtype: str = "float32",
    block_size: int = 16,
    max_num_seqs: int = 16,
    max_model_len: int = 256,
    edit: Callable[[dict[str, Any]], None] = lambda parameters: None,
    platform: Platform | None = None,
    device: torch.device = HERE,
    packed: bool = False,
    attention: PagedAttention | None = None,
    **settings: Any,
) -> Parts:
    """Without load_runner's sizing and process-wide settings; `edit` may change the weights. With `packed` they are
    packed, and quantised, while they are read. `attention` is the platform's unless given."""
    spec = load_spec(folder)
    config = EngineConfig(
        model=str(folder),
        name="tiny",
        dtype=dtype,  # type: ignore[arg-type]
        device=device.type,  # type: ignore[arg-type]
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        **settings,
    )
    platform, torch_dtype = platform or detect_platform(device.type), getattr(torch, dtype)
    needs = Needs(torch_dtype, block_size, spec.head_dims, config.deterministic)
    how: dict[str, Any] = {}
    if packed:
        packing = select_packing(platform, needs, config.quantization, config.quantization_group, device)
        how = {"packing": packing, "device": None if device == HERE else device}
    parameters = load_parameters(folder, spec, torch_dtype, progress=False, **how)
    edit(parameters)
    kernels = select_kernels(platform, needs)
    if attention is not None:
        kernels = dataclasses.replace(kernels, attention=attention, session=None)
    return Parts(spec, parameters, kernels, config)


def make_pages(made: Parts, device: torch.device = HERE) -> KVPages:
    config, dtype = made.config, getattr(torch, made.config.kv_dtype)
    return KVPages(made.spec, made.num_blocks, config.block_size, dtype, device=device, rows=config.max_num_seqs)


def make_runner(folder: Path, *, recorded: bool = True, **settings: Any) -> ModelRunner:
    """Of `parts`, on this processor. Steps are recorded where kernels can record, unless told otherwise."""
    made = parts(folder, **settings)
    how = nullcontext() if recorded else patch("penstock.runtime.runner.RecordedStep", lambda step, *_, **__: step)
    with how:
        return ModelRunner(made.spec, made.parameters, made.kernels, made.config, make_pages(made), HostDevice())


def make_device_runner(
    folder: Path,
    *,
    device: torch.device = HERE,
    step_kernels: StepKernels | None = None,
    capture: bool = True,
    depth: int = 2,
    **settings: Any,
) -> ModelRunner:
    """Of `parts`, with `depth` plans outstanding. Decode steps are captured unless told otherwise. On a CPU it is
    MirrorDevice."""
    made = parts(folder, device=device, depth=depth, **settings)
    on_gpu = device.type == "cuda"
    runner = ModelRunner(
        made.spec,
        {name: there(parameter, device) for name, parameter in made.parameters.items()},
        made.kernels if on_gpu or step_kernels is not None else mirror_kernels(made.kernels),
        made.config,
        make_pages(made, device),
        device_at(device),
        step_kernels=step_kernels,
    )
    if capture:
        runner.capture(progress=False)
    return runner


class Scattered:
    """Renames the blocks of plans at random, so that consecutive blocks of a sequence lie anywhere."""

    def __init__(self, num_groups: int, seed: int) -> None:
        source = random.Random(seed)
        self._names = [[0, *source.sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1)] for _ in range(num_groups)]

    def plan(self, plan: StepPlan) -> StepPlan:
        return replace(
            plan,
            new=tuple(replace(new, blocks=self._tables(new.blocks)) for new in plan.new),
            blocks=tuple((seq, self._tables(tables)) for seq, tables in plan.blocks),
            copies=tuple(
                replace(c, source=self._names[c.group][c.source], target=self._names[c.group][c.target])
                for c in plan.copies
            ),
        )

    def _tables(self, tables: Sequence[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(names[b] for b in table) for names, table in zip(self._names, tables, strict=True))


class Server:
    """Runs requests to their end. The prefix cache lives as long as the server."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        budget: int = 2048,
        caching: bool = False,
        max_num_seqs: int = 16,
        blocks: int = NUM_BLOCKS,
        speculation: Literal["off", "ngram", "suffix"] = "off",
        drafts: int = 0,
    ) -> None:
        """Plans with `blocks` of each KV group's, the null block included, and with at most so many drafts in a step.
        The scheduler believes that drafts cost little time."""
        self.runner = runner
        limits = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=256,
            enable_prefix_caching=caching,
            speculation=speculation,
            num_speculative_tokens=drafts,
            max_step_drafts=drafts,
        )
        groups = tuple(KVGroup(blocks, group.window) for group in runner.capacity.groups)
        self.scheduler = Scheduler(limits, replace(runner.capacity, groups=groups))
        self.scattered = Scattered(len(groups), seed=7)
        self._now = 0.0

    def run(self, requests: Iterable[GenerateRequest]) -> list[TokenDelta]:
        """All deltas, in order."""
        for request in requests:
            self.scheduler.add(request, 0.0)
        deltas: list[TokenDelta] = []
        while (more := self.step()) is not None:
            deltas += more
        return deltas

    def step(self) -> list[TokenDelta] | None:
        """Plan as far ahead as the depth allows, then take a result. None where there is nothing to do."""
        while (plan := self.scheduler.plan(self._now)) is not None:
            self.runner.submit(self.scattered.plan(plan))
            self._now += 0.05 + 0.0001 * sum(work.drafts for work in plan.work)
        return self.scheduler.apply(self.runner.result(), self._now) if self.scheduler.has_work else None


def outputs(deltas: Iterable[TokenDelta]) -> dict[tuple[str, int], list[int]]:
    """Output ids by (request id, choice)."""
    tokens: dict[tuple[str, int], list[int]] = {}
    for delta in deltas:
        assert not delta.error, delta.error
        tokens.setdefault((delta.request_id, delta.choice), []).extend(delta.token_ids)
    return tokens
