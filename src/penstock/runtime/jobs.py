"""Makes a step into a job that `Device.launch` runs on the device."""

from collections.abc import Sequence
from functools import partial

import msgspec
import torch
from torch import Tensor

from penstock.config.facts import PoolingFacts
from penstock.kernels.batch_arrays import TOKEN, BatchRows
from penstock.models import Hidden
from penstock.models.pooling import finished, pool
from penstock.runtime.device import Change, Device, Pending, StepOutputs
from penstock.runtime.in_flight import InFlightStep
from penstock.runtime.pages import KVPages
from penstock.runtime.planning import StepPlanner
from penstock.runtime.step import EagerStep, ModelStep


class StepJobs:
    """Runs steps that were planned: the forward pass, the choice of tokens, and what results need of both."""

    def __init__(
        self,
        device: Device,
        eager: EagerStep,
        step: ModelStep,
        planner: StepPlanner,
        state: BatchRows,
        pages: KVPages,
        *,
        pooling: PoolingFacts | None,
        samples: bool,
        last: bool,
        drafts: bool,
        inference_mode: bool,
    ) -> None:
        """`step` computes the model; `eager` is it, or shares its arrays. `last`: this rank has the model's end.
        `drafts`: steps may verify some, and this rank has the sampled tokens. `inference_mode`: jobs call torch's ops.
        """
        self._device = device
        self._eager, self._step = eager, step
        self._planner = planner
        self._state = state
        self._pages = pages
        self._pooling = pooling
        self._samples, self._last, self._drafts = samples, last, drafts
        self._run = torch.inference_mode()(self._whole) if inference_mode else self._whole
        self._run_rest = torch.inference_mode()(self._second) if inference_mode else self._second

    def launch(self, step: InFlightStep, changes: Sequence[Change], sent: Sequence[Tensor]) -> Pending:
        """Launch a step, up to its logits if its masks come late. `sent`: the arrays of `changes`, on the device."""
        return self._device.launch(partial(self._run, step, changes, sent))

    def launch_rest(self, step: InFlightStep, changes: Sequence[Change], sent: Sequence[Tensor]) -> Pending:
        """Launch the second of a step's two jobs: its masks are known now."""
        return self._device.launch(partial(self._run_rest, step, changes, sent))

    def _whole(self, step: InFlightStep, changes: Sequence[Change], sent: Sequence[Tensor]) -> StepOutputs:
        """A step's job. Its outputs are tensors of its own, as the next step overwrites the rest."""
        work = step.work
        if changes:
            self._write(changes, sent)
        if step.plan.copies:
            self._pages.copy(step.plan.copies)
        outputs = StepOutputs()
        if not work.occupants:
            return outputs
        step.marks.append(self._device.mark())
        self._eager.receive(work.shape)
        if self._pooling is not None:
            self._pool(step, outputs)
        elif work.shape.in_place and work.graph is None and step.options is not None and not step.late:
            outputs = self._step.decode(work.shape, work.attention, step.options, step.masked)
        else:
            step.logits = self._compute(step, outputs)
            if step.late:
                return outputs
            outputs = outputs.joined(self._choose(step))
        if self._drafts:
            outputs = self._with_accepted(step, outputs)
        step.marks.append(self._device.mark())
        return outputs

    def _second(self, step: InFlightStep, changes: Sequence[Change], sent: Sequence[Tensor]) -> StepOutputs:
        self._write(changes, sent)
        outputs = self._choose(step)
        if self._drafts:
            outputs = self._with_accepted(step, outputs)
        step.marks.append(self._device.mark())
        return outputs

    @staticmethod
    def _write(changes: Sequence[Change], sent: Sequence[Tensor]) -> None:
        done = 0
        for change in changes:
            change.write(sent[done : done + len(change.arrays)])
            done += len(change.arrays)

    def _with_accepted(self, step: InFlightStep, outputs: StepOutputs) -> StepOutputs:
        """Returns the outputs of a step, with the numbers of accepted drafts if it had drafts."""
        work = step.work
        if work.decodes or not work.units.drafts.any():
            return outputs
        accepted = self._eager.arrays.accepted[: len(work.logit_rows)].clone()
        return msgspec.structs.replace(outputs, accepted=accepted)

    def _compute(self, step: InFlightStep, outputs: StepOutputs) -> Tensor | None:
        """The logits of every step that `decode` cannot do: prompts and chunks of them, captured steps, steps whose
        masks come late, and all steps of ranks that do not sample."""
        work, shape = step.work, step.work.shape
        graphs = self._planner.graphs
        if work.graph is not None and graphs is not None:
            return graphs.forward(work.graph)
        hidden = self._step.forward(shape, work.attention)
        self._eager.send(hidden.states)
        logits = None
        if self._last:
            # If every token has a row of logits, choosing tokens finds rows that are not finite.
            if self._samples and not shape.in_place:
                outputs.finite = self._step.finite(hidden)
            kept = hidden.mapped(torch.clone) if step.slices else hidden  # logits may overwrite hidden states
            if step.slices:
                outputs.prompts = self._score(step, kept)
            if shape.logit_rows:
                rows = self._eager.arrays.logit_rows[TOKEN, : shape.logit_rows]
                logits = self._step.logits(kept[rows])
        step.marks.append(self._device.mark())
        return logits

    def _pool(self, step: InFlightStep, outputs: StepOutputs) -> None:
        """The vectors of a step's units that sample, instead of tokens."""
        work, shape, pooling = step.work, step.work.shape, self._pooling
        assert pooling is not None, "the model gives vectors"
        hidden = self._step.forward(shape, work.attention)
        self._eager.send(hidden.states)
        step.marks.append(self._device.mark())
        if self._last and self._samples:
            outputs.finite = self._step.finite(hidden)
            if shape.logit_rows and pooling.mode == "last":
                rows = self._eager.arrays.logit_rows[TOKEN, : shape.logit_rows]
                outputs.pooled = finished(self._eager.vectors(hidden[rows]).float(), pooling)
            elif shape.logit_rows:  # every unit is a whole prompt
                states = self._eager.vectors(hidden)
                outputs.pooled = finished(pool(states, work.units.length.tolist(), pooling.mode), pooling)
        self._eager.advance(shape)

    def _choose(self, step: InFlightStep) -> StepOutputs:
        """Choose tokens from `step.logits`, and move the rows on."""
        work, graphs = step.work, self._planner.graphs
        logits, step.logits = step.logits, None
        if work.graph is not None and graphs is not None:
            return graphs.choose(work.graph, len(work.logit_rows), work.shape, step.options, step.masked)
        if logits is None or step.options is None:
            self._step.advance(work.shape)
            return StepOutputs()
        return self._step.choose(logits, work.shape, step.options, step.masked)

    def _score(self, step: InFlightStep, hidden: Hidden) -> list[Tensor]:
        """Returns the logprobs of prompt tokens, slice by slice; on ranks that do not sample, of no slice."""
        scored = []
        for row, k, first, count, offset in step.slices:
            logits = self._step.logits(hidden[offset : offset + count])
            if logits is not None and self._samples:
                targets = self._state.token_ids[row, first + 1 : first + 1 + count].long()
                scored.append(self._step.score(logits, targets, k))
        return scored
