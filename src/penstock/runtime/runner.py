"""The model runner: plans in, results out.

The batch lives on the device: a plan is submitted on the strength of how many tokens there will be, whichever they are.
On a GPU what a step samples stays there for the next one to read, and comes to the host while that one runs. On a CPU
the device reads the host's memory, and a plan is computed when its result is asked for.
"""

import time
from collections import deque
from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.config import EngineConfig, Place
from penstock.config.graphs import graph_sizes
from penstock.families import ModelSpec
from penstock.kernels import Kernels, PlannedAttention
from penstock.kernels.batch_arrays import TOKEN, BatchRows, Chosen, StepArrays
from penstock.kernels.native.attention import AttentionWork
from penstock.kernels.native.session import TimedOp
from penstock.messages import MemoryRow, NewSequence, StepPlan, StepResult, StepTiming
from penstock.models import Decoder
from penstock.runtime.batch import ResidentBatch
from penstock.runtime.device import Arrays, Change, Device, Pending
from penstock.runtime.in_flight import InFlightStep, StepWork
from penstock.runtime.loading.capacity import measured_capacity
from penstock.runtime.mesh.mesh import Mesh, Traffic, collectives
from penstock.runtime.native_step import NativeStep
from penstock.runtime.pages import KVPages
from penstock.runtime.programs.cuda_graphs import DecodeGraphs
from penstock.runtime.programs.recorded import RecordedStep
from penstock.runtime.prompt_slices import PROMPT_LOGPROB_ROWS, prompt_slices
from penstock.runtime.sampling.sampler import Sampler, StepSampling
from penstock.runtime.step import EagerStep, RowsToChoose, Step
from penstock.runtime.step_kernels import ReferenceStep, StepKernels, triton_step
from penstock.runtime.units import Units, attention_batch, units_of

ALWAYS = 1 << 62  # steps


class Proposer(Protocol):
    """Drafts tokens that a step verifies."""

    most: int  # drafts of one sequence in a step

    def propose(self, state: BatchRows, step: StepArrays, sequences: int) -> None:
        """Write as many draft ids as a unit says behind its row's known tokens, for each of the step's units.

        A row knows computed + length - drafts tokens. Runs on the device before the step's inputs are filled.
        """
        ...


class ModelRunner:
    """Executes plans in order, of which `ahead` may be outstanding.

    What goes wrong within one sequence becomes the error of its result, and of those that follow; it alone stops. One
    thread calls.

    With a mesh it is one rank of several: `spec` and `parameters` are its part, every rank executes every plan, and the
    one that reports samples. On GPUs the other ranks of its stage get the tokens on the device before the step ends;
    all other ranks learn them. What a plan computes depends on plans and learned results alone, never on what one rank
    found out by itself: the ranks would wait for each other forever.
    """

    def __init__(
        self,
        spec: ModelSpec,
        parameters: MutableMapping[str, Any],
        kernels: Kernels,
        config: EngineConfig,
        pages: KVPages,
        device: Device,
        *,
        cache_root: str = "",
        memory: tuple[MemoryRow, ...] = (),
        step_kernels: StepKernels | None = None,
        mesh: Mesh | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        """`parameters` are on the device; they are taken out of their mapping and packed. `step_kernels` are those of
        the device, unless given. Without a `proposer`, drafts that a plan allows are not used."""
        self._device = device
        self._kernels = kernels
        self._windows = tuple(spec.windows)
        self._mesh = mesh
        self._place = Place() if mesh is None else mesh.place
        self._proposer = proposer
        # Whether sampled tokens are learned from results that other ranks report, and whose are yet to be learned.
        self._learns = mesh is not None and not (mesh.place.reports or mesh.broadcasts_tokens)
        self._unlearned: set[int] = set()
        self.pages = pages
        self.ahead = 1 if device.shared else config.depth  # plans that may be outstanding
        model = Decoder(spec, parameters, kernels, collectives(mesh, kernels.session))
        rows, tokens = config.max_num_seqs, max(config.max_num_batched_tokens, config.max_num_seqs)
        shared = device.shared
        self._batch = ResidentBatch(
            rows, config.max_model_len, config.block_size, len(self._windows), device.where, shared=shared
        )
        self._sampler: Sampler | None = None
        if self._place.reports:
            self._sampler = Sampler(spec.vocabulary, rows, device.where, shared=shared)
        logit_rows = rows * (1 + (proposer.most if proposer else 0))
        blocks = -(-config.max_model_len // config.block_size)
        self._attention: Sequence[AttentionWork] = ()  # that a recording reads
        if step_kernels is None and kernels.session is not None:
            self._attention = [AttentionWork(rows, tokens, blocks, window) for window in self._windows]
            step_kernels = NativeStep(kernels.session, self._attention)
        elif step_kernels is None:
            step_kernels = ReferenceStep() if device.where.type == "cpu" else triton_step()
        self._eager = EagerStep(
            model,
            step_kernels,
            self._batch.state,
            pages.layers,
            self._windows,
            self._sampler,
            block_size=config.block_size,
            sequences=rows,
            logit_rows=logit_rows,
            tokens=tokens,
            hidden_size=spec.hidden_size,
            dtype=getattr(torch, config.dtype),
            mesh=mesh,
        )
        self._step: Step = self._eager
        if isinstance(step_kernels, NativeStep) and kernels.session is not None:
            self._step = RecordedStep(
                self._eager,
                step_kernels,
                kernels.session,
                self._attention,
                self._batch.state.token_ids,
                self._sampler,
                scored=PROMPT_LOGPROB_ROWS,
            )
        self._graph_sizes = () if config.enforce_eager or shared else graph_sizes(rows)
        self._graphs: DecodeGraphs | None = None
        self._vocab_size = spec.vocabulary
        self._work: StepWork | None = None  # the last plan's,
        self._sampling: tuple[StepSampling, RowsToChoose] | None = None  # and how its tokens were chosen
        self._outstanding: deque[tuple[InFlightStep, Pending]] = deque()
        self._answered = 0.0  # when the last result was given
        self.capacity = measured_capacity(spec, config, model, pages, cache_root=cache_root, memory=memory)

    @torch.inference_mode()
    def capture(self, progress: bool = True) -> None:
        """Capture decode steps of the usual sizes, where the device has graphs and the configuration wants them. Called
        before any plan, on all ranks."""
        if self._graph_sizes:
            self._graphs = DecodeGraphs(
                self._device,
                self._eager,
                self._graph_sizes,
                self._vocab_size,
                samples=self._sampler is not None,
                progress=progress,
            )

    @property
    def sent(self) -> int:
        """Bytes that have been sent to the device so far."""
        return self._device.sent

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank has handed to others so far."""
        return Traffic() if self._mesh is None else self._mesh.traffic

    # -- plans and results ------------------------------------------------------------------------------------

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        """Launch a plan. RuntimeError where it contradicts those before it, or is one too many."""
        if len(self._outstanding) >= self.ahead:
            raise RuntimeError(f"plan {plan.plan_id} is one too many: {self.ahead} are outstanding")
        began = time.perf_counter()
        if plan.new or plan.gone or plan.blocks:
            self._apply(plan)
        if self._learns:
            self._check_learned(plan)
        changes = self._changes()
        work, change = self._plan_work(plan)
        changes += [change] if change is not None else []
        sampling, rows, change = self._plan_sampling(work)
        changes += [change] if change is not None else []
        slices = list(prompt_slices(self._batch, work.units)) if self._batch.prompt_logprobs else []
        units = work.units
        self._batch.advance(units.rows, units.length, units.logits)
        sent = self._device.upload([array for change in changes for array in change.arrays]) if changes else []
        step = InFlightStep(plan, work, sampling, rows, slices, began, time.perf_counter() - began, [])
        self._outstanding.append((step, self._device.launch(lambda: self._run(step, changes, sent))))

    def result(self) -> StepResult:
        """As `take`. RuntimeError on a rank that does not report."""
        result = self.take()
        if result is None:
            raise RuntimeError("the runner is one rank of several: its plans belong to WorkersExecutor")
        return result

    @property
    def ready(self) -> bool:
        """Whether `take` need not wait for the device."""
        return bool(self._outstanding) and self._outstanding[0][1].ready()

    @torch.inference_mode()
    def take(self) -> StepResult | None:
        """The result of the oldest outstanding plan, on the rank that reports; None on others. Waits until the device
        is done with it. RuntimeError where no plan is outstanding, MeshError where other ranks are not there."""
        if not self._outstanding:
            raise RuntimeError("no plan is outstanding")
        step, pending = self._outstanding.popleft()
        found = pending.wait()
        if self._sampler is None:
            return None
        step.note_failures(found)
        results = step.results(found)
        if "accepted" in found:
            self._settle(step, found)
        forward = sample = 0.0
        if step.marks:
            first, middle, last = step.marks
            forward, sample = self._device.seconds(first, middle), self._device.seconds(middle, last)
        # While two plans are outstanding, each counts from the other's end.
        began, self._answered = max(step.began, self._answered), time.perf_counter()
        return StepResult(step.plan.plan_id, results, StepTiming(forward, sample, self._answered - began, step.inputs))

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Submit a plan with none outstanding, and wait for it."""
        self.submit(plan)
        return self.take()

    def learn(self, result: StepResult) -> None:
        """On ranks that do not report: take what an earlier plan gave, before one that builds upon it. Sequences that
        have gone since are passed over."""
        if self._learns:
            for each in result.results:
                self._unlearned.discard(each.seq)
                self._batch.learn(each.seq, each.token_ids)

    def profile(self) -> AbstractContextManager[list[TimedOp]]:
        """Times the ops of the plans executed within; its list is filled at the end. ValueError where steps are not
        recorded."""
        if not isinstance(self._step, RecordedStep):
            raise ValueError(f"there are no native kernels to time here: {self._kernels.fingerprint} are in use")
        return self._step.profile()

    def close(self) -> None:
        """Free the model's memory and leave the mesh."""
        self.release()
        if self._mesh is not None:
            self._mesh.close()

    def release(self) -> None:
        """Free the model's memory when the device is done with it; the mesh can serve another runner."""
        while self._outstanding and not self._device.shared:
            self._outstanding.popleft()[1].wait()
        self._outstanding.clear()
        self._work = None
        del self._step, self._eager, self._graphs, self._sampler, self.pages, self._batch

    # -- what a plan says -------------------------------------------------------------------------------------

    def _apply(self, plan: StepPlan) -> None:
        """Everything in a plan but its copies and its work, on the host."""
        batch = self._batch
        for seq in plan.gone:
            occupant = batch.remove(seq)
            # It is None where the sequence was preempted, or ended, before any plan named it.
            if occupant is not None and self._sampler is not None:
                self._sampler.remove(occupant.row)
        if self._kernels.attention.reads_whole_blocks:
            self._clear_new_blocks(plan)
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

    def _clear_new_blocks(self, plan: StepPlan) -> None:
        """Zero the part of new blocks that the step does not fill, before the blocks are appended."""
        batch = self._batch
        counts = {work.seq: work.count - work.drafts for work in plan.work}
        for new in plan.new:
            self._clear(new.num_computed, counts.get(new.seq, 0), 0, new.blocks)
        for seq, appended in plan.blocks:
            row = batch.occupant(seq).row
            self._clear(int(batch.num_computed[row]), counts.get(seq, 0), int(batch.num_blocks[0, row]), appended)

    def _clear(self, computed: int, count: int, held: int, blocks: Sequence[Sequence[int]]) -> None:
        """Zero what a sequence was given as its blocks `held`, `held` + 1, ... and this step does not fill.

        Blocks that hold any of its `computed` tokens are left alone: other sequences may share them.
        """
        size = self._batch.block_size
        first = max(-(-computed // size), (computed + count) // size)
        for group, ids in enumerate(blocks):
            self.pages.clear(group, ids[max(first - held, 0) :])

    def _check_learned(self, plan: StepPlan) -> None:
        """RuntimeError where a sequence goes on from a token that this rank has not learned."""
        self._unlearned.difference_update(plan.gone)
        for work in plan.work:
            if work.seq in self._unlearned:
                raise RuntimeError(f"the plan builds upon a token of sequence {work.seq} that this rank did not learn")
        self._unlearned.update(work.seq for work in plan.work if work.sample)

    def _changes(self) -> list[Change]:
        """What must be written on the device of the batch and its sampling."""
        changes = [] if self._sampler is None else self._sampler.changes()
        change = self._batch.change()
        return changes if change is None else [*changes, change]

    def _plan_work(self, plan: StepPlan) -> tuple[StepWork, Change | None]:
        """The plan's work, and its description for the device: none where it repeats the last plan's work."""
        last, self._work = self._work, None  # for good, should the plan be refused
        # No sequence of a repeated plan can be new: it would have had to go before.
        if last is not None and last.repeatable > 0 and plan.work == last.work and not plan.gone:
            self._work = last._replace(repeatable=last.repeatable - 1)
            return self._work, None
        self._step.wake()
        self._sampling = None
        occupants = [self._batch.occupant(work.seq) for work in plan.work]
        proposes = self._proposer is not None
        units = units_of(
            self._batch,
            [occupant.row for occupant in occupants],
            [work.count if proposes else work.count - work.drafts for work in plan.work],
            [work.sample for work in plan.work],
            [work.drafts if proposes else 0 for work in plan.work],
        )
        graph = self._graphs.smallest_for(len(occupants)) if self._graphs is not None and units.decodes else None
        shape, change = self._eager.describe(units, 0 if graph is None else graph.size - len(occupants))
        attention, repeatable = self._plan_attention(units)
        unit = np.arange(len(occupants)).repeat(units.logits)
        ahead = np.arange(len(unit)) - (np.cumsum(units.logits) - units.logits)[unit]
        self._work = StepWork(
            plan.work,
            occupants,
            units,
            units.rows[unit],
            ahead,
            shape,
            graph,
            attention,
            repeatable if units.decodes else 0,
        )
        return self._work, change

    def _plan_attention(self, units: Units) -> tuple[Sequence[Any], int]:
        """What attention plans on the host for each KV group, and for how many more decode steps that holds."""
        if not len(units.rows):
            return (), 0
        seen = [attention_batch(group, window, self._batch, units) for group, window in enumerate(self._windows)]
        if self._attention:
            for prepared, batch in zip(self._attention, seen, strict=True):
                prepared.fill(batch)
            return self._attention, min(prepared.steps_unchanged() for prepared in self._attention)
        attention = self._kernels.attention
        if self._device.shared:
            keys = [self.pages.group_keys(group) for group in range(len(seen))]
            return [
                None if key is None else attention.prepare(batch, key) for batch, key in zip(seen, keys, strict=True)
            ], 0
        if not isinstance(attention, PlannedAttention) or int(units.length.max()) < 2:
            return (), ALWAYS
        return [attention.plan(batch) for batch in seen], 0

    def _plan_sampling(self, work: StepWork) -> tuple[StepSampling | None, RowsToChoose | None, Change | None]:
        """How the step's rows of logits are sampled, and what the device needs for it."""
        if self._sampler is None:
            return None, None, None
        last = self._sampling
        if last is not None and not self._sampler.has_edits:
            return *last, None
        rows, batch = work.logit_rows, self._batch
        sampling = self._sampler.plan(rows, batch.num_tokens[rows] - batch.num_prompt[rows] + work.ahead)
        if last is not None and np.array_equal(sampling.edited, last[0].edited):
            return *last, None
        asked = RowsToChoose(sampling.filtered, sampling.most_logprobs)
        self._sampling = (sampling, asked)
        change = Change((sampling.edited,), asked.set_edited) if len(sampling.edited) else None
        return sampling, asked, change

    # -- on the device ----------------------------------------------------------------------------------------

    def _run(self, step: InFlightStep, changes: Sequence[Change], sent: Sequence[Tensor]) -> dict[str, Tensor]:
        """A step's job. Its results are tensors of its own, as the next step overwrites the rest."""
        done, work = 0, step.work
        for change in changes:
            change.write(sent[done : done + len(change.arrays)])
            done += len(change.arrays)
        if step.plan.copies:
            self.pages.copy(step.plan.copies)
        found: dict[str, Tensor] = {}
        if not work.occupants:
            return found
        if self._proposer is not None and work.units.drafts.any():
            self._proposer.propose(self._batch.state, self._eager.arrays, work.shape.sequences)
        step.marks.append(self._device.mark())
        logits = self._compute(step, found)
        step.marks.append(self._device.mark())
        self._choose(step, logits, found)
        step.marks.append(self._device.mark())
        return found

    def _compute(self, step: InFlightStep, found: dict[str, Tensor]) -> Tensor | None:
        """The logits that tokens are chosen from, where there are any, on the rank that samples. Scores prompts."""
        work, shape = step.work, step.work.shape
        self._eager.receive(shape)
        if work.graph is not None:
            work.graph.forward()
            self._eager.send(work.graph.hidden)
            return None if self._sampler is None else work.graph.logits[: len(work.logit_rows)]
        hidden = self._step.forward(shape, work.attention)
        self._eager.send(hidden.states)
        if not self._place.last:
            return None
        # Where every token has a row of logits, choosing tokens finds rows that are not finite.
        if self._sampler is not None and not shape.in_place:
            found["finite"] = self._step.finite(hidden)
        kept = hidden.mapped(torch.clone) if step.slices else hidden  # logits may overwrite what they are computed from
        for i, (row, k, first, count, offset) in enumerate(step.slices):
            logits = self._step.logits(kept[offset : offset + count])
            if logits is not None and self._sampler is not None:
                targets = self._batch.state.token_ids[row, first + 1 : first + 1 + count].long()
                found[f"prompt {i}"] = self._step.score(logits, targets, k)
        if not shape.logit_rows:
            return None
        rows = self._eager.arrays.logit_rows[TOKEN, : shape.logit_rows]
        return self._step.logits(kept if shape.in_place else kept[rows])

    def _choose(self, step: InFlightStep, logits: Tensor | None, found: dict[str, Tensor]) -> None:
        """Choose a token for each row of logits; then move the rows on."""
        work, graph, asked = step.work, step.work.graph, step.rows
        if logits is None or self._sampler is None or asked is None:
            if graph is not None:
                graph.choose()
            else:
                self._step.advance(work.shape, None)
            return
        if graph is not None and asked.plain:
            graph.choose()
            chosen = Chosen(*(tensor[: len(logits)].clone() for tensor in graph.chosen[:2]))
        else:
            chosen = self._step.choose(logits, asked)
            self._step.advance(work.shape, chosen.tokens)
        found["tokens"], found["status"] = chosen.tokens, chosen.status
        if chosen.packed is not None:
            found["packed"] = chosen.packed
        if self._proposer is not None and work.units.drafts.any():
            found["accepted"] = self._eager.arrays.accepted[: len(logits)].clone()

    def _settle(self, step: InFlightStep, found: Arrays) -> None:
        """Take back the drafts that were counted and then refused."""
        work = step.work
        refused = work.units.logits - step.gained(found)
        for occupant, drafts in zip(work.occupants, refused.tolist(), strict=True):
            self._batch.refuse(occupant, drafts)
