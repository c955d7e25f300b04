"""A step's inputs, compared with what a loop over tokens says."""

import numpy as np
import pytest

from penstock.messages import NewSequence, SamplingParams
from penstock.runtime.batch import PersistentBatch
from penstock.runtime.inputs import StepInputs, segments

SIZE = 4
SAMPLING = SamplingParams(seed=0, max_tokens=1)


def make_batch(lengths: dict[int, int]) -> PersistentBatch:
    """Sequences of so many tokens, in two KV groups with ids of their own."""
    batch = PersistentBatch(8, 64, SIZE, 2)
    source = np.random.default_rng(0)
    for seq, length in lengths.items():
        tables = tuple(tuple(source.permutation(20)[:12].tolist()) for _ in range(2))
        tokens = tuple(source.integers(300, size=length).tolist())
        batch.add(NewSequence(seq, tokens, length, 0, tables, SAMPLING, 0))
    return batch


@pytest.mark.parametrize("work", [{7: (3, 1), 9: (20, 1)}, {5: (0, 6), 7: (3, 1), 9: (11, 9)}, {9: (0, 30)}])
def test_tokens_positions_and_slots(work: dict[int, tuple[int, int]]) -> None:
    batch = make_batch({5: 6, 7: 10, 9: 30})
    rows = [batch.row(seq) for seq in work]
    for row, (start, _) in zip(rows, work.values(), strict=True):
        batch.num_computed[row] = start
    units = segments(batch, rows, [count for _, count in work.values()], [False] * len(work))
    step = StepInputs(batch, (0, 6), 40).fill(units, lambda group, seen: seen)
    where = [
        (row, p) for row, (start, count) in zip(rows, work.values(), strict=True) for p in range(start, start + count)
    ]
    assert step.positions.tolist() == [p for _, p in where]
    assert step.token_ids.tolist() == [batch.token_ids[row, p] for row, p in where]
    for group, window in enumerate((0, 6)):
        got, seen = step.groups[group], step.groups[group].attention
        assert got.blocks.tolist() == [batch.tables[group][row, p // SIZE] for row, p in where]
        assert got.offsets.tolist() == [p % SIZE for _, p in where]
        assert seen.window == window and seen.query_lens.tolist() == [count for _, count in work.values()]
        assert seen.context_lens.tolist() == [start + count for start, count in work.values()]
        for i, (row, (start, count)) in enumerate(zip(rows, work.values(), strict=True)):
            blocks = -(-(start + count) // SIZE)
            assert seen.block_tables[i, :blocks].tolist() == batch.tables[group][row, :blocks].tolist()
        assert seen.first_seen().tolist() == [max(s - 5, 0) if window else 0 for s, _ in work.values()]


def test_a_batch_forgets_what_has_gone() -> None:
    batch = make_batch({1: 5, 2: 6})
    row = batch.remove(1)
    batch.add(NewSequence(3, (8, 9), 2, 1, ((4,), (5,)), SAMPLING, 0))
    assert batch.row(3) == row and batch.num_computed[row] == 1
    batch.append_tokens(np.array([row]), [77])
    batch.append_blocks(row, ((6,), ()))
    assert batch.token_ids[row, : batch.num_tokens[row]].tolist() == [8, 9, 77]
    assert [batch.tables[g][row, : batch.num_blocks[g, row]].tolist() for g in range(2)] == [[4, 6], [5]]
    with pytest.raises(RuntimeError, match="sequence 1, which is not known"):
        batch.row(1)
    with pytest.raises(RuntimeError, match="max_model_len=64"):
        batch.add(NewSequence(4, (0,) * 66, 66, 0, ((), ()), SAMPLING, 0))
