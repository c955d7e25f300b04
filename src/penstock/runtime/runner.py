"""The model runner: plans in, results out."""

import time
from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.config import EngineConfig, Place
from penstock.families import ModelSpec
from penstock.kernels import AttentionBatch, Kernels
from penstock.kernels.native.session import TimedOp
from penstock.messages import (
    MemoryRow,
    NewSequence,
    SequenceResult,
    StepPlan,
    StepResult,
    StepTiming,
    Work,
)
from penstock.models import Decoder, Hidden
from penstock.runtime.batch import PersistentBatch
from penstock.runtime.capacity import measured_capacity
from penstock.runtime.decoding import Decoding
from penstock.runtime.inputs import Segments, StepInputs, segments
from penstock.runtime.logprobs import prompt_logprob_rows
from penstock.runtime.mesh import Mesh, Traffic, collectives
from penstock.runtime.pages import KVPages
from penstock.runtime.recorded import RecordedDecoder
from penstock.runtime.results import NOT_FINITE, PROMPT_LOGPROB_ROWS, decode_results, prompt_slices, sequence_results
from penstock.runtime.sampler import Sampled, Sampler


class _Planned(NamedTuple):
    """A plan's work as the batch sees it."""

    work: tuple[Work, ...]
    rows: list[int]  # of each
    units: Segments  # of the rows that can go on
    sampled: NDArray[np.int64]  # rows
    decodes: bool  # every one samples after one token: should the next plan be of the same work, so will it


class ModelRunner:
    """Executes plans in order. What goes wrong within one sequence becomes its result's error, and it alone stops.

    `parameters` are taken out of their mapping and packed. `num_blocks` per KV group, the null block included. One
    thread calls.

    With a mesh it is one rank of several: `spec` and `parameters` are its part, every rank executes every plan, and the
    one that reports samples. What a plan computes depends on plans and learned results alone, never on what one rank
    has found out by itself: else the others would wait for it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        parameters: MutableMapping[str, Any],
        kernels: Kernels,
        config: EngineConfig,
        num_blocks: Sequence[int],
        *,
        cache_root: str = "",
        memory: tuple[MemoryRow, ...] = (),
        mesh: Mesh | None = None,
    ) -> None:
        self._spec = spec
        self._kernels = kernels
        self._mesh = mesh
        self._place = Place() if mesh is None else mesh.place
        model = Decoder(spec, parameters, kernels, collectives(mesh, kernels.session))
        self.pages = KVPages(spec, num_blocks, config.block_size, getattr(torch, config.kv_dtype))
        self._batch = PersistentBatch(config.max_num_seqs, config.max_model_len, config.block_size, len(spec.windows))
        tokens, dtype = config.max_num_batched_tokens, getattr(torch, config.dtype)
        hidden = None if self._place.first else torch.zeros(tokens, spec.hidden_size, dtype=dtype)
        self._inputs = StepInputs(self._batch, spec.windows, tokens, hidden)
        self._submitted: deque[StepPlan] = deque()
        self._sampler: Sampler | None = None
        if self._place.reports:
            self._sampler = Sampler(spec.vocabulary, config.max_num_seqs, kernels.session)
        self._model: Decoder | RecordedDecoder = model
        self._decoding: Decoding | None = None
        if kernels.session:
            self._model = recorded = RecordedDecoder(
                model,
                kernels.session,
                spec,
                self.pages.layers,
                self._inputs,
                sequences=config.max_num_seqs,
                blocks=-(-config.max_model_len // config.block_size),
                logit_rows=max(config.max_num_seqs, PROMPT_LOGPROB_ROWS),
            )
            if mesh is None and self._sampler and self._sampler.native:
                self._decoding = Decoding(recorded, kernels.session, self._batch, self._inputs, self._sampler.native)
        self.capacity = measured_capacity(
            spec, config, num_blocks, model, self.pages, cache_root=cache_root, memory=memory
        )

    def submit(self, plan: StepPlan) -> None:
        """Compute a plan when its result is asked for: nothing runs beside the host here, so why sooner."""
        self._submitted.append(plan)

    def result(self) -> StepResult:
        """The result of the oldest plan submitted. RuntimeError on a rank that does not report, or as of `execute`."""
        result = self.execute(self._submitted.popleft())
        if result is None:
            raise RuntimeError("the runner is one rank of several: its plans belong to WorkersExecutor")
        return result

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Compute a plan; its result, on the rank that reports. Raises RuntimeError for a plan that contradicts those
        before it, MeshError where other ranks are not there."""
        began = time.perf_counter()
        if plan.new or plan.gone or plan.blocks or plan.copies:
            self._apply(plan)
        decoding = self._decoding
        if decoding is None:
            return self._compute(plan, began)
        again = decoding.left and not plan.new and not plan.gone and plan.work == decoding.work
        return self._decode(decoding, plan, began) if again or decoding.begin(plan.work) else self._compute(plan, began)

    @torch.inference_mode()
    def _compute(self, plan: StepPlan, began: float) -> StepResult | None:
        """Any step. `began`: when its execution did."""
        if self._kernels.session:  # while the inputs are made
            self._kernels.session.wake()
        planned = self._units_of(plan)
        units = planned.units
        forward = sample = preparing = 0.0
        sampled, prompt_logprobs = Sampled([], [], {}), {}
        if len(units.rows):
            began_inputs = time.perf_counter()
            inputs = self._inputs.fill(units, self._prepare)
            if self._mesh is not None and inputs.hidden is not None:
                self._mesh.receive(inputs.hidden)
            began_forward = time.perf_counter()
            hidden = self._model.forward(inputs, self.pages.layers)
            if self._mesh is not None and not self._place.last:
                self._mesh.send(hidden.states)
            kept = None
            if self._batch.prompt_logprobs and self._place.last and not planned.decodes:
                kept = hidden.mapped(torch.clone)  # logits may take the place of what they are computed from
            logits = self._logits(planned, hidden) if self._place.last else None
            began_sampling = time.perf_counter()
            self._batch.num_computed[units.rows] += units.length
            if logits is not None:
                sampled = self._sample(logits, planned.sampled)
            preparing, forward = began_forward - began_inputs, began_sampling - began_forward
            sample = time.perf_counter() - began_sampling
            if kept is not None:
                prompt_logprobs = self._prompt_logprobs(units, kept)
        if not self._place.reports:
            return None
        if self._decoding:
            self._decoding.follow(plan.work if planned.decodes and not self._batch.errors else (), planned.sampled)
        results = self._results(planned, sampled, prompt_logprobs)
        timing = StepTiming(forward, sample, time.perf_counter() - began, preparing)
        return StepResult(plan.plan_id, results, timing)

    def learn(self, result: StepResult) -> None:
        """On ranks that do not report: what an earlier plan gave, before one that builds upon it. Sequences that have
        gone since are passed over."""
        rows, tokens = [], []
        for each in result.results:
            row = self._batch.rows.get(each.seq)
            if row is None:
                continue
            if each.error:
                self._batch.errors[row] = each.error
            elif each.token_ids:  # one: nobody proposes drafts
                rows.append(row)
                tokens.append(each.token_ids[0])
        self._batch.append_tokens(np.array(rows, np.int64), tokens)

    @property
    def traffic(self) -> Traffic:
        """What this rank has handed to others so far."""
        return Traffic() if self._mesh is None else self._mesh.traffic

    def profile(self) -> AbstractContextManager[list[TimedOp]]:
        """Gets the ops of the plans executed within, timed, at its end. ValueError where steps are not recorded."""
        if not isinstance(self._model, RecordedDecoder):
            raise ValueError(f"there are no native kernels to time here: {self._kernels.fingerprint} are in use")
        return self._model.profile()

    def close(self) -> None:
        """Let go of the model's memory, and of other ranks."""
        if self._mesh is not None:
            self._mesh.close()
        del self._model, self.pages, self._batch, self._sampler

    def _prepare(self, group: int, batch: AttentionBatch) -> Any:
        if isinstance(self._model, RecordedDecoder):
            return self._model.prepare(group, batch)
        keys = self.pages.group_keys(group)
        return None if keys is None else self._kernels.attention.prepare(batch, keys)

    # -- the batch --------------------------------------------------------------------------------------------

    def _apply(self, plan: StepPlan) -> None:
        """Everything in a plan but its work."""
        batch = self._batch
        for seq in plan.gone:
            if seq in batch.rows:  # not where it was preempted, or ended, before any plan named it
                row = batch.remove(seq)
                if self._sampler is not None:
                    self._sampler.remove(row)
        if self._kernels.attention.reads_whole_blocks:
            self._clear_new_blocks(plan)
        for new in plan.new:
            self._add(new)
        for seq, appended in plan.blocks:
            batch.append_blocks(batch.row(seq), appended)
        if plan.copies:
            self.pages.copy(plan.copies)

    def _clear_new_blocks(self, plan: StepPlan) -> None:
        """Before the plan's blocks are appended."""
        batch = self._batch
        counts = {work.seq: work.count - work.drafts for work in plan.work}
        for new in plan.new:
            self._clear(new.num_computed, counts.get(new.seq, 0), 0, new.blocks)
        for seq, appended in plan.blocks:
            row = batch.row(seq)
            self._clear(int(batch.num_computed[row]), counts.get(seq, 0), int(batch.num_blocks[0, row]), appended)

    def _clear(self, computed: int, count: int, held: int, blocks: Sequence[Sequence[int]]) -> None:
        """Zero what a sequence was given as its blocks `held`, `held` + 1, ... and this step does not fill.

        Blocks that hold any of its `computed` tokens are left alone: others may share them.
        """
        size = self._batch.block_size
        first = max(-(-computed // size), (computed + count) // size)
        for group, ids in enumerate(blocks):
            self.pages.clear(group, ids[max(first - held, 0) :])

    def _add(self, new: NewSequence) -> None:
        row = self._batch.add(new)
        if self._sampler is None:
            return
        border = new.num_prompt
        try:
            self._sampler.add(row, new.sampling, new.choice, new.token_ids[:border], new.token_ids[border:])
        except ValueError as error:
            self._batch.errors[row] = str(error)

    def _units_of(self, plan: StepPlan) -> _Planned:
        """The plan's work, less that of rows which have failed and so lack the token it begins with."""
        batch = self._batch
        rows = [batch.row(work.seq) for work in plan.work]
        able = [
            (row, work)
            for row, work in zip(rows, plan.work, strict=True)
            if row not in batch.errors or batch.num_computed[row] + work.count - work.drafts <= batch.num_tokens[row]
        ]
        units = segments(
            batch,
            [row for row, _ in able],
            # Drafts are none of the tokens a sequence has, and none are proposed here.
            [work.count - work.drafts for _, work in able],
            [work.sample for _, work in able],
        )
        return _Planned(plan.work, rows, units, units.rows[units.sample], units.decodes and len(able) == len(rows))

    def _decode(self, decoding: Decoding, plan: StepPlan, began: float) -> StepResult:
        """A step of which `decoding` makes all in one call."""
        token_ids = decoding.run()
        if token_ids is not None:
            results = decode_results(plan.work, token_ids)
        else:
            sampled, rows = decoding.read(), decoding.rows
            self._note(sampled, rows)
            each = rows.tolist()
            results = sequence_results(
                plan.work, each, each, sampled.token_ids, sampled.logprobs, {}, self._batch.errors, decodes=True
            )
            if self._batch.errors:
                decoding.follow((), rows)
        timing = StepTiming(decoding.seconds, total=time.perf_counter() - began)
        return StepResult(plan.plan_id, results, timing)

    # -- after the forward pass -------------------------------------------------------------------------------

    def _logits(self, planned: _Planned, hidden: Hidden) -> Tensor | None:
        """Of the rows that are sampled. Sequences that have failed get an error in the batch."""
        if planned.decodes:
            return self._model.logits(hidden)
        units = planned.units
        if self._place.reports and len(hidden) > len(planned.sampled):
            self._fail_where_not_finite(units, hidden)
        if not len(planned.sampled):
            return None
        return self._model.logits(hidden[torch.from_numpy(units.offset[1:][units.sample] - 1)])

    def _fail_where_not_finite(self, units: Segments, hidden: Hidden) -> None:
        """Find sequences of which any token came out as NaN or infinite: their keys and values must not be shared.

        Where a token is sampled after every token computed, the sampler finds it.
        """
        if isinstance(self._model, RecordedDecoder):
            finite = self._model.finite()
        else:
            finite = torch.isfinite(hidden.latest.sum(-1, dtype=torch.float32)).numpy()
        if not finite.all():
            for row in units.rows.repeat(units.length)[~finite].tolist():
                self._batch.errors[row] = NOT_FINITE

    def _prompt_logprobs(self, units: Segments, hidden: Hidden) -> dict[int, bytes]:
        """Packed rows by batch row, for the prompt tokens that follow tokens computed now."""
        batch = self._batch
        packed: dict[int, list[bytes]] = {}
        for row, k, first, count, offset in prompt_slices(batch, units):
            logits = self._model.logits(hidden[offset : offset + count])
            if logits is not None and row not in batch.errors:
                targets = torch.from_numpy(batch.token_ids[row, first + 1 : first + 1 + count])
                packed.setdefault(row, []).append(prompt_logprob_rows(logits, targets, k))
        return {row: b"".join(parts) for row, parts in packed.items()}

    def _sample(self, logits: Tensor, rows: NDArray[np.int64]) -> Sampled:
        """Tokens and packed logprobs in the order of `rows`; those without a token get an error in the batch."""
        sampled = self._sampler.sample(logits, rows)
        self._note(sampled, rows)
        batch, tokens = self._batch, sampled.token_ids
        if batch.errors:
            good = [i for i, row in enumerate(rows.tolist()) if row not in batch.errors]
            rows, tokens = rows[good], [tokens[i] for i in good]
        batch.append_tokens(rows, tokens)
        return sampled

    def _note(self, sampled: Sampled, rows: NDArray[np.int64]) -> None:
        """Rows without a token have failed, where they had not before."""
        for index, message in sampled.errors.items():
            self._batch.errors.setdefault(int(rows[index]), message)

    def _results(
        self, planned: _Planned, sampled: Sampled, prompt_logprobs: Mapping[int, bytes]
    ) -> tuple[SequenceResult, ...]:
        """One for each unit of work."""
        return sequence_results(
            planned.work,
            planned.rows,
            planned.sampled.tolist(),
            sampled.token_ids,
            sampled.logprobs,
            prompt_logprobs,
            self._batch.errors,
            decodes=planned.decodes,
        )
