"""A real scheduler driving a real runner on a tiny checkpoint, with physical blocks in scattered order."""

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from msgspec.structs import replace

from penstock.config import EngineConfig
from penstock.families import load_spec
from penstock.kernels import Needs, detect_platform, select_kernels
from penstock.messages import GenerateRequest, StepPlan, TokenDelta
from penstock.runtime import ModelRunner
from penstock.schedule import Scheduler, SchedulerConfig
from penstock.weights.load import load_parameters

NUM_BLOCKS = 512


def make_runner(
    folder: Path,
    *,
    dtype: str = "float32",
    block_size: int = 16,
    max_num_seqs: int = 16,
    max_model_len: int = 256,
    edit: Callable[[dict[str, torch.Tensor]], None] = lambda parameters: None,
    recorded: bool = True,
) -> ModelRunner:
    """Without load_runner's sizing and process-wide settings; `edit` may change the weights. Steps are recorded where
    kernels can record, unless told otherwise."""
    spec = load_spec(folder)
    config = EngineConfig(
        model=str(folder),
        name="tiny",
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
    )
    torch_dtype = getattr(torch, dtype)
    parameters = load_parameters(folder, spec, torch_dtype, progress=False)
    edit(parameters)
    kernels = select_kernels(detect_platform(), Needs(torch_dtype, block_size, tuple(x.head_dim for x in spec.layers)))
    if not recorded:
        kernels = dataclasses.replace(kernels, session=None)
    return ModelRunner(spec, parameters, kernels, config, [NUM_BLOCKS] * len(spec.windows))


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
        self, runner: ModelRunner, *, budget: int = 2048, caching: bool = False, max_num_seqs: int = 16
    ) -> None:
        self.runner = runner
        limits = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=256, enable_prefix_caching=caching
        )
        self.scheduler = Scheduler(limits, runner.capacity)
        self.scattered = Scattered(len(runner.capacity.groups), seed=7)

    def run(self, requests: Iterable[GenerateRequest]) -> list[TokenDelta]:
        """All deltas, in order."""
        for request in requests:
            self.scheduler.add(request, 0.0)
        deltas: list[TokenDelta] = []
        while (plan := self.scheduler.plan(0.0)) is not None:
            deltas += self.scheduler.apply(self.runner.execute(self.scattered.plan(plan)), 0.0)
        return deltas


def outputs(deltas: Iterable[TokenDelta]) -> dict[tuple[str, int], list[int]]:
    """Output ids by (request id, choice)."""
    tokens: dict[tuple[str, int], list[int]] = {}
    for delta in deltas:
        assert not delta.error, delta.error
        tokens.setdefault((delta.request_id, delta.choice), []).extend(delta.token_ids)
    return tokens
