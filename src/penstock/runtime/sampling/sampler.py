"""The sampler's rows: how each row of the batch is sampled, on the host and on the device.

Parameters are sent once, when a sequence gets its row. The other inputs of a step are small and made by `plan`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.batch_arrays import FILTERED, GREEDY, PLAIN, TOP_K, EditRows, MaskRows, SamplingRows
from penstock.messages import NEUTRAL, SamplingParams
from penstock.runtime.device import Change
from penstock.runtime.sampling import noise

# A lower temperature is greedy: it would divide logits that differ by rounding alone into certainty.
GREEDY_BELOW = 1e-5
MOST = 2**31 - 1  # the largest int32
# Sampling parameters that the kernels read of each row, and those that leave out tokens. top_k has a kind of its own.
_OF_ROWS = tuple(name for name in SamplingRows.__dataclass_fields__ if name in NEUTRAL)
_FILTERS = tuple(name for name in _OF_ROWS if name not in ("temperature", "top_k"))


class StepSampling(NamedTuple):
    """How the rows of logits of one step are sampled. It is the one place where the options of rows enter a step."""

    edited: NDArray[np.int32]  # rows of logits that are edited
    filtered: bool  # whether any row's kind is FILTERED or TOP_K
    logprobs: NDArray[np.int32]  # [rows of logits]: how many of the best tokens each lists; -1: no logprobs
    most_logprobs: int  # the largest of these
    settled: bool  # whether the next steps of the same rows are sampled likewise: no row has a ban that will end


class _Edits(NamedTuple):
    params: SamplingParams
    bans: tuple[int, ...]  # stop tokens, banned while there are fewer outputs than min_tokens
    prompt: int  # tokens
    lasting: bool  # whether there are biases, penalties or a watermark

    def needed(self, outputs: int) -> bool:
        return self.lasting or (outputs < self.params.min_tokens and bool(self.bans))


_GREEDY = SamplingParams(seed=0, max_tokens=0, temperature=0.0)
_NONE = _Edits(_GREEDY, (), 0, False)


class Sampler:
    """The sampling parameters of the batch's rows."""

    def __init__(
        self,
        vocab_size: int,
        max_rows: int,
        device: torch.device,
        *,
        shared: bool,
        logit_rows: int = 0,
        marked: bool = False,
    ) -> None:
        """With `shared`, the device is this machine's processor and reads the host's arrays. A step has at most
        `logit_rows` rows of logits (0: one for each row). With `marked`, outputs have a watermark."""
        self._vocab_size = vocab_size
        # One row more, which stays greedy, for padding and for scoring prompts.
        host = SamplingRows.empty(max_rows + 1, "cpu")
        host.logprobs.fill_(-1)
        self.rows = host if shared else SamplingRows.empty(max_rows + 1, device)
        self.edits = EditRows.empty(max_rows + 1, 1, 1, device)
        self.masks = MaskRows.empty(logit_rows or max_rows, vocab_size, device)
        self._shared = shared
        self._marked = marked
        self._host = {name: getattr(host, name).numpy() for name in SamplingRows.__dataclass_fields__}
        self._edited: dict[int, _Edits] = {}  # by row
        self._written: set[int] = set()  # rows whose edits were sent to the device
        self._started: list[int] = []  # rows that were taken since `changes` was last called

    def add(
        self, row: int, params: SamplingParams, choice: int, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> None:
        """Start a row after `output_ids`, as if the sampler had chosen them.

        The parameters' ranges have been checked (`messages.check_sampling`). ValueError for a biased or penalised
        token that has no logit, or more logprobs than tokens: the row is then greedy and has no edits.
        """
        self._edited.pop(row, None)
        try:
            edits = _edits(params, prompt_ids, output_ids, self._vocab_size)
        except ValueError:
            self._start(row, _GREEDY, 0, 0)
            raise
        if self._marked:
            edits = edits._replace(lasting=True)
        if edits.needed(len(output_ids)):
            self._edited[row] = edits
        self._start(row, params, choice, len(output_ids))

    def _start(self, row: int, params: SamplingParams, choice: int, outputs: int) -> None:
        top_k = params.top_k if params.top_k < self._vocab_size else 0
        host = self._host
        host["kind"][row] = _kind(params, top_k)
        for name in _OF_ROWS:
            host[name][row] = getattr(params, name)
        host["top_k"][row] = top_k
        host["streams"].view(np.uint64)[row] = noise.stream(params.seed, choice)
        host["outputs"][row] = outputs
        host["logprobs"][row] = -1 if params.logprobs is None else params.logprobs
        self._started.append(row)

    def remove(self, row: int) -> None:
        self._edited.pop(row, None)

    def clear(self) -> None:
        """Forget every row, also what was to be written on the device."""
        self._edited, self._started = {}, []
        self._written = set(range(len(self.rows.kind)))  # some may have edits there that were to be overwritten

    def plan(self, rows: NDArray[np.int64], outputs: NDArray[np.int64]) -> StepSampling:
        """Returns how a step's rows of logits are sampled: `rows` of the batch, which have so many outputs by then,
        drafts not counted: these may be refused."""
        edited, settled = [], True
        if self._edited:
            for i, (row, done) in enumerate(zip(rows.tolist(), outputs.tolist(), strict=True)):
                edits = self._edited.get(row)
                if edits is not None and edits.needed(done):
                    edited.append(i)  # the kernels count outputs themselves: a ban may have ended
                    settled = settled and edits.lasting
                elif edits is not None:
                    del self._edited[row]  # the ban has ended for good
        wanted = self._host["logprobs"][rows]
        filtered = bool((self._host["kind"][rows] >= FILTERED).any())
        return StepSampling(np.array(edited, np.int32), filtered, wanted, int(wanted.max(initial=-1)), settled)

    # -- what is sent to the device ---------------------------------------------------------------------------

    def changes(self) -> list[Change]:
        """Returns the values to write on the device since the last call."""
        rows, self._started = self._started, []
        if not rows:
            return []
        changes = []
        if not self._shared:
            arrays = tuple(values[rows] for values in self._host.values())
            changes.append(Change((np.array(rows, np.int64), *arrays), self._write))
        # A row's former edits are overwritten, by none where it has none.
        edited = list(dict.fromkeys(row for row in rows if row in self._edited or row in self._written))
        self._written -= set(rows)
        self._written.update(row for row in edited if row in self._edited)
        return [*changes, self._change_of_edits(edited)] if edited else changes

    def _write(self, sent: Sequence[Tensor]) -> None:
        rows, *values = sent
        for name, value in zip(SamplingRows.__dataclass_fields__, values, strict=True):
            getattr(self.rows, name)[rows] = value

    def _change_of_edits(self, rows: Sequence[int]) -> Change:
        edits = [self._edited.get(row, _NONE) for row in rows]
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
        self._widen(bias_ids.shape[1], bans.shape[1])
        to = self.edits
        for target, values in zip((to.repetition, to.presence, to.frequency), factors, strict=True):
            target[rows] = values
        for target, values in zip((to.bias_count, to.ban_count, to.min_tokens, to.prompt), counts, strict=True):
            target[rows] = values
        for target, values in ((to.bias_ids, bias_ids), (to.biases, biases), (to.ban_ids, bans)):
            target[:, : values.shape[1]][rows] = values

    def _widen(self, biases: int, bans: int) -> None:
        """Make room for so many biases and bans in a row: what there is moves to wider tables."""
        old = self.edits
        widths = old.bias_ids.shape[1], old.ban_ids.shape[1]
        if biases <= widths[0] and bans <= widths[1]:
            return
        wide = EditRows.empty(len(old.bias_ids), max(biases, widths[0]), max(bans, widths[1]), old.biases.device)
        for name in EditRows.__dataclass_fields__:
            kept, room = getattr(old, name), getattr(wide, name)
            (room if kept.dim() == 1 else room[:, : kept.shape[1]]).copy_(kept)
        self.edits = wide


def _kind(params: SamplingParams, top_k: int) -> int:
    if params.temperature < GREEDY_BELOW:
        return GREEDY
    if top_k:
        return TOP_K
    return FILTERED if any(getattr(params, name) != NEUTRAL[name] for name in _FILTERS) else PLAIN


def _edits(params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int], vocab_size: int) -> _Edits:
    """ValueError for a biased or penalised token that has no logit, or for more logprobs than tokens."""
    if params.logprobs is not None and params.logprobs > vocab_size:
        raise ValueError(f"{params.logprobs} logprobs of a vocabulary of {vocab_size}: ask for {vocab_size} at most")
    penalties = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    _check_ids("logit_bias", list(params.logit_bias), vocab_size)
    if penalties:
        _check_ids("the prompt", prompt_ids, vocab_size)
        _check_ids("the output", output_ids, vocab_size)
    # A stop token beyond the logits can never be chosen, so it needs no ban.
    bans = tuple(token for token in params.stops() if token < vocab_size)
    return _Edits(params, bans, len(prompt_ids), bool(params.logit_bias) or penalties)


def _check_ids(what: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise ValueError(
            f"{what} names token ids from {min(token_ids)} to {max(token_ids)}; the logits are of ids 0 to "
            f"{vocab_size - 1}: send ids of this model's vocabulary"
        )


def _table(rows: Sequence[Sequence[float]], dtype: type[np.generic]) -> NDArray[np.generic]:
    """Rows of several lengths, filled up with zeros to a power of two."""
    longest = max(1, *(len(row) for row in rows))
    table = np.zeros((len(rows), 1 << (longest - 1).bit_length()), dtype)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    return table
