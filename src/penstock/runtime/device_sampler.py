"""The sampler of a batch that lives on the device: parameters go there once, tokens stay there.

The order of processing, and the tokens, are those of sampler.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.resident import EditParameters, Parameters
from penstock.messages import SamplingParams
from penstock.runtime.logit_edits import banned_ids, check_ids, has_penalties
from penstock.runtime.resident import Change
from penstock.runtime.sampling_batch import FILTERED, SamplingBatch
from penstock.runtime.step_kernels import StepKernels

MOST = 2**31 - 1  # that an int32 holds


class Draw(NamedTuple):
    """How a step's rows of logits are made into tokens."""

    edited: NDArray[np.int32]  # places of the rows whose logits are edited
    filtered: bool  # whether any has a top_k, top_p or min_p
    logprobs: NDArray[np.int64]  # how many of the best each wants; -1: no logprobs at all
    most: int  # of these


class _Edits(NamedTuple):
    """What a row changes in its logits."""

    params: SamplingParams
    bans: tuple[int, ...]  # tokens that are not to come while there are fewer outputs than min_tokens
    prompt: int  # tokens
    lasting: bool  # whether there is more than the ban

    def needed(self, outputs: int) -> bool:
        return self.lasting or (outputs < self.params.min_tokens and bool(self.bans))


class DeviceSampler:
    """Parameters of the batch's rows, on the device and, as far as it plans by them, on the host."""

    def __init__(
        self, vocab_size: int, max_rows: int, kernels: StepKernels, token_ids: Tensor, *, packed_rows: int
    ) -> None:
        """`token_ids` int32 [rows, most tokens] are the resident batch's. At most `packed_rows` rows of logits get
        logprobs at once."""
        self._vocab_size = vocab_size
        self._kernels = kernels
        self._token_ids = token_ids
        device = token_ids.device
        self._batch = SamplingBatch(vocab_size, max_rows)
        self.parameters = Parameters.empty(max_rows + 1, device)
        # The row behind all others is greedy, and padding's.
        self._spares = torch.full((max(packed_rows, max_rows),), max_rows, dtype=torch.int32, device=device)
        self._edits = EditParameters.empty(max_rows, 1, 1, device)
        self._prompts = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._edited: dict[int, _Edits] = {}  # of the rows that have any
        self._changed: list[int] = []  # rows, since they were last sent

    def add(
        self, row: int, params: SamplingParams, choice: int, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> None:
        """Start row `row` after `output_ids`. ValueError for what the model's vocabulary does not allow; the row then
        samples as whoever had it before."""
        edits = _edits(params, prompt_ids, output_ids, self._vocab_size)
        if params.logprobs is not None and params.logprobs > self._vocab_size:
            raise ValueError(
                f"{params.logprobs} logprobs of a vocabulary of {self._vocab_size}: ask for {self._vocab_size} at most"
            )
        if edits.needed(len(output_ids)):
            self._edited[row] = edits
        self._batch.describe(row, params, choice, len(output_ids))
        self._changed.append(row)

    def remove(self, row: int) -> None:
        self._edited.pop(row, None)

    @property
    def edits(self) -> bool:
        """Whether there are rows whose logits are edited."""
        return bool(self._edited)

    def draw(self, rows: NDArray[np.int64], outputs: NDArray[np.int64]) -> Draw:
        """How the next tokens of `rows`, which have so many outputs, are chosen."""
        edited = []
        if self._edited:
            for i, (row, done) in enumerate(zip(rows.tolist(), outputs.tolist(), strict=True)):
                edits = self._edited.get(row)
                if edits is None:
                    continue
                if edits.needed(done):
                    edited.append(i)
                else:  # nor will it be
                    del self._edited[row]
        wanted = self._batch.logprobs[rows]
        filtered = bool((self._batch.kind[rows] >= FILTERED).any())
        return Draw(np.array(edited, np.int32), filtered, wanted, int(wanted.max(initial=-1)))

    # -- on the device ----------------------------------------------------------------------------------------

    def edit(self, logits: Tensor, which: Tensor, rows: Tensor) -> Tensor:
        """Edit places int32 `which` [m] of fp32 logits, which are of int32 `rows`. bool [m]: whether they were finite
        before."""
        # A maximum is NaN where any is.
        sound = logits.index_select(0, which).amax(1).isfinite()
        outputs = self.parameters.outputs
        self._kernels.edit(logits, which, rows, self._edits, self._token_ids, self._prompts, outputs)
        return sound

    def choose(self, logits: Tensor, rows: Tensor, *, filtered: bool) -> tuple[Tensor, Tensor]:
        """(int64 tokens, int32 [2, n]: tokens and their status) of fp32 logits [n, vocab] of int32 rows [n]."""
        survey = self._kernels.survey(logits, rows, self.parameters)
        chosen = self._kernels.sample(logits, rows, self.parameters, survey, filtered=filtered)
        return chosen.tokens, torch.stack((chosen.tokens.int(), chosen.status))

    def pack_logprobs(self, logits: Tensor, tokens: Tensor, k: int) -> Tensor:
        """int32 [n, 3 + 2 k]: packed rows of int64 tokens [n], of the model's own logits [n, vocab]."""
        survey = self._kernels.survey(logits, self._spares[: len(logits)], self.parameters)
        return self._kernels.pack_logprobs(logits, tokens, survey, k)

    # -- what is sent -----------------------------------------------------------------------------------------

    def changes(self) -> list[Change]:
        """What is to be sent: then it counts as sent."""
        rows, self._changed = self._changed, []
        if not rows:
            return []
        batch, index = self._batch, np.array(rows, np.int64)
        reals = np.stack([batch.temperature[index], batch.top_p[index], batch.min_p[index]])
        whole = np.stack([batch.kind[index], batch.top_k[index], batch.num_outputs[index]]).astype(np.int32)
        sent = [Change((index, reals, whole, batch.streams[index].view(np.int64)), self._write)]
        edited = [row for row in rows if row in self._edited]
        return [*sent, self._change_of_edits(edited)] if edited else sent

    def _write(self, sent: Sequence[Tensor]) -> None:
        rows, reals, whole, streams = sent
        to = self.parameters
        for target, values in zip((to.temperature, to.top_p, to.min_p), reals, strict=True):
            target[rows] = values
        for target, values in zip((to.kind, to.top_k, to.outputs), whole, strict=True):
            target[rows] = values
        to.streams[rows] = streams

    def _change_of_edits(self, rows: Sequence[int]) -> Change:
        edits = [self._edited[row] for row in rows]
        params = [each.params for each in edits]
        factors = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params]
        counts = [(len(e.params.logit_bias), len(e.bans), min(e.params.min_tokens, MOST), e.prompt) for e in edits]
        arrays = (
            np.array(rows, np.int64),
            np.array(factors, np.float32).T,
            np.array(counts, np.int32).T,
            _table([list(p.logit_bias) for p in params], np.int32),
            _table([list(p.logit_bias.values()) for p in params], np.float32),
            _table([e.bans for e in edits], np.int32),
        )
        return Change(arrays, self._write_edits)

    def _write_edits(self, sent: Sequence[Tensor]) -> None:
        rows, factors, counts, bias_ids, biases, bans = sent
        self._make_room(bias_ids.shape[1], bans.shape[1])
        to = self._edits
        for target, values in zip((to.repetition, to.presence, to.frequency), factors, strict=True):
            target[rows] = values
        for target, values in zip((to.bias_count, to.ban_count, to.min_tokens, self._prompts), counts, strict=True):
            target[rows] = values
        for target, values in ((to.bias_ids, bias_ids), (to.biases, biases), (to.ban_ids, bans)):
            target[:, : values.shape[1]][rows] = values

    def _make_room(self, biases: int, bans: int) -> None:
        """For so many of a row: what there is moves to wider tables."""
        old = self._edits
        widths = old.bias_ids.shape[1], old.ban_ids.shape[1]
        if biases <= widths[0] and bans <= widths[1]:
            return
        wide = EditParameters.empty(len(old.bias_ids), max(biases, widths[0]), max(bans, widths[1]), old.biases.device)
        for name in EditParameters.__dataclass_fields__:
            kept, room = getattr(old, name), getattr(wide, name)
            (room if kept.dim() == 1 else room[:, : kept.shape[1]]).copy_(kept)
        self._edits = wide


def _edits(params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int], vocab_size: int) -> _Edits:
    """ValueError for a biased or penalised token that has no logit."""
    penalties = has_penalties(params)
    check_ids("logit_bias", np.array(list(params.logit_bias), np.int64), vocab_size)
    if penalties:
        check_ids("the prompt", np.array(prompt_ids, np.int64), vocab_size)
        check_ids("the output", np.array(output_ids, np.int64), vocab_size)
    lasting = bool(params.logit_bias) or penalties
    return _Edits(params, banned_ids(params, vocab_size), len(prompt_ids), lasting)


def _table(rows: Sequence[Sequence[float]], dtype: type[np.generic]) -> NDArray[np.generic]:
    """Rows of several lengths, filled up with zeros to a power of two."""
    longest = max(1, *(len(row) for row in rows)) if rows else 1
    table = np.zeros((len(rows), 1 << (longest - 1).bit_length()), dtype)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    return table
