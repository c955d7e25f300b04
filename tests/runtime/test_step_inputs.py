"""Step inputs that the step kernels build equal those of a loop over tokens, and rows are updated after a step."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from penstock.kernels.batch_arrays import (
    BEFORE,
    CONTEXT,
    FIRST,
    LENGTH,
    BatchRows,
    StepArrays,
    order_units,
    pad_units,
)
from penstock.kernels.native.attention import AttentionWork
from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.session import Session
from penstock.kernels.native.team import ThreadTeam
from penstock.kernels.triton.attention import TritonAttention
from penstock.messages import NewSequence, SamplingParams, Window
from penstock.runtime.batch import ResidentBatch
from penstock.runtime.native_step import NativeStep
from penstock.runtime.step_kernels import ReferenceStep, StepKernels, TritonStep
from penstock.runtime.units import attention_batch, units_of
from tests.kernels.triton.device import DEVICE, there

SIZE, GROUPS = 4, 2
SAMPLING = SamplingParams(seed=0, max_tokens=1)


def native_step() -> NativeStep:
    session = Session(ThreadTeam(instruction_sets()[0], 2))
    return NativeStep(session, [AttentionWork(8, 320, 160, Window()) for _ in range(GROUPS)])


ON_CPU = [ReferenceStep, native_step] if instruction_sets() else [ReferenceStep]


@pytest.fixture(params=[TritonStep, *ON_CPU] if DEVICE.type == "cpu" else [TritonStep])
def kernels(request: pytest.FixtureRequest) -> StepKernels:
    return request.param()


def make_batch(lengths: dict[int, int]) -> ResidentBatch:
    """Sequences of these lengths, with different block ids in two KV groups."""
    batch = ResidentBatch(8, 640, SIZE, GROUPS, torch.device("cpu"), shared=True)
    source = np.random.default_rng(0)
    for seq, length in lengths.items():
        tables = tuple(tuple(source.permutation(400)[:160].tolist()) for _ in range(2))
        tokens = tuple(source.integers(300, size=length).tolist())
        batch.add(NewSequence(seq, tokens, length, 0, tables, SAMPLING, 0))
    return batch


def row_of(batch: ResidentBatch, seq: int) -> int:
    return batch.occupant(seq).row


def state_of(batch: ResidentBatch) -> BatchRows:
    return there(BatchRows(batch.state.token_ids.clone(), batch.state.computed.clone(), batch.state.tables.clone()))


def describe(
    rows: Sequence[int],
    lengths: Sequence[int],
    sample: Sequence[bool],
    drafts: Sequence[int] | None = None,
    *,
    decodes_first: bool = True,
) -> tuple[torch.Tensor, int]:
    length, drafted = np.array(lengths), np.array(drafts or [0] * len(rows))
    logits = np.where(sample, 1 + drafted, 0)
    first = np.where(sample, np.cumsum(logits) - logits, -1)
    begins = np.cumsum(length) - length
    where = np.array(rows)
    units, decodes = order_units(
        length, begins, np.zeros_like(length), where, first, drafted, decodes_first=decodes_first
    )
    return torch.from_numpy(units), decodes


@pytest.mark.parametrize(
    "work",
    [
        {7: (3, 1), 9: (20, 1)},
        {5: (0, 6), 7: (3, 1), 9: (11, 9), 8: (5, 1)},
        {9: (0, 300), 5: (1, 5)},
        {9: (299, 1)},
    ],
)
def test_tokens_positions_slots_and_contexts(work: dict[int, tuple[int, int]], kernels: StepKernels) -> None:
    batch = make_batch({5: 6, 7: 10, 8: 6, 9: 300})
    rows = [row_of(batch, seq) for seq in work]
    for row, (start, _) in zip(rows, work.values(), strict=True):
        batch.num_computed[row] = batch.state.computed[row] = start
    counts = [count for _, count in work.values()]
    units = units_of(batch, rows, counts, [False] * len(work), [0] * len(work))
    step = StepArrays.empty(6, 6, 320, GROUPS, DEVICE)
    described, decodes = describe(rows, counts, [False] * len(work), decodes_first=kernels.decodes_first)
    step.units[:, : len(rows)] = described
    kernels.fill(state_of(batch), step, len(rows), SIZE)
    where = [
        (row, p) for row, (start, count) in zip(rows, work.values(), strict=True) for p in range(start, start + count)
    ]
    tokens = len(where)
    assert step.token_ids[:tokens].tolist() == [batch.token_ids[row, p] for row, p in where]
    assert step.positions[:tokens].tolist() == [p for _, p in where]
    assert step.offsets[:tokens].tolist() == [p % SIZE for _, p in where]
    for group in range(GROUPS):
        assert step.blocks[group, :tokens].tolist() == [batch.tables[group, row, p // SIZE] for row, p in where]
    if isinstance(kernels, NativeStep):
        for group, prepared in enumerate(kernels._attention):
            assert prepared.context_lens[: len(rows)].tolist() == [start + count for start, count in work.values()]
            for i, (row, p) in enumerate(
                (row, start + count - 1) for row, (start, count) in zip(rows, work.values(), strict=True)
            ):
                assert prepared.tables[i, p // SIZE] == batch.tables[group, row, p // SIZE]
        return
    # The attention's own preparation of the host's batch says the same, but for where tables are.
    seen = attention_batch(0, 0, batch, units)
    prepared = TritonAttention().prepare(seen, torch.empty(0, device=DEVICE))
    assert decodes == prepared.decodes
    for line in (FIRST, LENGTH, CONTEXT, BEFORE):
        assert step.units[line, : len(rows)].tolist() == prepared.units[line].tolist()


def test_a_decoding_step_follows_another_without_the_host(kernels: StepKernels) -> None:
    batch = make_batch({5: 6, 7: 10, 9: 30})
    rows = [row_of(batch, seq) for seq in (9, 5)]
    batch.state.computed[rows] = torch.tensor([29, 5], dtype=torch.int32)
    state = state_of(batch)
    step = StepArrays.empty(4, 4, 8, GROUPS, DEVICE)
    described, count = describe(rows, [1, 1], [True, True])
    padding = 0 if isinstance(kernels, NativeStep) else 2  # which is for captured graphs alone
    step.units[:, : count + padding] = torch.from_numpy(pad_units(described.numpy(), padding))
    outputs = there(torch.tensor([5] * 8, dtype=torch.int32))
    count += padding
    for nth, sampled in enumerate(([77, 78], [177, 178])):
        kernels.fill(state, step, count, SIZE)
        last = [batch.token_ids[rows[0], 29], batch.token_ids[rows[1], 5]] if nth == 0 else [77, 78]
        assert step.token_ids[:count].tolist() == [*last, 0, 0][:count]
        assert step.positions[:count].tolist() == [29 + nth, 5 + nth, 0, 0][:count]
        assert step.units[CONTEXT, :count].tolist() == [30 + nth, 6 + nth, 0, 0][:count]
        assert step.blocks[:, 2:count].tolist() == [[-1] * padding] * 2
        kernels.advance(state, step, count, there(torch.tensor(sampled)), outputs)
        assert step.accepted[:2].tolist() == [1, 1]
    assert state.computed[rows].tolist() == [31, 7]
    assert state.token_ids[rows[0], 30:32].tolist() == [77, 177]
    assert state.token_ids[rows[1], 6:8].tolist() == [78, 178]
    assert state.computed[row_of(batch, 7)] == 0
    assert outputs.tolist() == [7 if row in rows else 5 for row in range(8)]


def test_a_chunk_that_does_not_sample_is_computed_and_no_more(kernels: StepKernels) -> None:
    batch = make_batch({5: 6, 7: 10})
    rows = [row_of(batch, 7), row_of(batch, 5)]
    state = state_of(batch)
    step = StepArrays.empty(2, 2, 16, GROUPS, DEVICE)
    described, decodes = describe(rows, [4, 6], [False, True])
    assert decodes == 0
    step.units[:] = described
    kernels.fill(state, step, 2, SIZE)
    kernels.advance(state, step, 2, there(torch.tensor([99])), there(torch.zeros(8, dtype=torch.int32)))
    assert state.computed[rows].tolist() == [4, 6]
    assert state.token_ids[rows[0]].tolist() == batch.token_ids[rows[0]].tolist()
    assert state.token_ids[rows[1], 6] == 99


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_drafts_before_the_first_wrong_one_are_accepted(right: int, kernels: StepKernels) -> None:
    """A row with three drafts, of which `right` equal the sampled tokens, next to a row without drafts."""
    batch = make_batch({5: 6, 7: 10})
    rows = [row_of(batch, 5), row_of(batch, 7)]
    batch.state.computed[rows] = torch.tensor([5, 9], dtype=torch.int32)
    drafts = [201, 202, 203]
    batch.state.token_ids[rows[0], 6:9] = torch.tensor(drafts, dtype=torch.int32)
    state = state_of(batch)
    step = StepArrays.empty(2, 5, 16, GROUPS, DEVICE)
    described, _ = describe(rows, [4, 1], [True, True], [3, 0], decodes_first=kernels.decodes_first)
    step.units[:] = described
    kernels.fill(state, step, 2, SIZE)
    known = [batch.token_ids[rows[0], 5], *drafts, batch.token_ids[rows[1], 9]]
    assert step.token_ids[:5].tolist() == known and step.positions[:5].tolist() == [5, 6, 7, 8, 9]
    sampled = [draft if i < right else 100 + i for i, draft in enumerate([*drafts, -1])]
    outputs = there(torch.zeros(8, dtype=torch.int32))
    kernels.advance(state, step, 2, there(torch.tensor([*sampled, 55])), outputs)
    assert [step.accepted[0], step.accepted[4]] == [1 + right, 1]
    assert state.computed[rows].tolist() == [6 + right, 10]
    assert state.token_ids[rows[0], 6 : 7 + right].tolist() == sampled[: 1 + right]
    assert state.token_ids[rows[1], 10] == 55
    assert outputs[rows].tolist() == [1 + right, 1]


def test_prompts_are_not_padded() -> None:
    units, _ = describe([0, 1], [1, 3], [True, True])
    with pytest.raises(ValueError, match="1 prompts cannot be padded"):
        pad_units(units.numpy(), 1)
