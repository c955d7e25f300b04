"""`benchmarks/kernels.py` with everything small: every op is measured in every type that it has."""

import op_timing.kernel_cases as bench
import pytest
import torch
from calm import Watch
from op_timing.kernel_cases import OPS, measure_kernels

from penstock.bench.roofline import MachineRates
from penstock.config.weights import packed_bytes
from penstock.kernels.native.session import native_session

SMALL = {
    "SHAPES": ((96, 40),),
    "ROWS": (1, 5),
    "VOCAB": 1000,
    "COUNT": 6,
    "SLOTS": 2,
    "EXPERT": (24, 40),
    "CONTEXTS": (32,),
    "PROMPT": 16,
    "BEFORE": (0, 32),
    "SECONDS": 0.0,
    "WINDOWS": 2,
    "WORKING_SET": (1 << 16, 1 << 16),
    "MOST_COPIES": 3,
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(bench, name, value)


def test_every_op_is_measured() -> None:
    said: list[str] = []
    slow = MachineRates(bandwidth=1.0, flops=1.0)
    found, machine = measure_kernels(native_session(), slow, list(OPS), said.append, Watch())
    assert {each.op for each in found} == set(OPS)
    assert len(said) == len(found)
    types = {op: {each.dtype for each in found if each.op == op} for op in OPS}
    assert types["linear"] == types["gated"] == {"f32", "bf16", "int16", "int8", "int4", "Q4_0", "Q4_K", "Q6_K"}
    assert types["experts"] == types["logits"] == types["linear"] - {"f32"}
    assert types["attention"] == types["store"] == {"bf16", "int8"}
    assert all(each.us > 0 for each in found)
    assert {each.rows for each in found if each.shape == "prefill at 48"} == {16}
    # What is faster than the machine was said to be raises the roof: nothing is above it.
    assert machine.bandwidth > slow.bandwidth and machine.flops > slow.flops
    assert all(0 <= each.roofline_fraction <= 1 for each in found if each.working_set_mb * 1e6 > 1.1 * (1 << 16))


def test_a_long_weight_repeats_a_packed_one() -> None:
    weights = bench._Weights(1000, 40, "int4")
    first, other = weights(0), weights(2)
    assert (first.n, first.k) == (1000, 40)
    assert len(first.lines) == 63 * 64 // 8 * 64  # 63 blocks of columns; 40 along k are padded to 64, 8 a line
    assert first.nbytes == packed_bytes(1000, 40, first.format)
    for ours, theirs in zip(first.tensors, other.tensors, strict=True):
        assert torch.equal(ours, theirs) and ours.data_ptr() != theirs.data_ptr()
