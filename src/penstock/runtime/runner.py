"""The model runner: plans in, results out."""

import time
from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.config import EngineConfig
from penstock.families import ModelSpec
from penstock.kernels import AttentionBatch, Kernels
from penstock.kernels.native.session import TimedOp
from penstock.messages import (
    Capacity,
    KVGroup,
    MemoryRow,
    NewSequence,
    SequenceResult,
    StepPlan,
    StepResult,
    StepTiming,
)
from penstock.models import Decoder
from penstock.runtime.batch import PersistentBatch
from penstock.runtime.inputs import Segments, segments, step_input
from penstock.runtime.logprobs import prompt_logprob_rows
from penstock.runtime.pages import KVPages
from penstock.runtime.recorded import RecordedDecoder
from penstock.runtime.sampler import Sampler

PROMPT_LOGPROB_ROWS = 128  # logits of a long prompt are sliced, never whole
NOT_FINITE = "the model's numbers overflowed (NaN or infinity) for this request"


class ModelRunner:
    """Executes plans in order. What goes wrong within one sequence becomes its result's error, and it alone stops.

    `parameters` are taken out of their mapping and packed. `num_blocks` per KV group, the null block included. One
    thread calls.
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
    ) -> None:
        self._spec = spec
        self._kernels = kernels
        model = Decoder(spec, parameters, kernels)
        self.pages = KVPages(spec, num_blocks, config.block_size, getattr(torch, config.kv_dtype))
        self._batch = PersistentBatch(config.max_num_seqs, config.max_model_len, config.block_size, len(spec.windows))
        self._sampler = Sampler(spec.vocab_size, config.max_num_seqs, kernels.session)
        self._model: Decoder | RecordedDecoder = model
        if kernels.session:
            self._model = RecordedDecoder(
                model,
                kernels.session,
                spec,
                self.pages.layers,
                tokens=config.max_num_batched_tokens,
                sequences=config.max_num_seqs,
                blocks=-(-config.max_model_len // config.block_size),
                logit_rows=max(config.max_num_seqs, PROMPT_LOGPROB_ROWS),
            )
        groups = tuple(KVGroup(n, w) for n, w in zip(num_blocks, spec.windows, strict=True))
        # With the weights as they were in fact packed.
        memory = tuple(MemoryRow(r.name, model.nbytes, r.note) if r.name == "weights" else r for r in memory)
        self.capacity = Capacity(config.block_size, groups, config.depth, cache_root, spec.vocab_size, memory)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute a plan. Raises RuntimeError for one that contradicts those before it."""
        began = time.perf_counter()
        self._apply(plan)
        rows = [self._batch.row(work.seq) for work in plan.work]
        # Drafts are none of the tokens a sequence has, and none are proposed here.
        work = [(r, w.count - w.drafts, w.sample) for r, w in zip(rows, plan.work, strict=True)]
        able = [unit for unit in work if unit[0] not in self._batch.errors]
        forward = sample = preparing = 0.0
        prompt_logprobs: dict[int, bytes] = {}
        sampled: dict[int, tuple[int, bytes]] = {}
        if able:
            began_inputs = time.perf_counter()
            units = segments(self._batch, *zip(*able, strict=True))
            inputs = step_input(self._batch, self._spec.windows, units, self._prepare)
            began_forward = time.perf_counter()
            preparing = began_forward - began_inputs
            hidden = self._model.forward(inputs, self.pages.layers)
            samples = np.flatnonzero(units.sample)
            if len(hidden) > len(samples):
                self._fail_where_not_finite(units, hidden)
            prompt_logprobs = self._prompt_logprobs(units, hidden)
            last = torch.from_numpy(units.offset[samples + 1] - 1)
            logits = self._model.logits(hidden[last]) if len(samples) else None
            began_sampling = time.perf_counter()
            forward = began_sampling - began_forward
            self._batch.num_computed[units.rows] += units.length
            if logits is not None:
                sampled = self._sample(logits, units.rows[samples].tolist())
            sample = time.perf_counter() - began_sampling
        results = [
            self._result(w.seq, row, sampled.get(row), prompt_logprobs.get(row, b""))
            for w, row in zip(plan.work, rows, strict=True)
        ]
        timing = StepTiming(forward, sample, time.perf_counter() - began, preparing)
        return StepResult(plan.plan_id, tuple(results), timing)

    def profile(self) -> AbstractContextManager[list[TimedOp]]:
        """Gets the ops of the plans executed within, timed, at its end. ValueError where steps are not recorded."""
        if not isinstance(self._model, RecordedDecoder):
            raise ValueError(f"there are no native kernels to time here: {self._kernels.fingerprint} are in use")
        return self._model.profile()

    def close(self) -> None:
        """Let go of the model's memory."""
        del self._model, self.pages, self._batch, self._sampler

    def _prepare(self, group: int, batch: AttentionBatch) -> Any:
        if isinstance(self._model, RecordedDecoder):
            return self._model.prepare(group, batch)
        return self._kernels.attention.prepare(batch, self.pages.group_keys(group))

    # -- the batch --------------------------------------------------------------------------------------------

    def _apply(self, plan: StepPlan) -> None:
        """Everything in a plan but its work."""
        batch = self._batch
        for seq in plan.gone:
            if seq in batch.rows:  # not where it was preempted, or ended, before any plan named it
                self._sampler.remove(batch.remove(seq))
        counts = {work.seq: work.count - work.drafts for work in plan.work} if plan.new or plan.blocks else {}
        for new in plan.new:
            self._add(new)
            self._clear(new.num_computed, counts.get(new.seq, 0), 0, new.blocks)
        for seq, appended in plan.blocks:
            row = batch.row(seq)
            held = int(batch.num_blocks[0, row])
            batch.append_blocks(row, appended)
            self._clear(int(batch.num_computed[row]), counts.get(seq, 0), held, appended)
        self.pages.copy(plan.copies)

    def _clear(self, computed: int, count: int, held: int, blocks: Sequence[Sequence[int]]) -> None:
        """Zero what a sequence was given as its blocks `held`, `held` + 1, ... and this step does not fill.

        Blocks that hold any of its `computed` tokens are left alone: others may share them.
        """
        if not self._kernels.attention.reads_whole_blocks:
            return
        size = self._batch.block_size
        first = max(-(-computed // size), (computed + count) // size)
        for group, ids in enumerate(blocks):
            self.pages.clear(group, ids[max(first - held, 0) :])

    def _add(self, new: NewSequence) -> None:
        row = self._batch.add(new)
        border = new.num_prompt
        try:
            self._sampler.add(row, new.sampling, new.choice, new.token_ids[:border], new.token_ids[border:])
        except ValueError as error:
            self._batch.errors[row] = str(error)

    # -- after the forward pass -------------------------------------------------------------------------------

    def _fail_where_not_finite(self, units: Segments, hidden: Tensor) -> None:
        """Find sequences of which any token came out as NaN or infinite: their keys and values must not be shared.

        Where a token is sampled after every token computed, the sampler finds it.
        """
        finite = torch.isfinite(hidden.sum(-1, dtype=torch.float32)).numpy()
        if not finite.all():
            for row in units.rows.repeat(units.length)[~finite].tolist():
                self._batch.errors[row] = NOT_FINITE

    def _prompt_logprobs(self, units: Segments, hidden: Tensor) -> dict[int, bytes]:
        """Packed rows by batch row, for the prompt tokens that follow tokens computed now."""
        batch = self._batch
        packed: dict[int, bytes] = {}
        if not batch.prompt_logprobs:
            return packed
        for row, first, length, offset in zip(*(a.tolist() for a in units[:4]), strict=False):
            k = batch.prompt_logprobs.get(row)
            end = min(first + length, int(batch.num_prompt[row]) - 1)
            if k is None or row in batch.errors:
                continue
            parts = []
            for start in range(first, end, PROMPT_LOGPROB_ROWS):
                stop = min(start + PROMPT_LOGPROB_ROWS, end)
                logits = self._model.logits(hidden[offset + start - first : offset + stop - first])
                targets = torch.from_numpy(batch.token_ids[row, start + 1 : stop + 1])
                parts.append(prompt_logprob_rows(logits, targets, k))
            packed[row] = b"".join(parts)
        return packed

    def _sample(self, logits: Tensor, rows: Sequence[int]) -> dict[int, tuple[int, bytes]]:
        """(token, packed logprobs) by row; rows without a token get an error in the batch."""
        sampled = self._sampler.sample(logits, rows)
        for index, message in sampled.errors.items():
            self._batch.errors.setdefault(rows[index], message)
        tokens = {}
        for row, token, logprobs in zip(rows, sampled.token_ids, sampled.logprobs, strict=True):
            if row not in self._batch.errors:
                self._batch.append_token(row, token)
                tokens[row] = (token, logprobs)
        return tokens

    def _result(self, seq: int, row: int, token: tuple[int, bytes] | None, prompt: bytes) -> SequenceResult:
        error = self._batch.errors.get(row)
        if error is not None:
            return SequenceResult(seq, error=error)
        if token is None:
            return SequenceResult(seq, prompt_logprobs=prompt)
        return SequenceResult(seq, (token[0],), token[1], prompt)
