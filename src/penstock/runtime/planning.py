"""From a plan to what its step computes: units of work, the description for the device, attention and sampling."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.attention import PagedAttention
from penstock.kernels.native.attention import AttentionWork
from penstock.messages import StepPlan, Window, Work
from penstock.runtime.batch import Occupant, ResidentBatch
from penstock.runtime.device import Change
from penstock.runtime.pages import KVPages
from penstock.runtime.programs.cuda_graphs import DecodeGraph, DecodeGraphs
from penstock.runtime.sampling.sampler import Sampler, StepSampling
from penstock.runtime.step import ChooseOptions, EagerStep, Shape
from penstock.runtime.units import Units, attention_batch, units_of

ALWAYS = 1 << 62  # steps


@dataclass(slots=True)
class StepWork:
    """A plan's work, in the terms of the batch and the device. A plan that repeats it is executed from the same
    object."""

    work: tuple[Work, ...]
    seqs: list[int]  # of each unit
    occupants: list[Occupant]  # of each unit
    units: Units
    decodes: bool  # as of the units
    logit_rows: NDArray[np.int64]  # the row of the batch of each row of logits
    shape: Shape
    graph: DecodeGraph | None
    attention: Sequence[Any]  # what attention prepared for each KV group on a CPU; empty: it reads the device
    repeatable: int  # for how many more decode steps of the same sequences `attention` stays valid


class StepPlanner:
    """Plans the work of steps. The arrays of the last plan are used again while plans repeat."""

    def __init__(
        self,
        batch: ResidentBatch,
        sampler: Sampler | None,
        step: EagerStep,
        attention: PagedAttention,
        pages: KVPages,
        windows: Sequence[Window],
        *,
        recorded: Sequence[AttentionWork],
        shared: bool,
    ) -> None:
        """`recorded` is what a recorded step's attention reads, of each KV group; empty without one. With `shared`, the
        device is this machine's processor."""
        self._batch = batch
        self._sampler = sampler
        self._step = step
        self._attention = attention
        self._pages = pages
        self._windows = windows
        self._recorded = recorded
        self._shared = shared
        self.graphs: DecodeGraphs | None = None
        self._last: StepWork | None = None
        self._sampling: tuple[StepSampling, ChooseOptions] | None = None  # how the last step's tokens were chosen

    def repeated(self, plan: StepPlan) -> StepWork | None:
        """The last plan's work, if this plan does it again, each sequence a token further.

        A sequence that is known can be new again only after it was in `gone`, so `new` need not be looked at.
        """
        last = self._last
        if last is None or last.repeatable <= 0 or plan.work != last.work or plan.gone:
            return None
        last.repeatable -= 1
        return last

    def forget(self) -> None:
        """Let no plan repeat the last one."""
        self._last = self._sampling = None

    def plan(self, plan: StepPlan) -> tuple[StepWork, Change]:
        """A plan's work, and its description for the device. RuntimeError where it contradicts the batch."""
        self._last = self._sampling = None  # first, so that a refused plan leaves nothing to repeat
        seqs = [work.seq for work in plan.work]
        occupants = list(map(self._batch.occupant, seqs))
        units = units_of(
            self._batch,
            [occupant.row for occupant in occupants],
            [work.count for work in plan.work],
            [work.sample for work in plan.work],
            [len(work.draft_ids) for work in plan.work],
        )
        decodes = units.decodes
        graph = self.graphs.smallest_for(len(occupants)) if self.graphs is not None and decodes else None
        shape, change = self._step.describe(units, 0 if graph is None else graph.size - len(occupants))
        attention, repeatable = self._plan_attention(units)
        unit, _ = units.logit_rows
        repeatable = repeatable if decodes else 0
        self._last = StepWork(
            plan.work, seqs, occupants, units, decodes, units.rows[unit], shape, graph, attention, repeatable
        )
        return self._last, change

    def plan_sampling(self, work: StepWork) -> tuple[StepSampling | None, ChooseOptions | None, Change | None]:
        """How the step's rows of logits are sampled, and what must be sent for it. None on ranks that do not sample."""
        if self._sampler is None:
            return None, None, None
        last = self._sampling
        if last is not None and last[0].settled:
            return *last, None
        rows, batch = work.logit_rows, self._batch
        batch.catch_up()
        sampling = self._sampler.plan(rows, batch.num_tokens[rows] - batch.num_prompt[rows])
        if last is not None and np.array_equal(sampling.edited, last[0].edited):
            return *last, None
        options = ChooseOptions(sampling.filtered, sampling.most_logprobs)
        self._sampling = (sampling, options)
        change = Change((sampling.edited,), options.set_edited) if len(sampling.edited) else None
        return sampling, options, change

    def _plan_attention(self, units: Units) -> tuple[Sequence[Any], int]:
        """Returns what attention prepares on a CPU for each KV group, and for how many more decode steps it holds."""
        if not len(units.rows):
            return (), 0
        if not self._shared:
            return (), ALWAYS
        if self._recorded:
            for work, seen in zip(self._recorded, self._seen(units), strict=True):
                work.fill(seen)
            return self._recorded, min(work.steps_unchanged() for work in self._recorded)
        keys = [self._pages.group_keys(group) for group in range(len(self._windows))]
        return [
            None if key is None else self._attention.prepare(seen, key)
            for seen, key in zip(self._seen(units), keys, strict=True)
        ], 0

    def _seen(self, units: Units) -> Sequence[Any]:
        return [attention_batch(group, window, self._batch, units) for group, window in enumerate(self._windows)]
