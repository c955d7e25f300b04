"""The resident batch: what a runner keeps of its sequences between steps. Plans change it by deltas.

The host counts the tokens of a row, computed and in all, as of the last plan submitted. Token ids that outstanding
plans sample are on the device alone. The drafts of a step count as accepted until its result arrives; its sequence has
no other plan meanwhile.
"""

import math
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.batch_arrays import BatchRows
from penstock.messages import NewSequence, StepPlan, Work
from penstock.runtime.device import Change


@dataclass(slots=True)
class Occupant:
    """A sequence while it has a row. Outstanding plans refer to it after the row was given to another."""

    seq: int
    row: int


class ResidentBatch:
    """Rows of fixed arrays, one per sequence. Applying a plan costs in proportion to what it changes."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        device: torch.device,
        *,
        shared: bool,
    ) -> None:
        """With `shared`, the device is this machine's processor and reads the host's arrays."""
        blocks = -(-max_model_len // block_size)
        self.block_size = block_size
        self.occupants: dict[int, Occupant] = {}  # by sequence number
        self.token_ids = _sparse(max_num_seqs, max_model_len + 1)  # a last token is never computed
        self.tables = _sparse(num_groups, max_num_seqs, blocks)
        # Counts of each row. Call `catch_up` before reading them: repeated steps are only counted by `advance_again`.
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_prompt = np.zeros(max_num_seqs, np.int64)
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self._num_blocks = [[0] * max_num_seqs for _ in range(num_groups)]  # by group and row
        self.errors: dict[int, str] = {}  # sequences that cannot go on, and why; outstanding plans may name them still
        self.prompt_logprobs: dict[int, int] = {}  # rows with prompt logprobs, and how many
        self.state = BatchRows.empty(max_num_seqs, max_model_len, num_groups, blocks, device)
        if shared:
            self.state = BatchRows(torch.from_numpy(self.token_ids), self.state.computed, torch.from_numpy(self.tables))
        self._shared = shared
        nothing = np.zeros(0, np.int64)
        self._last_advance, self._repeats = (nothing, nothing, nothing), 0
        self._free = list(range(max_num_seqs - 1, -1, -1))
        # Not yet sent to the device: rows, token ids and blocks, the last two by their place in the flattened arrays.
        self._started: list[int] = []
        self._learned: list[tuple[int, int]] = []
        self._recounted: list[int] = []  # rows that had drafts: their numbers of computed tokens changed
        self._table_places: list[NDArray[np.int64]] = []
        self._table_blocks: list[Sequence[int]] = []

    def add(self, new: NewSequence) -> Occupant:
        """Give a sequence a row. RuntimeError where it breaks a limit: an error in the plan."""
        if new.seq in self.occupants:
            raise RuntimeError(f"sequence {new.seq} is new in the plan, but has a row already")
        if not self._free:
            raise RuntimeError(f"sequence {new.seq} is one too many: max_num_seqs={len(self.num_tokens)}")
        count = len(new.token_ids)
        if count > self.token_ids.shape[1]:
            raise RuntimeError(f"sequence {new.seq} has {count} tokens: max_model_len={self.token_ids.shape[1] - 1}")
        self.catch_up()
        row = self._free.pop()
        occupant = self.occupants[new.seq] = Occupant(new.seq, row)
        self.token_ids[row, :count] = new.token_ids
        self.num_tokens[row] = count
        self.num_prompt[row] = new.num_prompt
        self.num_computed[row] = new.num_computed
        for counts in self._num_blocks:
            counts[row] = 0
        if new.sampling.prompt_logprobs is not None:
            self.prompt_logprobs[row] = new.sampling.prompt_logprobs
        if self._shared:
            self.state.computed[row] = new.num_computed
        else:
            self._started.append(row)
        self._append_blocks(row, new.blocks)
        return occupant

    def remove(self, seq: int) -> Occupant | None:
        """Forget a sequence; returns what it was. None for one that is not known."""
        self.catch_up()
        occupant = self.occupants.pop(seq, None)
        if occupant is not None:
            self.prompt_logprobs.pop(occupant.row, None)
            self._free.append(occupant.row)
        return occupant

    def clear(self) -> None:
        """Forget every sequence, and what was to be written on the device."""
        self._repeats = 0
        self.occupants, self.errors, self.prompt_logprobs = {}, {}, {}
        self._free = list(range(len(self.num_tokens) - 1, -1, -1))
        self._forget_changes()

    def forget_errors(self, outstanding: Iterable[StepPlan]) -> None:
        """Forget errors of sequences that have gone and that no outstanding plan names."""
        named = {work.seq for plan in outstanding for work in plan.work}
        self.errors = {seq: error for seq, error in self.errors.items() if seq in self.occupants or seq in named}

    def occupant(self, seq: int) -> Occupant:
        """RuntimeError for a sequence that is not known."""
        try:
            return self.occupants[seq]
        except KeyError:
            raise RuntimeError(f"the plan names sequence {seq}, which is not known") from None

    def append_blocks(self, seq: int, blocks: Sequence[Sequence[int]]) -> None:
        """Append ids per KV group to a sequence's block tables."""
        self._append_blocks(self.occupant(seq).row, blocks)

    def advance(self, rows: NDArray[np.int64], lengths: NDArray[np.int64], gained: NDArray[np.int64]) -> None:
        """Count the tokens of a step as computed and, in each of these distinct rows, so many more as known."""
        self.catch_up()
        self._last_advance = rows, lengths, gained
        self._repeats = 1

    def advance_again(self) -> None:
        """`advance` with the arguments of the last call."""
        self._repeats += 1

    def catch_up(self) -> None:
        """Bring the counts up to date. They lag behind so that repeated decode steps need no NumPy."""
        if self._repeats:
            rows, lengths, gained = self._last_advance
            self.num_computed[rows] += self._repeats * lengths
            self.num_tokens[rows] += self._repeats * gained
            self._repeats = 0

    def take_back_drafts(self, occupants: Iterable[Occupant], refused: Iterable[int]) -> None:
        """Take back drafts of these sequences that a step counted as known and computed."""
        self.catch_up()
        for occupant, drafts in zip(occupants, refused, strict=True):
            if drafts and self.occupants.get(occupant.seq) is occupant:
                self.num_computed[occupant.row] -= drafts
                self.num_tokens[occupant.row] -= drafts

    def write_drafts(self, units: Iterable[Work]) -> None:
        """Put the drafts that a plan brings behind the known tokens, whose number no outstanding plan changes."""
        for work in units:
            if work.draft_ids:
                self.catch_up()
                row = self.occupant(work.seq).row
                self._set_tokens(row, int(self.num_tokens[row]), work.draft_ids)

    def learn(self, seq: int, tokens: Sequence[int], drafts: int = 0) -> None:
        """Set the last tokens of a sequence, which another rank sampled in a step with `drafts` drafts of it. Does
        nothing if the sequence has gone."""
        occupant = self.occupants.get(seq)
        if occupant is None or not tokens:
            return
        self.catch_up()
        row = occupant.row
        if drafts:
            self.take_back_drafts((occupant,), (1 + drafts - len(tokens),))
            if self._shared:
                self.state.computed[row] = int(self.num_computed[row])  # this rank had no sampled tokens to count by
            else:
                self._recounted.append(row)
        self._set_tokens(row, int(self.num_tokens[row]) - len(tokens), tokens)

    def _set_tokens(self, row: int, start: int, tokens: Sequence[int]) -> None:
        self.token_ids[row, start : start + len(tokens)] = tokens
        if not self._shared:
            first = row * self.token_ids.shape[1] + start
            self._learned += [(first + i, token) for i, token in enumerate(tokens)]

    def change(self) -> Change | None:
        """Returns the values to write on the device since the last call, if any."""
        if not self._started and not self._table_places and not self._learned:
            return None
        rows = np.array([*self._started, *self._recounted], np.int64)  # a row in both has the same count
        counts = self.num_tokens[self._started].tolist()
        tokens = [self.token_ids[row, :count] for row, count in zip(self._started, counts, strict=True)]
        places = np.concatenate([*self._table_places, np.zeros(0, np.int64)])
        blocks = np.fromiter((block for ids in self._table_blocks for block in ids), np.int32, len(places))
        learned = np.array(self._learned, np.int64).reshape(-1, 2).T
        arrays = (
            learned[0],
            learned[1].astype(np.int32),
            rows,
            self.num_computed[rows].astype(np.int32),
            np.concatenate([*tokens, np.zeros(0, np.int32)]),
            places,
            blocks,
        )
        written = tuple(zip(self._started, counts, strict=True))
        self._forget_changes()
        return Change(arrays, lambda sent: self._write(written, sent))

    def _forget_changes(self) -> None:
        self._started, self._learned, self._recounted, self._table_places, self._table_blocks = [], [], [], [], []

    def _write(self, started: Sequence[tuple[int, int]], sent: Sequence[Tensor]) -> None:
        """`started`: rows and how many tokens each has."""
        learned, learned_ids, rows, computed, tokens, places, blocks = sent
        state = self.state
        state.token_ids.view(-1)[learned] = learned_ids  # first: a row may be another sequence's by now
        state.computed[rows] = computed
        done = 0
        for row, count in started:
            state.token_ids[row, :count] = tokens[done : done + count]
            done += count
        state.tables.view(-1)[places] = blocks

    def _append_blocks(self, row: int, blocks: Sequence[Sequence[int]]) -> None:
        _, rows, width = self.tables.shape
        for group, ids in enumerate(blocks):
            start = self._num_blocks[group][row]
            self._num_blocks[group][row] = end = start + len(ids)
            self.tables[group, row, start:end] = ids
            if ids and not self._shared:
                first = (group * rows + row) * width + start
                self._table_places.append(np.arange(first, first + len(ids)))
                self._table_blocks.append(ids)


def _sparse(*shape: int) -> NDArray[np.int32]:
    """Returns zeros, in long rows that mostly stay zero.

    NumPy would request huge pages: then a sequence's first token would make two megabytes resident instead of four
    kilobytes. That takes a millisecond, which delays every stream.
    """
    memory = mmap.mmap(-1, math.prod(shape) * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, np.int32).reshape(shape)
