"""What the executor knows of its sequences between steps: a persistent batch that plans change by deltas."""

import math
import mmap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.messages import NewSequence


class PersistentBatch:
    """Rows of fixed arrays, one per sequence. Applying a plan costs in proportion to what it changes."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int) -> None:
        self.block_size = block_size
        self.rows: dict[int, int] = {}  # sequence number to row
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = _sparse((max_num_seqs, max_model_len + 1))  # a last token is never computed
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_prompt = np.zeros(max_num_seqs, np.int64)
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self.tables = [_sparse((max_num_seqs, max_blocks)) for _ in range(num_groups)]
        self.num_blocks = np.zeros((num_groups, max_num_seqs), np.int64)
        self.prompt_logprobs: dict[int, int] = {}  # row to how many it wants, where it wants any
        self.errors: dict[int, str] = {}  # row to why its sequence cannot go on
        self._free = list(range(max_num_seqs - 1, -1, -1))

    def add(self, new: NewSequence) -> int:
        """Take a row for a sequence; gives the row. RuntimeError where it breaks a limit: an error in the plan."""
        if new.seq in self.rows:
            raise RuntimeError(f"sequence {new.seq} is new in the plan, but has not gone")
        if not self._free:
            raise RuntimeError(f"sequence {new.seq} is one too many: max_num_seqs={len(self.num_tokens)}")
        count = len(new.token_ids)
        if count > self.token_ids.shape[1]:
            raise RuntimeError(f"sequence {new.seq} has {count} tokens: max_model_len={self.token_ids.shape[1] - 1}")
        row = self._free.pop()
        self.rows[new.seq] = row
        self.token_ids[row, :count] = new.token_ids
        self.num_tokens[row] = count
        self.num_prompt[row] = new.num_prompt
        self.num_computed[row] = new.num_computed
        self.num_blocks[:, row] = 0
        if new.sampling.prompt_logprobs is not None:
            self.prompt_logprobs[row] = new.sampling.prompt_logprobs
        self.append_blocks(row, new.blocks)
        return row

    def row(self, seq: int) -> int:
        """A sequence's row. RuntimeError for one that is not known."""
        try:
            return self.rows[seq]
        except KeyError:
            raise RuntimeError(f"the plan names sequence {seq}, which is not known") from None

    def append_blocks(self, row: int, blocks: Sequence[Sequence[int]]) -> None:
        """Append ids per KV group to the row's block tables."""
        for group, ids in enumerate(blocks):
            start = self.num_blocks[group, row]
            self.tables[group][row, start : start + len(ids)] = ids
            self.num_blocks[group, row] = start + len(ids)

    def remove(self, seq: int) -> int:
        """Forget a sequence; gives the row it had."""
        row = self.rows.pop(seq)
        self.prompt_logprobs.pop(row, None)
        self.errors.pop(row, None)
        self._free.append(row)
        return row

    def append_tokens(self, rows: NDArray[np.int64], token_ids: Sequence[int]) -> None:
        """One to each of these distinct rows."""
        length = self.num_tokens[rows]
        self.token_ids[rows, length] = token_ids
        self.num_tokens[rows] = length + 1


def _sparse(shape: tuple[int, int]) -> NDArray[np.int64]:
    """Zeros whose rows are long, and mostly stay so. NumPy asks for huge pages: then a sequence's first token makes two
    megabytes resident, in a millisecond that everybody waits for, and not four kilobytes."""
    memory = mmap.mmap(-1, math.prod(shape) * 8, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, np.int64).reshape(shape)
