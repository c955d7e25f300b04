"""The model runner: plans in, results out.

The batch lives on the device. To submit a plan the host needs the number of tokens, not their ids. On a GPU a sampled
token stays there for the next step to read, and is copied to the host while that step runs. On a CPU the device reads
the host's memory, and a plan is computed when its result is taken.
"""

import time
from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from penstock.config import EngineConfig, RankPlace
from penstock.families import ModelSpec
from penstock.kernels import Kernels
from penstock.kernels.native.attention import AttentionWork
from penstock.kernels.native.session import TimedOp
from penstock.messages import Grammar, Identity, MemoryRow, NewSequence, StepPlan, StepResult, StepTiming
from penstock.models.make import make_decoder
from penstock.runtime.assembly import (
    captured_sizes,
    limits_of_step,
    make_batch,
    make_sampler,
    make_step_kernels,
    recorded_or_eager,
)
from penstock.runtime.device import Change, Device, DevicePage, Parts, Pending
from penstock.runtime.in_flight import InFlightStep
from penstock.runtime.jobs import StepJobs
from penstock.runtime.loading.capacity import measured_capacity
from penstock.runtime.mesh.mesh import Mesh, Traffic, collectives
from penstock.runtime.pages import KVPages
from penstock.runtime.planning import StepPlanner, StepWork
from penstock.runtime.programs.cuda_graphs import DecodeGraphs
from penstock.runtime.programs.recorded import RecordedStep
from penstock.runtime.prompt_slices import PromptSlice, prompt_slices
from penstock.runtime.sampling.grammar_rows import GrammarRow, GrammarRows, Grammars
from penstock.runtime.step import EagerStep, StepLimits
from penstock.runtime.step_kernels import StepKernels


class ModelRunner:
    """Executes plans in order, of which `max_outstanding` may be outstanding.

    An error of one sequence is in its result and in all of its later ones; other sequences go on. One thread calls.

    With a mesh it is one rank of several: `spec` and `parameters` are its part, every rank executes every plan, and one
    rank samples and reports. On GPUs the other ranks of its stage get the tokens by broadcast before the step ends; all
    other ranks get them by `learn`. The work of a plan depends on plans and learned results alone, never on facts that
    one rank found by itself: otherwise the ranks would wait for each other forever.
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
        identity: Identity = Identity(),
        memory: tuple[MemoryRow, ...] = (),
        step_kernels: StepKernels | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        """`parameters` are on the device; they are taken out of their mapping and packed. `step_kernels` are those of
        the device, unless given."""
        self._device, self._kernels, self._mesh = device, kernels, mesh
        place = RankPlace() if mesh is None else mesh.place
        self._learns = mesh is not None and not (place.reports or mesh.broadcasts_tokens)  # gets tokens by `learn`
        self._unlearned: dict[int, int] = {}  # sequences whose last tokens were not learned yet: drafts they had
        self.max_outstanding = 1 if device.shared else config.depth
        self._outstanding: deque[tuple[InFlightStep, Pending]] = deque()
        self._answered = 0.0  # when the last result was given
        self._grammars: GrammarRows | None = None
        self._held: Mapping[int, object] = {}  # the sequences that have a grammar

        limits = limits_of_step(config)
        self._drafts = limits.drafts > 0
        self._graph_sizes, self._vocab_size = captured_sizes(spec, config, device), spec.vocabulary

        self.pages = pages
        shares = collectives(mesh, kernels.session)
        self.model = make_decoder(spec, parameters, kernels, shares, context=config.max_model_len)
        self._batch = make_batch(spec, config, device)
        self._sampler = make_sampler(spec, config, device, limits) if place.reports else None

        recorded: Sequence[AttentionWork] = ()  # what attention reads in a recorded step
        if step_kernels is None:
            step_kernels, recorded = make_step_kernels(spec, config, kernels, device, limits, self._batch)
        self._eager = self._make_eager_step(spec, config, limits, step_kernels)
        self._step = recorded_or_eager(
            self._eager, spec, kernels, step_kernels, recorded, self._batch.state, self._sampler
        )
        self._planner = self._make_planner(spec, recorded)
        self._jobs = self._make_jobs(spec, place)
        fixed = kernels.session is not None or (config.deterministic and not device.shared)
        exact = fixed and spec.transformers is None
        self.capacity = measured_capacity(
            spec, config, self.model, pages, identity=identity, memory=memory, exact_drafts=exact
        )

    def _make_eager_step(
        self, spec: ModelSpec, config: EngineConfig, limits: StepLimits, step_kernels: StepKernels
    ) -> EagerStep:
        return EagerStep(
            self.model,
            step_kernels,
            self._batch.state,
            self.pages.layers,
            spec.windows,
            self._sampler,
            limits,
            block_size=config.block_size,
            hidden_size=spec.hidden_size,
            dtype=getattr(torch, config.dtype),
            mesh=self._mesh,
        )

    def _make_planner(self, spec: ModelSpec, recorded: Sequence[AttentionWork]) -> StepPlanner:
        return StepPlanner(
            self._batch,
            self._sampler,
            self._eager,
            self._kernels.attention,
            self.pages,
            spec.windows,
            recorded=recorded,
            shared=self._device.shared,
        )

    def _make_jobs(self, spec: ModelSpec, place: RankPlace) -> StepJobs:
        return StepJobs(
            self._device,
            self._eager,
            self._step,
            self._planner,
            self._batch.state,
            self.pages,
            pooling=spec.pooling,
            samples=self._sampler is not None,
            last=place.last,
            drafts=self._drafts and not self._learns,
            # Without ranks a recorded decode step calls no torch op, so it does not enter inference mode. Torch ops of
            # its other steps run outside it: no tensor here requires a gradient.
            inference_mode=self._step is self._eager or self._mesh is not None,
        )

    @torch.inference_mode()
    def capture(self, progress: bool = True) -> None:
        """Capture decode steps of the usual sizes, if the device has graphs and the configuration enables them. Called
        before any plan, on all ranks."""
        if self._graph_sizes:
            self._planner.graphs = DecodeGraphs(
                self._device,
                self._eager,
                self._graph_sizes,
                self._vocab_size,
                samples=self._sampler is not None,
                progress=progress,
            )

    def use_grammars(self, grammars: Grammars) -> None:
        """Hold sequences to their grammars; without this they are errors. Called before any plan."""
        if self._sampler is not None:
            self._grammars = GrammarRows(grammars, self._sampler.masks, shared=self._device.shared)
            self._held = self._grammars.held

    def prepare(self, grammar: Grammar) -> bool:
        """See Grammars. True on a rank that does not sample."""
        return self._grammars is None or self._grammars.prepare(grammar)

    @property
    def bytes_sent(self) -> int:
        """Bytes that have been sent to the device so far."""
        return self._device.sent

    def page(self, block: int) -> DevicePage | memoryview:
        """A block's page, for a model with one KV group. See Device."""
        (pages,) = self.pages.groups
        return self._device.page(pages[block])

    def host_memory(self, size: int) -> memoryview:
        """See Device."""
        return self._device.host_memory(size)

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank has handed to others so far."""
        return Traffic() if self._mesh is None else self._mesh.traffic

    # -- plans and results ------------------------------------------------------------------------------------

    def submit(self, plan: StepPlan) -> None:
        """Launch a plan. RuntimeError where it contradicts those before it, or is one too many."""
        if len(self._outstanding) >= self.max_outstanding:
            raise RuntimeError(
                f"plan {plan.plan_id} is one too many: {self.max_outstanding} are outstanding; take a result first"
            )
        began = time.perf_counter()
        if plan.new or plan.gone or plan.blocks:
            self._apply(plan)
        repeated = self._planner.repeated(plan)
        if self._drafts and repeated is None:
            self._batch.write_drafts(plan.work)
        if self._learns:
            self._check_learned(plan)
        # A repeated step has no new rows and no drafts, and its work is described on the device.
        changes = self._changes() if repeated is None or plan.blocks or self._learns else []
        if repeated is None:
            self._step.wake()
            work, change = self._planner.plan(plan)
            changes.append(change)
        else:
            work = repeated
        sampling, options, edited = self._planner.plan_sampling(work)
        if edited is not None:
            changes.append(edited)
        masks = self._mask(work, changes) if self._held else None
        slices: Sequence[PromptSlice] = ()  # a repeated step scores no prompt
        if repeated is None:
            slices = tuple(prompt_slices(self._batch, work.units))
            self._batch.advance(work.units.rows, work.units.length, work.units.logits)
        else:
            self._batch.advance_again()
        sent = self._device.upload([array for change in changes for array in change.arrays]) if changes else []
        step = InFlightStep(plan, work, sampling, options, slices, began, time.perf_counter() - began)
        if masks is not None:
            step.grammar_rows, step.masked, step.late = masks
        self._outstanding.append((step, self._jobs.launch(step, changes, sent)))

    def result(self) -> StepResult:
        """As `take`. RuntimeError on a rank that does not report."""
        result = self.take()
        if result is None:
            raise RuntimeError("this rank does not sample, so its plans have no results: use take()")
        return result

    @property
    def ready(self) -> bool:
        """Whether `take` need not wait for the device."""
        return bool(self._outstanding) and self._outstanding[0][1].ready()

    def take(self) -> StepResult | None:
        """The result of the oldest outstanding plan, on the rank that reports; None on others. Waits until the device
        is done with it. RuntimeError where no plan is outstanding, MeshError where other ranks are not there."""
        if not self._outstanding:
            raise RuntimeError("no plan is outstanding")
        step, pending = self._outstanding.popleft()
        outputs = pending.wait()
        if outputs.accepted is not None:
            self._batch.take_back_drafts(step.work.occupants, step.refused(outputs))
        if self._sampler is None:
            return None
        results = step.results(outputs, self._batch.errors)
        forced: tuple[tuple[int, tuple[int, ...]], ...] = ()
        if step.grammar_rows and self._grammars is not None:
            self._grammars.take(step.grammar_rows, results)
            forced = self._grammars.forced(step.grammar_rows) if self._drafts else ()
            self._launch_late()
        if self._batch.errors:
            self._batch.forget_errors(other.plan for other, _ in self._outstanding)
        forward, sample = step.seconds(self._device)
        # While two plans are outstanding, each counts from the other's end.
        began, self._answered = max(step.began, self._answered), time.perf_counter()
        timing = StepTiming(forward, sample, self._answered - began, step.inputs)
        return StepResult(step.plan.plan_id, results, timing, forced)

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Submit a plan with none outstanding, and wait for it."""
        self.submit(plan)
        return self.take()

    def learn(self, result: StepResult) -> None:
        """On ranks that do not report: take what an earlier plan gave, before one that builds upon it. Sequences that
        have gone since are passed over."""
        if self._learns:
            for each in result.results:
                self._batch.learn(each.seq, each.token_ids, self._unlearned.pop(each.seq, 0))

    def profile(self) -> AbstractContextManager[list[TimedOp]]:
        """Times the ops of the plans executed within; its list is filled at the end. ValueError where steps are not
        recorded."""
        if not isinstance(self._step, RecordedStep):
            raise ValueError(f"there are no native kernels to time here: {self._kernels.fingerprint} are in use")
        return self._step.profile()

    def forget(self) -> None:
        """Forget every sequence and outstanding plan, in any state that an error has left. For one rank only."""
        self._drop_outstanding()
        self._planner.forget()
        self._batch.clear()
        if self._sampler is not None:
            self._sampler.clear()
        if self._grammars is not None:
            self._grammars.held.clear()

    def trim(self, limits: Sequence[int]) -> None:
        """See Executor. On the CPU only."""
        self.pages.trim(limits)

    def close(self) -> None:
        """Free the model's memory and leave the mesh."""
        self.release()
        if self._mesh is not None:
            self._mesh.close()

    def release(self) -> None:
        """Free the model's memory when the device is done with it; the mesh can serve another runner."""
        if hasattr(self, "_batch"):  # else it was called before
            self._drop_outstanding()
            if self._grammars is not None:
                self._grammars.close()
            del self.model, self._jobs, self._step, self._eager, self._planner, self._sampler, self.pages, self._batch

    def _drop_outstanding(self) -> None:
        while self._outstanding and not self._device.shared:
            self._outstanding.popleft()[1].wait()
        self._outstanding.clear()

    # -- what a plan says -------------------------------------------------------------------------------------

    def _apply(self, plan: StepPlan) -> None:
        """Everything in a plan but its copies and its work, on the host."""
        batch = self._batch
        for seq in plan.gone:
            occupant = batch.remove(seq)
            if self._grammars is not None:
                self._grammars.remove(seq)
            # It is None where the sequence was preempted, or ended, before any plan named it.
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
            self._batch.errors[new.seq] = str(error)
        if new.grammar is not None:
            refusal = "this engine holds no output to a grammar; leave it out"
            if self._grammars is not None:
                refusal = self._grammars.add(new.seq, new.grammar, new.token_ids[border:])
            if refusal:
                self._batch.errors.setdefault(new.seq, refusal)

    def _check_learned(self, plan: StepPlan) -> None:
        """RuntimeError where a sequence goes on from a token that this rank has not learned."""
        for seq in plan.gone:
            self._unlearned.pop(seq, None)
        for work in plan.work:
            if work.seq in self._unlearned:
                raise RuntimeError(f"the plan builds upon a token of sequence {work.seq} that this rank did not learn")
        self._unlearned.update((work.seq, work.drafts) for work in plan.work if work.sample)

    def _changes(self) -> list[Change]:
        """Returns the values of the batch and its sampling to write on the device."""
        changes = [] if self._sampler is None else self._sampler.changes()
        change = self._batch.change()
        return changes if change is None else [*changes, change]

    def _mask(self, work: StepWork, changes: list[Change]) -> tuple[list[GrammarRow], bool, bool] | None:
        """The rows of a step that have a grammar, whether any is restricted now, and whether their masks come late."""
        if self._grammars is None:
            return None
        rows, late = self._grammars.plan(work)
        masks = None if late else self._grammars.fill(rows, self._batch.errors)
        if masks is not None:
            changes.append(masks)
        return rows, masks is not None, late

    def _launch_late(self) -> None:
        """Choose the tokens of the next outstanding step, if it awaited those of the step that was taken."""
        if not self._outstanding or not self._outstanding[0][0].late or self._grammars is None:
            return
        step, begun = self._outstanding.popleft()
        masks = self._grammars.fill(step.grammar_rows, self._batch.errors)
        step.masked = masks is not None
        changes = [] if masks is None else [masks]
        sent = self._device.upload([array for change in changes for array in change.arrays]) if changes else []
        self._outstanding.appendleft((step, Parts(begun, self._jobs.launch_rest(step, changes, sent))))
