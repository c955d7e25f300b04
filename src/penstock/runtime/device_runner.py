"""The runner of a device that computes beside the host: plans are launched, their results waited for later.

The batch lives on the device. What a step samples stays there for the next one to read, and comes to the host while
that one is under way: a plan is submitted on the strength of how many tokens there will be, whichever they are.
"""

import time
from collections import deque
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.config import EngineConfig
from penstock.config.graphs import graph_sizes
from penstock.families import ModelSpec
from penstock.kernels import Kernels
from penstock.messages import MemoryRow, NewSequence, SequenceResult, StepPlan, StepResult, StepTiming, Work, row_size
from penstock.models import Decoder
from penstock.runtime.capacity import measured_capacity
from penstock.runtime.device import Arrays, Pending, open_device
from penstock.runtime.device_sampler import DeviceSampler, Draw
from penstock.runtime.graphs import DecodeGraph, DecodeGraphs
from penstock.runtime.inputs import Segments, segments
from penstock.runtime.pages import KVPages
from penstock.runtime.resident import Change, Occupant, ResidentBatch
from penstock.runtime.resident_step import ResidentStep, Shape
from penstock.runtime.results import NOT_FINITE, PROMPT_LOGPROB_ROWS, PromptSlice, prompt_slices, sequence_results
from penstock.runtime.sampling_batch import ALL_BANNED
from penstock.runtime.sampling_batch import NOT_FINITE as LOGITS_NOT_FINITE
from penstock.runtime.step_kernels import ResidentAttention, StepKernels, torch_step, triton_step

DEPTH = 2  # plans outstanding: one computes while the other is made


class _Planned(NamedTuple):
    """A plan's work, as the batch sees it and as the device was told."""

    work: tuple[Work, ...]
    occupants: list[Occupant]  # of each
    units: Segments
    sampled: NDArray[np.int64]  # rows
    samplers: list[Occupant]  # of these
    decodes: bool  # every one samples after one token: should the next plan be of the same work, so will it
    shape: Shape
    graph: DecodeGraph | None


@dataclass
class _Drawing:
    """How a step's tokens are chosen."""

    draw: Draw
    which: Tensor | None = None  # on the device: the places of rows that are edited

    def changes(self) -> list[Change]:
        """What the device is to be told of it."""
        return [Change((self.draw.edited,), self._take)] if len(self.draw.edited) else []

    def _take(self, sent: Sequence[Tensor]) -> None:
        (self.which,) = sent


@dataclass
class _Step:
    """A plan that is outstanding."""

    plan: StepPlan
    planned: _Planned
    drawing: _Drawing
    slices: list[PromptSlice]
    began: float
    inputs: float  # seconds until it was launched
    marks: list[Any]  # moments of the device's time: at first, with logits, with tokens


class DeviceRunner:
    """Executes plans in order, of which two may be outstanding. What goes wrong within one sequence becomes the error
    of its result, and of those that follow; it alone stops.

    `parameters` are on the device already; they are taken out of their mapping. `num_blocks` per KV group, the null
    block included. One thread calls. Steps are captured by `capture`: before it is called, and without it, each kernel
    is launched for itself.
    """

    def __init__(
        self,
        spec: ModelSpec,
        parameters: MutableMapping[str, Any],
        kernels: Kernels,
        config: EngineConfig,
        num_blocks: Sequence[int],
        *,
        device: torch.device,
        cache_root: str = "",
        memory: tuple[MemoryRow, ...] = (),
        step_kernels: StepKernels | None = None,
    ) -> None:
        """`step_kernels` are those of the device's kind, unless given. On a CPU, unless they are, attention is torch's
        as well."""
        self._device = open_device(device)
        if step_kernels is None and device.type == "cpu":
            kernels = replace(kernels, attention=ResidentAttention(), session=None)
        if step_kernels is None:
            step_kernels = torch_step() if device.type == "cpu" else triton_step()
        self._sizes = () if config.enforce_eager else graph_sizes(config.max_num_seqs)
        self._vocab_size = spec.vocabulary
        model = Decoder(spec, parameters, kernels)
        self.pages = KVPages(spec, num_blocks, config.block_size, getattr(torch, config.kv_dtype), device=device)
        rows, groups = config.max_num_seqs, len(spec.windows)
        self._batch = ResidentBatch(rows, config.max_model_len, config.block_size, groups, device)
        self._sampler = DeviceSampler(
            spec.vocabulary, rows, step_kernels, self._batch.state.token_ids, packed_rows=PROMPT_LOGPROB_ROWS
        )
        self._step = ResidentStep(
            model,
            step_kernels,
            self._batch.state,
            self.pages.layers,
            spec.windows,
            block_size=config.block_size,
            sequences=rows,
            tokens=max(config.max_num_batched_tokens, rows),
            spare=self._sampler.spare,
        )
        self._graphs: DecodeGraphs | None = None
        self._planned: _Planned | None = None  # the last plan's work,
        self._drawing: _Drawing | None = None  # and how its tokens were chosen
        self._outstanding: deque[tuple[_Step, Pending]] = deque()
        self._answered = 0.0  # when the last result was given
        self.capacity = measured_capacity(
            spec, config, num_blocks, model, self.pages, depth=DEPTH, cache_root=cache_root, memory=memory
        )

    @torch.inference_mode()
    def capture(self, progress: bool = True) -> None:
        """Capture the decode steps of the usual sizes, unless all are to be eager. Before any plan."""
        if self._sizes:
            self._graphs = DecodeGraphs(
                self._device, self._step, self._sampler, self._sizes, self._vocab_size, progress=progress
            )

    @property
    def sent(self) -> int:
        """Bytes that have been sent to the device so far."""
        return self._device.sent

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        """Launch a plan. RuntimeError where it contradicts those before it, or is one too many."""
        if len(self._outstanding) >= DEPTH:
            raise RuntimeError(f"plan {plan.plan_id} is one too many: {DEPTH} are outstanding")
        began = time.perf_counter()
        self._apply(plan)
        planned, drawing, told = self._plan_work(plan)
        changes = [*self._changes(), *told]
        slices = [] if planned.decodes else list(prompt_slices(self._batch.rows, planned.units))
        self._batch.advance(planned.units.rows, planned.units.length, planned.sampled)
        sent = self._device.upload([array for change in changes for array in change.arrays]) if changes else []
        step = _Step(plan, planned, drawing, slices, began, time.perf_counter() - began, [])
        self._outstanding.append((step, self._device.launch(lambda: self._run(step, changes, sent))))

    @torch.inference_mode()
    def result(self) -> StepResult:
        """The result of the oldest plan outstanding; waits for it. RuntimeError where there is none."""
        if not self._outstanding:
            raise RuntimeError("no plan is outstanding")
        step, pending = self._outstanding.popleft()
        found = pending.wait()
        self._note_failures(step, found)
        results = self._results(step, found)
        forward = sample = 0.0
        if step.marks:
            first, middle, last = step.marks
            forward, sample = self._device.seconds(first, middle), self._device.seconds(middle, last)
        # While two are outstanding each counts from the other's end.
        began, self._answered = max(step.began, self._answered), time.perf_counter()
        return StepResult(step.plan.plan_id, results, StepTiming(forward, sample, self._answered - began, step.inputs))

    def execute(self, plan: StepPlan) -> StepResult:
        """Submit a plan with none outstanding, and wait for it."""
        self.submit(plan)
        return self.result()

    def close(self) -> None:
        """Let go of the model's memory, when the device is done with it."""
        while self._outstanding:
            self._outstanding.popleft()[1].wait()
        self._planned = None
        del self._step, self._graphs, self._sampler, self.pages, self._batch

    # -- what a plan says -------------------------------------------------------------------------------------

    def _apply(self, plan: StepPlan) -> None:
        """Everything in a plan but its copies and its work, on the host."""
        batch = self._batch
        for seq in plan.gone:
            occupant = batch.remove(seq)
            if occupant is not None:  # not where it was preempted, or ended, before any plan named it
                self._sampler.remove(occupant.row)
        for new in plan.new:
            self._add(new)
        for seq, appended in plan.blocks:
            batch.append_blocks(seq, appended)

    def _add(self, new: NewSequence) -> None:
        occupant, border = self._batch.add(new), new.num_prompt
        try:
            self._sampler.add(occupant.row, new.sampling, new.choice, new.token_ids[:border], new.token_ids[border:])
        except ValueError as error:
            occupant.error = str(error)

    def _changes(self) -> list[Change]:
        """What the device is to be told of the batch."""
        changes = self._sampler.changes()
        change = self._batch.change()
        return changes if change is None else [*changes, change]

    def _plan_work(self, plan: StepPlan) -> tuple[_Planned, _Drawing, list[Change]]:
        """The plan's work, how its tokens are chosen, and what the device is to be told of both: nothing where it is
        the last plan's work again, a token further."""
        told: list[Change] = []
        planned, drawing = self._planned, self._drawing
        if planned is None or not _repeats(plan, planned):
            self._planned = drawing = None  # for good, should the plan be refused
            planned, change = self._units_of(plan)
            told.append(change)
        if drawing is None or self._sampler.edits:
            rows, batch = planned.sampled, self._batch.rows
            draw = self._sampler.draw(rows, batch.num_tokens[rows] - batch.num_prompt[rows])
            if drawing is None or not np.array_equal(draw.edited, drawing.draw.edited):
                drawing = _Drawing(draw)
                told += drawing.changes()
        self._planned, self._drawing = planned, drawing
        return planned, drawing, told

    def _units_of(self, plan: StepPlan) -> tuple[_Planned, Change]:
        occupants = [self._batch.occupant(work.seq) for work in plan.work]
        units = segments(
            self._batch.rows,
            [occupant.row for occupant in occupants],
            # Drafts are none of the tokens a sequence has, and none are proposed here.
            [work.count - work.drafts for work in plan.work],
            [work.sample for work in plan.work],
        )
        decodes = units.tokens == len(occupants) > 0 and bool(units.sample.all())
        graph = self._graphs.of(len(occupants)) if self._graphs is not None and decodes else None
        shape, change = self._step.describe(units, 0 if graph is None else graph.size - len(occupants))
        samplers = [occupants[i] for i in np.flatnonzero(units.sample)]
        sampled = units.rows[units.sample]
        return _Planned(plan.work, occupants, units, sampled, samplers, decodes, shape, graph), change

    # -- on the device ----------------------------------------------------------------------------------------

    def _run(self, step: _Step, changes: Sequence[Change], sent: Sequence[Tensor]) -> dict[str, Tensor]:
        """A step's job. What it gives is its own: the next step overwrites the rest."""
        done, planned = 0, step.planned
        for change in changes:
            change.write(sent[done : done + len(change.arrays)])
            done += len(change.arrays)
        if step.plan.copies:
            self.pages.copy(step.plan.copies)
        found: dict[str, Tensor] = {}
        logits: Tensor | None = None
        if not planned.occupants:
            return found
        step.marks.append(self._device.mark())
        if planned.graph is not None and self._graphs is not None:
            planned.graph.forward()
            logits = self._graphs.logits[: len(planned.sampled)]
        else:
            hidden = self._compute(step, found)
            if len(planned.sampled):
                logits = self._step.last_logits(hidden, len(planned.sampled))
        step.marks.append(self._device.mark())
        if logits is None:
            self._step.advance(planned.shape, None)
        else:
            self._choose(step, logits, found)
        step.marks.append(self._device.mark())
        return found

    def _compute(self, step: _Step, found: dict[str, Tensor]) -> Tensor:
        """Hidden states, and what is wanted of them beside the logits that are sampled."""
        planned = step.planned
        hidden = self._step.forward(planned.shape)
        if not planned.decodes:  # where a token is sampled after every token computed, the sampler finds it
            found["finite"] = hidden.sum(-1, dtype=torch.float32).isfinite()
        for i, (row, k, first, count, offset) in enumerate(step.slices):
            logits = self._step.logits(hidden[offset : offset + count])
            targets = self._batch.state.token_ids[row, first + 1 : first + 1 + count].long()
            found[f"prompt {i}"] = self._sampler.pack_logprobs(logits, targets, k)
        return hidden

    def _choose(self, step: _Step, logits: Tensor, found: dict[str, Tensor]) -> None:
        """A token for each row of logits; then the rows move on."""
        planned, drawing, count = step.planned, step.drawing, len(logits)
        raw = logits
        if drawing.which is not None:
            if drawing.draw.most >= 0:
                raw = logits.clone()
            found["sound"] = self._sampler.edit(logits, drawing.which, self._step.rows(count))
        if planned.graph is not None and self._graphs is not None:
            planned.graph.choose()
            tokens, chosen = self._graphs.tokens[:count], self._graphs.chosen[:, :count].clone()
        else:
            tokens, chosen = self._sampler.choose(logits, self._step.rows(count), filtered=drawing.draw.filtered)
            self._step.advance(planned.shape, tokens)
        found["chosen"] = chosen
        if drawing.draw.most >= 0:
            found["logprobs"] = self._sampler.pack_logprobs(raw, tokens, drawing.draw.most)

    # -- what it gave -----------------------------------------------------------------------------------------

    def _note_failures(self, step: _Step, found: Arrays) -> None:
        """Sequences that have failed keep the first error they got."""
        planned = step.planned
        if "finite" in found and not found["finite"].all():
            unit = np.arange(len(planned.occupants)).repeat(planned.units.length)
            for i in unit[~found["finite"]].tolist():
                planned.occupants[i].error = planned.occupants[i].error or NOT_FINITE
        if "chosen" not in found or not found["chosen"][1].any():
            return
        sound = dict(zip(step.drawing.draw.edited.tolist(), found.get("sound", ()), strict=True))
        for i in np.flatnonzero(found["chosen"][1]).tolist():
            message = ALL_BANNED if sound.get(i) else LOGITS_NOT_FINITE
            planned.samplers[i].error = planned.samplers[i].error or message

    def _results(self, step: _Step, found: Arrays) -> tuple[SequenceResult, ...]:
        """One for each unit of work."""
        planned = step.planned
        tokens = found["chosen"][0].tolist() if "chosen" in found else []
        logprobs = self._logprobs(step, found)
        errors = {occupant.row: occupant.error for occupant in planned.occupants if occupant.error}
        if planned.decodes and not errors:
            each = zip(planned.work, tokens, logprobs, strict=True)
            return tuple([SequenceResult(work.seq, (token,), packed) for work, token, packed in each])
        sampled = dict(zip(planned.sampled.tolist(), zip(tokens, logprobs, strict=True), strict=True))
        prompts: dict[int, bytes] = {}
        for i, part in enumerate(step.slices):
            prompts[part.row] = prompts.get(part.row, b"") + found[f"prompt {i}"].tobytes()
        return sequence_results(planned.work, planned.units.rows.tolist(), sampled, prompts, errors)

    def _logprobs(self, step: _Step, found: Arrays) -> list[bytes]:
        """Packed, of each row sampled."""
        wanted = step.drawing.draw.logprobs.tolist()
        if "logprobs" not in found:
            return [b""] * len(wanted)
        return [
            words[: row_size(k) // 4].tobytes() if k >= 0 else b""
            for words, k in zip(found["logprobs"], wanted, strict=True)
        ]


def _repeats(plan: StepPlan, last: _Planned) -> bool:
    """Whether a plan is the last one again, each sequence a token further. None of them can be new: it would have had
    to go before."""
    return last.decodes and plan.work == last.work and not plan.gone
