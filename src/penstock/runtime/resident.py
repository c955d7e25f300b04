"""The batch of a runner whose rows live on the device, and the little that the host sends to keep them.

The host knows how many tokens a row has, computed and in all, as of the last plan submitted. Which they are, those that
outstanding plans are to sample among them, only the device knows.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.resident import ResidentRows
from penstock.messages import NewSequence
from penstock.runtime.batch import PersistentBatch


class Change(NamedTuple):
    """Something to be written on the device: `write` takes what `arrays` have become there."""

    arrays: Sequence[NDArray[Any]]
    write: Callable[[Sequence[Tensor]], None]


@dataclass(slots=True)
class Occupant:
    """A sequence while it has a row. Outstanding plans know it still when the row is another's."""

    seq: int
    row: int
    error: str = ""  # why it cannot go on


class ResidentBatch:
    """Rows of the device's arrays, one per sequence, and what plans have changed of them since they were last sent."""

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int, device: torch.device
    ) -> None:
        self.rows = PersistentBatch(max_num_seqs, max_model_len, block_size, num_groups)
        blocks = -(-max_model_len // block_size)
        self.state = ResidentRows.empty(max_num_seqs, max_model_len, num_groups, blocks, device)
        self.occupants: dict[int, Occupant] = {}  # by sequence number
        self._started: list[int] = []  # rows
        self._learned: list[tuple[int, int]] = []  # places in the flattened token ids, and what is to be there
        self._table_places: list[NDArray[np.int64]] = []  # in the flattened tables,
        self._table_blocks: list[Sequence[int]] = []  # and what is to be there

    def add(self, new: NewSequence) -> Occupant:
        """Take a row for a sequence. RuntimeError where it breaks a limit: an error in the plan."""
        row = self.rows.add(new)
        occupant = self.occupants[new.seq] = Occupant(new.seq, row)
        self._started.append(row)
        self._note_blocks(row, np.zeros(len(new.blocks), np.int64), new.blocks)
        return occupant

    def remove(self, seq: int) -> Occupant | None:
        """Forget a sequence; gives what it was. None for one that was not known."""
        occupant = self.occupants.pop(seq, None)
        if occupant is not None:
            self.rows.remove(seq)
        return occupant

    def occupant(self, seq: int) -> Occupant:
        """RuntimeError for a sequence that is not known."""
        self.rows.row(seq)
        return self.occupants[seq]

    def append_blocks(self, seq: int, blocks: Sequence[Sequence[int]]) -> None:
        """Append ids per KV group to a sequence's block tables."""
        row = self.rows.row(seq)
        self._note_blocks(row, self.rows.num_blocks[:, row].copy(), blocks)
        self.rows.append_blocks(row, blocks)

    def advance(self, rows: NDArray[np.int64], lengths: NDArray[np.int64], sampled: NDArray[np.int64]) -> None:
        """Count tokens of distinct rows as computed, and one more of each row sampled as known."""
        self.rows.num_computed[rows] += lengths
        self.rows.num_tokens[sampled] += 1

    def learn(self, seq: int, token: int) -> None:
        """What the last of a sequence's tokens is, which was sampled elsewhere. Who has gone is passed over."""
        occupant = self.occupants.get(seq)
        if occupant is not None:
            place = occupant.row * self.state.token_ids.shape[1] + int(self.rows.num_tokens[occupant.row]) - 1
            self._learned.append((place, token))

    def change(self) -> Change | None:
        """What is to be sent, if anything is: then it counts as sent."""
        if not self._started and not self._table_places and not self._learned:
            return None
        batch, rows = self.rows, np.array(self._started, np.int64)
        counts = batch.num_tokens[rows].tolist()
        tokens = [batch.token_ids[row, :count] for row, count in zip(self._started, counts, strict=True)]
        places = np.concatenate([*self._table_places, np.zeros(0, np.int64)])
        blocks = np.fromiter((block for ids in self._table_blocks for block in ids), np.int32, len(places))
        learned = np.array(self._learned, np.int64).reshape(-1, 2).T
        arrays = (
            learned[0],
            learned[1].astype(np.int32),
            rows,
            batch.num_computed[rows].astype(np.int32),
            np.concatenate([*tokens, np.zeros(0, np.int64)]).astype(np.int32),
            places,
            blocks,
        )
        written = tuple(zip(self._started, counts, strict=True))
        self._started, self._learned, self._table_places, self._table_blocks = [], [], [], []
        return Change(arrays, lambda sent: self._write(written, *sent))

    def _write(
        self,
        started: Iterable[tuple[int, int]],
        learned: Tensor,
        learned_ids: Tensor,
        rows: Tensor,
        computed: Tensor,
        tokens: Tensor,
        places: Tensor,
        blocks: Tensor,
    ) -> None:
        """`started`: rows and how many tokens they have."""
        state = self.state
        state.token_ids.view(-1)[learned] = learned_ids  # before the rows are others'
        state.computed[rows] = computed
        done = 0
        for row, count in started:
            state.token_ids[row, :count] = tokens[done : done + count]
            done += count
        state.tables.view(-1)[places] = blocks

    def _note_blocks(self, row: int, held: NDArray[np.int64], blocks: Sequence[Sequence[int]]) -> None:
        """A row that holds so many blocks per KV group gets more."""
        _, rows, width = self.state.tables.shape
        for group, ids in enumerate(blocks):
            if ids:
                first = (group * rows + row) * width + int(held[group])
                self._table_places.append(np.arange(first, first + len(ids)))
                self._table_blocks.append(ids)
