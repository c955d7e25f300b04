"""The native step kernels (kernels/native: batch.h and sampling.h), which are recorded with the model."""

from collections.abc import Sequence
from ctypes import addressof, c_int64

import torch
from torch import Tensor

from penstock.kernels.batch_arrays import AHEAD, ROW, BatchRows, Chosen, EditRows, MaskRows, SamplingRows, StepArrays
from penstock.kernels.native.attention import AttentionWork
from penstock.kernels.native.session import Session
from penstock.kernels.native.structs import AdvanceOp, FillGroup, FillOp, LogitEdits, PackedLogprobs, SampleOp
from penstock.messages import row_size
from penstock.runtime.sampling.watermark import CONTEXT, GREEN_BELOW, GREEN_BIAS, Watermark


class NativeStep:
    """Runs a step's kernels on a CPU, by a session's threads. Launched ops read the number of rows from cells.

    The op that chooses tokens also edits logits and computes logprobs: it looks up by itself for which rows.
    """

    decodes_first = False

    def __init__(
        self, session: Session, attention: Sequence[AttentionWork], watermark: Watermark | None = None
    ) -> None:
        """`attention` is what the model's attention reads, of each KV group: `fill` brings it up to date."""
        self._session = session
        self._attention = attention
        self.sequences, self.logit_rows = c_int64(), c_int64()
        self._edits = LogitEdits()
        if watermark is not None:
            self._edits.watermark = tuple(CONTEXT).index(watermark.scheme) + 1
            self._edits.watermark_key, self._edits.green_below = watermark.key, GREEN_BELOW
            self._edits.green_bias = GREEN_BIAS
        self._packed = PackedLogprobs()
        self._words = torch.empty(0, dtype=torch.int32)
        self._described: tuple[EditRows | None, int, int, MaskRows | None] = (None, 0, 0, None)  # by `describe`

    def fill(self, state: BatchRows, step: StepArrays, sequences: int, block_size: int) -> None:
        self.sequences.value = sequences
        groups = (FillGroup * len(self._attention))(
            *(
                FillGroup(
                    table.data_ptr(),
                    table.shape[1],
                    prepared.tables.ctypes.data,
                    prepared.tables.shape[1],
                    prepared.context_lens.ctypes.data,
                    blocks.data_ptr(),
                    step.offsets.data_ptr(),
                )
                for table, prepared, blocks in zip(state.tables, self._attention, step.blocks, strict=True)
            )
        )
        op = FillOp(
            addressof(self.sequences),
            step.units.data_ptr(),
            step.units.shape[1],
            state.token_ids.data_ptr(),
            state.token_ids.shape[1],
            state.computed.data_ptr(),
            step.token_ids.data_ptr(),
            step.positions.data_ptr(),
            addressof(groups),
            len(groups),
            block_size,
        )
        self._session.run(op, groups, state, step)

    def choose(
        self,
        logits: Tensor,
        logit_rows: Tensor,
        sampling: SamplingRows,
        edits: EditRows,
        token_ids: Tensor,
        *,
        edited: Tensor | None,
        filtered: bool,
        logprobs: int,
        masks: MaskRows | None = None,
    ) -> Chosen:
        """See StepKernels. The logits are left as they were. Statuses and tokens are overwritten by the next call."""
        self.logit_rows.value = count = len(logits)
        self.describe(edits, token_ids, count, logprobs, masks)
        op, chosen = self._op(logits, logit_rows[ROW], logit_rows[AHEAD], sampling)
        self._session.run(op, self, logit_rows, sampling, logits, *chosen)
        return Chosen(*chosen, self.packed(count) if logprobs >= 0 else None)

    def score(self, logits: Tensor, targets: Tensor, k: int, sampling: SamplingRows, edits: EditRows) -> Tensor:
        """See StepKernels."""
        spare = len(sampling.kind) - 1
        sampling.logprobs[spare] = k
        self.logit_rows.value = count = len(logits)
        rows = torch.full((count,), spare, dtype=torch.int32)
        self.describe(edits, torch.empty(0, 0, dtype=torch.int32), count, k)
        self._described = (None, 0, 0, None)
        ahead = torch.zeros_like(rows)
        op, chosen = self._op(logits, rows, ahead, sampling)
        op.targets = targets.data_ptr()
        self._session.run(op, rows, ahead, targets, *chosen)
        return self.packed(count).clone()

    def _op(
        self, logits: Tensor, rows: Tensor, ahead: Tensor, sampling: SamplingRows
    ) -> tuple[SampleOp, tuple[Tensor, Tensor]]:
        """Returns the op and what it writes: int64 tokens and int32 statuses."""
        tokens, status = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits), dtype=torch.int32)
        op = SampleOp(
            count=addressof(self.logit_rows),
            rows=rows.data_ptr(),
            ahead=ahead.data_ptr(),
            logits=logits.data_ptr(),
            vocab=logits.shape[1],
            edits=addressof(self._edits),
            **{name: getattr(sampling, name).data_ptr() for name in SamplingRows.__dataclass_fields__},
            tokens=tokens.data_ptr(),
            status=status.data_ptr(),
            packed=addressof(self._packed),
        )
        return op, (tokens, status)

    def packed(self, count: int) -> Tensor:
        """Logprobs that the last run packed: int32 [count, words]."""
        words = self._packed.stride
        return self._words[: count * words].view(count, words)

    def describe(
        self, edits: EditRows, token_ids: Tensor, rows: int, logprobs: int, masks: MaskRows | None = None
    ) -> None:
        """Point the sampling op to edits, whose tables may have moved, to masks, and to room for so many packed rows.

        The masks' arrays never move.
        """
        last = self._described
        if last[0] is edits and last[1] == rows and last[2] == logprobs and last[3] is masks:
            return
        self._described = edits, rows, logprobs, masks
        self._edits.mask_of = None if masks is None else masks.lines.data_ptr()
        if masks is not None:
            self._edits.mask_words, self._edits.mask_stride = masks.words.data_ptr(), masks.words.shape[1]
        for name in EditRows.__dataclass_fields__:
            setattr(self._edits, name, getattr(edits, name).data_ptr())
        self._edits.token_ids = token_ids.data_ptr()
        self._edits.most_biases, self._edits.most_bans = edits.bias_ids.shape[1], edits.ban_ids.shape[1]
        self._edits.most_tokens = token_ids.shape[1]
        words = row_size(max(logprobs, 0)) // 4
        if self._words.numel() < rows * words:
            self._words = torch.empty(rows * words, dtype=torch.int32)
        self._packed.words, self._packed.stride = self._words.data_ptr(), words

    def advance(self, state: BatchRows, step: StepArrays, sequences: int, tokens: Tensor, outputs: Tensor) -> None:
        self.sequences.value = sequences
        op = AdvanceOp(
            addressof(self.sequences),
            step.units.data_ptr(),
            step.units.shape[1],
            tokens.data_ptr(),
            state.token_ids.data_ptr(),
            state.token_ids.shape[1],
            state.computed.data_ptr(),
            outputs.data_ptr(),
            step.accepted.data_ptr(),
        )
        self._session.run(op, state, step, tokens, outputs)
