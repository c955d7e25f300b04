"""A step's inputs built on the device, compared with those built on the host."""

import numpy as np
import pytest
import torch

from penstock.kernels.resident import ResidentRows, StepArrays, describe_units
from penstock.kernels.triton.attention import TritonAttention
from penstock.messages import NewSequence, SamplingParams
from penstock.runtime.batch import PersistentBatch
from penstock.runtime.inputs import StepInputs, segments
from penstock.runtime.step_kernels import StepKernels, torch_step, triton_step
from tests.kernels.triton.device import DEVICE, there

SIZE = 4
SAMPLING = SamplingParams(seed=0, max_tokens=1)


@pytest.fixture(params=[triton_step, torch_step] if DEVICE.type == "cpu" else [triton_step])
def kernels(request: pytest.FixtureRequest) -> StepKernels:
    return request.param()


def make_batch(lengths: dict[int, int]) -> PersistentBatch:
    """Sequences of so many tokens, in two KV groups with ids of their own."""
    batch = PersistentBatch(8, 640, SIZE, 2)
    source = np.random.default_rng(0)
    for seq, length in lengths.items():
        tables = tuple(tuple(source.permutation(400)[:160].tolist()) for _ in range(2))
        tokens = tuple(source.integers(300, size=length).tolist())
        batch.add(NewSequence(seq, tokens, length, 0, tables, SAMPLING, 0))
    return batch


def resident(batch: PersistentBatch) -> ResidentRows:
    tables = torch.from_numpy(np.stack(batch.tables).astype(np.int32))
    arrays = (torch.from_numpy(a.astype(np.int32)) for a in (batch.token_ids, batch.num_computed))
    return ResidentRows(*there(tuple(arrays)), there(tables))


@pytest.mark.parametrize(
    "work",
    [
        {7: (3, 1), 9: (20, 1)},
        {5: (0, 6), 7: (3, 1), 9: (11, 9), 8: (5, 1)},
        {9: (0, 300), 5: (1, 5)},
        {9: (299, 1)},
    ],
)
def test_tokens_positions_slots_and_contexts_are_those_of_the_host(
    work: dict[int, tuple[int, int]], kernels: StepKernels
) -> None:
    batch = make_batch({5: 6, 7: 10, 8: 6, 9: 300})
    rows = [batch.row(seq) for seq in work]
    for row, (start, _) in zip(rows, work.values(), strict=True):
        batch.num_computed[row] = start
    lengths = np.array([count for _, count in work.values()])
    units = segments(batch, rows, lengths.tolist(), [False] * len(work))
    want = StepInputs(batch, (0, 6), 320).fill(units, lambda group, seen: seen)
    step = StepArrays.empty(6, 320, 2, DEVICE)
    described, decodes = describe_units(np.array(rows), lengths, np.zeros(len(rows), np.bool_))
    step.sequences[:, : len(rows)] = torch.from_numpy(described)
    kernels.fill(resident(batch), step, len(rows), SIZE)
    tokens = int(lengths.sum())
    assert step.token_ids[:tokens].tolist() == want.token_ids.tolist()
    assert step.positions[:tokens].tolist() == want.positions.tolist()
    for group in range(2):
        assert step.blocks[group, :tokens].tolist() == want.groups[group].blocks.tolist()
        assert step.offsets[:tokens].tolist() == want.groups[group].offsets.tolist()
    # The attention's own preparation of the host's batch says the same, but for where tables are.
    prepared = TritonAttention().prepare(want.groups[0].attention, torch.empty(0, device=DEVICE))
    assert decodes == prepared.decodes
    for line in (0, 1, 2, 4):
        assert step.sequences[line, : len(rows)].tolist() == prepared.sequences[line].tolist()


def test_a_decoding_step_follows_another_without_the_host(kernels: StepKernels) -> None:
    batch = make_batch({5: 6, 7: 10, 9: 30})
    rows = np.array([batch.row(seq) for seq in (9, 5)])
    batch.num_computed[rows] = [29, 5]
    state = resident(batch)
    step = StepArrays.empty(4, 8, 2, DEVICE)
    described, count = describe_units(rows, np.array([1, 1]), np.ones(2, np.bool_), padding=2)
    assert count == 4
    step.sequences[:] = torch.from_numpy(described)
    for nth, sampled in enumerate(([77, 78], [177, 178])):
        kernels.fill(state, step, count, SIZE)
        last = [batch.token_ids[rows[0], 29], batch.token_ids[rows[1], 5]] if nth == 0 else [77, 78]
        assert step.token_ids[:4].tolist() == [*last, 0, 0]
        assert step.positions[:4].tolist() == [29 + nth, 5 + nth, 0, 0]
        assert step.sequences[2].tolist() == [30 + nth, 6 + nth, 0, 0]
        assert step.blocks[:, 2:4].tolist() == [[-1, -1]] * 2
        kernels.advance(state, step, count, there(torch.tensor(sampled)))
    assert state.computed[rows].tolist() == [31, 7]
    assert state.token_ids[rows[0], 30:32].tolist() == [77, 177]
    assert state.token_ids[rows[1], 6:8].tolist() == [78, 178]
    assert state.computed[batch.row(7)] == 0


def test_a_chunk_that_does_not_sample_is_computed_and_no_more(kernels: StepKernels) -> None:
    batch = make_batch({5: 6, 7: 10})
    rows = np.array([batch.row(7), batch.row(5)])
    state = resident(batch)
    step = StepArrays.empty(2, 16, 2, DEVICE)
    described, decodes = describe_units(rows, np.array([4, 6]), np.array([False, True]))
    assert decodes == 0
    step.sequences[:] = torch.from_numpy(described)
    kernels.fill(state, step, 2, SIZE)
    kernels.advance(state, step, 2, there(torch.tensor([99])))
    assert state.computed[rows].tolist() == [4, 6]
    assert state.token_ids[rows[0]].tolist() == batch.token_ids[rows[0]].tolist()
    assert state.token_ids[rows[1], 6] == 99


def test_prompts_are_not_padded() -> None:
    with pytest.raises(ValueError, match="1 prompts cannot be padded"):
        describe_units(np.array([0, 1]), np.array([1, 3]), np.ones(2, np.bool_), padding=1)
