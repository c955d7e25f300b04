"""The runner of a device that computes beside the host: plans are launched, their results waited for later.

The batch lives on the device. What a step samples stays there for the next one to read, and comes to the host while
that one is under way: a plan is submitted on the strength of how many tokens there will be, whichever they are.
"""

import time
from collections import deque
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.config import EngineConfig, Place
from penstock.config.graphs import graph_sizes
from penstock.families import ModelSpec
from penstock.kernels import Kernels, PlannedAttention
from penstock.messages import MemoryRow, NewSequence, StepPlan, StepResult, StepTiming
from penstock.models import Decoder
from penstock.runtime.capacity import measured_capacity
from penstock.runtime.device import Pending, open_device
from penstock.runtime.device_sampler import DeviceSampler
from penstock.runtime.graphs import DecodeGraphs
from penstock.runtime.inputs import Segments, seen_by, segments
from penstock.runtime.launched import Drawing, Launched, Planned
from penstock.runtime.mesh import Mesh, collectives
from penstock.runtime.pages import KVPages
from penstock.runtime.resident import Change, ResidentBatch
from penstock.runtime.resident_step import ResidentStep
from penstock.runtime.results import PROMPT_LOGPROB_ROWS, prompt_slices
from penstock.runtime.step_kernels import ResidentAttention, StepKernels, torch_step, triton_step


class DeviceRunner:
    """Executes plans in order, of which `config.depth` may be outstanding. What goes wrong within one sequence becomes
    the error of its result, and of those that follow; it alone stops.

    `parameters` are on the device already; they are taken out of their mapping. `num_blocks` per KV group, the null
    block included. One thread calls. Steps are captured by `capture`: before it is called, and without it, each kernel
    is launched for itself.

    With a mesh it is one rank of several: `spec` and `parameters` are its part, every rank executes every plan, and the
    one that reports samples. The other ranks of its stage get the tokens on the device, before the step ends; stages
    before it learn them. What a plan computes depends on plans alone, never on what a rank has found out by itself.
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
        mesh: Mesh | None = None,
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
        self._windows, self._attention = tuple(spec.windows), kernels.attention
        self._mesh = mesh
        self._place = Place() if mesh is None else mesh.place
        model = Decoder(spec, parameters, kernels, collectives(mesh, None))
        self.pages = KVPages(spec, num_blocks, config.block_size, getattr(torch, config.kv_dtype), device=device)
        rows, groups = config.max_num_seqs, len(spec.windows)
        self._batch = ResidentBatch(rows, config.max_model_len, config.block_size, groups, device)
        self._sampler: DeviceSampler | None = None
        if self._place.reports:
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
            hidden_size=spec.hidden_size,
            dtype=getattr(torch, config.dtype),
            mesh=mesh,
        )
        self._graphs: DecodeGraphs | None = None
        self._planned: Planned | None = None  # the last plan's work,
        self._drawing: Drawing | None = None  # and how its tokens were chosen
        self._outstanding: deque[tuple[Launched, Pending]] = deque()
        self._answered = 0.0  # when the last result was given
        self.capacity = measured_capacity(
            spec, config, num_blocks, model, self.pages, cache_root=cache_root, memory=memory
        )

    @torch.inference_mode()
    def capture(self, progress: bool = True) -> None:
        """Capture the decode steps of the usual sizes, unless all are to be eager. Before any plan. All ranks do it."""
        if self._sizes:
            self._graphs = DecodeGraphs(
                self._device,
                self._step,
                self._sampler,
                self._sizes,
                self._vocab_size,
                progress=progress,
            )

    @property
    def ahead(self) -> int:
        """Plans that may be outstanding."""
        return self.capacity.depth

    @property
    def sent(self) -> int:
        """Bytes that have been sent to the device so far."""
        return self._device.sent

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        """Launch a plan. RuntimeError where it contradicts those before it, or is one too many."""
        if len(self._outstanding) >= self.ahead:
            raise RuntimeError(f"plan {plan.plan_id} is one too many: {self.ahead} are outstanding")
        began = time.perf_counter()
        self._apply(plan)
        planned, drawing, told = self._plan_work(plan)
        changes = [*self._changes(), *told]
        slices = [] if planned.decodes else list(prompt_slices(self._batch.rows, planned.units))
        self._batch.advance(planned.units.rows, planned.units.length, planned.sampled)
        sent = self._device.upload([array for change in changes for array in change.arrays]) if changes else []
        step = Launched(plan, planned, drawing, slices, began, time.perf_counter() - began, [])
        self._outstanding.append((step, self._device.launch(lambda: self._run(step, changes, sent))))

    def result(self) -> StepResult:
        """As `take`. RuntimeError on a rank that does not report."""
        result = self.take()
        if result is None:
            raise RuntimeError("the runner is one rank of several: its plans belong to WorkersExecutor")
        return result

    @property
    def ready(self) -> bool:
        """Whether `take` need not wait."""
        return bool(self._outstanding) and self._outstanding[0][1].ready()

    @torch.inference_mode()
    def take(self) -> StepResult | None:
        """The result of the oldest plan outstanding, on the rank that reports; None on others. Waits until the device
        is done with it. RuntimeError where there is none."""
        if not self._outstanding:
            raise RuntimeError("no plan is outstanding")
        step, pending = self._outstanding.popleft()
        found = pending.wait()
        if self._sampler is None:
            return None
        step.note_failures(found)
        results = step.results(found)
        forward = sample = 0.0
        if step.marks:
            first, middle, last = step.marks
            forward, sample = self._device.seconds(first, middle), self._device.seconds(middle, last)
        # While two are outstanding each counts from the other's end.
        began, self._answered = max(step.began, self._answered), time.perf_counter()
        return StepResult(step.plan.plan_id, results, StepTiming(forward, sample, self._answered - began, step.inputs))

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Submit a plan with none outstanding, and wait for it."""
        self.submit(plan)
        return self.take()

    def learn(self, result: StepResult) -> None:
        """On ranks that do not report: what an earlier plan gave, before one that builds upon it. In the stage that
        samples they have it already. Sequences that have gone since are passed over."""
        if not self._place.last:
            for each in result.results:
                if each.token_ids:  # one: nobody proposes drafts
                    self._batch.learn(each.seq, each.token_ids[0])

    def close(self) -> None:
        """Let go of the model's memory, and of other ranks."""
        self.release()
        if self._mesh is not None:
            self._mesh.close()

    def release(self) -> None:
        """Let go of the model's memory, when the device is done with it; the mesh can serve another runner."""
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
            # It is None where it was preempted, or ended, before any plan named it.
            if occupant is not None and self._sampler is not None:
                self._sampler.remove(occupant.row)
        for new in plan.new:
            self._add(new)
        for seq, appended in plan.blocks:
            batch.append_blocks(seq, appended)

    def _add(self, new: NewSequence) -> None:
        occupant, border = self._batch.add(new), new.num_prompt
        if self._sampler is None:
            return
        try:
            self._sampler.add(occupant.row, new.sampling, new.choice, new.token_ids[:border], new.token_ids[border:])
        except ValueError as error:
            occupant.error = str(error)

    def _changes(self) -> list[Change]:
        """What the device is to be told of the batch."""
        changes = [] if self._sampler is None else self._sampler.changes()
        change = self._batch.change()
        return changes if change is None else [*changes, change]

    def _plan_work(self, plan: StepPlan) -> tuple[Planned, Drawing | None, list[Change]]:
        """The plan's work, how its tokens are chosen, and what the device is to be told of both: nothing where it is
        the last plan's work again, a token further."""
        told: list[Change] = []
        planned, drawing = self._planned, self._drawing
        if planned is None or not _repeats(plan, planned):
            self._planned = drawing = None  # for good, should the plan be refused
            planned, change = self._units_of(plan)
            told.append(change)
        if self._sampler is not None and (drawing is None or self._sampler.edits):
            rows, batch = planned.sampled, self._batch.rows
            draw = self._sampler.draw(rows, batch.num_tokens[rows] - batch.num_prompt[rows])
            if drawing is None or not np.array_equal(draw.edited, drawing.draw.edited):
                drawing = Drawing(draw)
                told += drawing.changes()
        self._planned, self._drawing = planned, drawing
        return planned, drawing, told

    def _units_of(self, plan: StepPlan) -> tuple[Planned, Change]:
        occupants = [self._batch.occupant(work.seq) for work in plan.work]
        units = segments(
            self._batch.rows,
            [occupant.row for occupant in occupants],
            # Drafts are none of the tokens a sequence has, and none are proposed here.
            [work.count - work.drafts for work in plan.work],
            [work.sample for work in plan.work],
        )
        graph = self._graphs.of(len(occupants)) if self._graphs is not None and units.decodes else None
        shape, change = self._step.describe(units, 0 if graph is None else graph.size - len(occupants))
        samplers = [occupants[i] for i in np.flatnonzero(units.sample)]
        sampled = units.rows[units.sample]
        attention = () if units.decodes else self._plan_attention(units)
        return Planned(plan.work, occupants, units, sampled, samplers, units.decodes, shape, graph, attention), change

    def _plan_attention(self, units: Segments) -> Sequence[Any]:
        """Of each KV group, where some unit has several tokens and attention wants to know of them beforehand."""
        if not isinstance(self._attention, PlannedAttention) or int(units.length.max(initial=0)) < 2:
            return ()
        groups = enumerate(self._windows)
        return [self._attention.plan(seen_by(group, window, self._batch.rows, units)) for group, window in groups]

    # -- on the device ----------------------------------------------------------------------------------------

    def _run(self, step: Launched, changes: Sequence[Change], sent: Sequence[Tensor]) -> dict[str, Tensor]:
        """A step's job. What it gives is its own: the next step overwrites the rest."""
        done, planned = 0, step.planned
        for change in changes:
            change.write(sent[done : done + len(change.arrays)])
            done += len(change.arrays)
        if step.plan.copies:
            self.pages.copy(step.plan.copies)
        found: dict[str, Tensor] = {}
        if not planned.occupants:
            return found
        step.marks.append(self._device.mark())
        logits = self._compute(step, found)
        step.marks.append(self._device.mark())
        if logits is not None and step.drawing is not None and self._sampler is not None:
            self._choose(planned, step.drawing, self._sampler, logits, found)
        elif planned.graph is not None:
            planned.graph.choose()
        else:
            self._step.advance(planned.shape, len(planned.sampled))
        step.marks.append(self._device.mark())
        return found

    def _compute(self, step: Launched, found: dict[str, Tensor]) -> Tensor | None:
        """The logits that are sampled, where there are any, on the rank that samples; and what else is wanted."""
        planned, here, sampled = step.planned, self._step, len(step.planned.sampled)
        here.receive(planned.shape)
        if planned.graph is not None:
            planned.graph.forward()
            here.send(planned.graph.hidden)
            return None if self._sampler is None else planned.graph.logits[:sampled]
        hidden = here.forward(planned.shape, planned.attention)
        here.send(hidden.states)
        if not self._place.last:
            return None
        # Where a token is sampled after every token computed, the sampler finds it.
        if self._sampler is not None and not planned.decodes:
            found["finite"] = hidden.latest.sum(-1, dtype=torch.float32).isfinite()
        for i, (row, k, first, count, offset) in enumerate(step.slices):
            logits = here.logits(hidden[offset : offset + count])
            if logits is not None and self._sampler is not None:
                targets = self._batch.state.token_ids[row, first + 1 : first + 1 + count].long()
                found[f"prompt {i}"] = self._sampler.pack_logprobs(logits, targets, k)
        return here.last_logits(hidden, sampled) if sampled else None

    def _choose(
        self, planned: Planned, drawing: Drawing, sampler: DeviceSampler, logits: Tensor, found: dict[str, Tensor]
    ) -> None:
        """A token for each row of logits; then the rows move on."""
        count, raw = len(logits), logits
        if drawing.which is not None:
            if drawing.draw.most >= 0:
                raw = logits.clone()
            found["sound"] = sampler.edit(logits, drawing.which, self._step.rows(count))
        if planned.graph is not None:
            planned.graph.choose()
            tokens, chosen = planned.graph.tokens[:count], planned.graph.chosen[:, :count].clone()
        else:
            tokens, chosen = sampler.choose(logits, self._step.rows(count), filtered=drawing.draw.filtered)
            self._step.advance(planned.shape, count, tokens)
        found["chosen"] = chosen
        if drawing.draw.most >= 0:
            found["logprobs"] = sampler.pack_logprobs(raw, tokens, drawing.draw.most)


def _repeats(plan: StepPlan, last: Planned) -> bool:
    """Whether a plan is the last one again, each sequence a token further. None of them can be new: it would have had
    to go before."""
    return last.decodes and plan.work == last.work and not plan.gone
