"""What steps cost by the model's sizes, and what the machine can do."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec.structs import replace

from penstock.bench.roofline import MachineProbe
from penstock.cli.machine import _cpu_peak, _gpu_peak, cost_model
from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.product_rate import product_rate
from penstock.prepare.model import PreparedModel, prepare
from penstock.weights.packaged import embedded_model
from tests.kernels.native.reference import GROUPED


@pytest.fixture(scope="module")
def prepared() -> PreparedModel:
    return prepare(str(embedded_model()), {"kv_cache_memory": "64MiB", "threads": "1"})


def test_a_step_reads_the_weights_and_multiplies_them(prepared: PreparedModel) -> None:
    costs = cost_model(prepared, prepared.hardware).costs
    weights = next(row.bytes for row in prepared.resolved.memory.rows if row.name == "weights")
    assert 0.5 * weights < costs.weight_bytes(1) <= weights
    assert costs.weight_bytes(512) == costs.weight_bytes(1)  # no experts
    parameters = (costs.layer_flops + costs.head_flops) / 2
    assert parameters == pytest.approx(prepared.facts.num_parameters, rel=0.01)
    pool = next(row.bytes for row in prepared.resolved.memory.rows if row.name == "KV cache")
    blocks = prepared.resolved.memory.num_blocks
    assert sum(count * size for count, size in zip(blocks, costs.block_bytes, strict=True)) == pool


@pytest.mark.skipif(not instruction_sets(), reason="there are no native kernels here")
def test_a_cpu_is_measured(prepared: PreparedModel) -> None:
    with ThreadPoolExecutor(1) as threads:  # it binds the calling thread to the processors
        peak = threads.submit(_cpu_peak, prepared.facts, prepared.resolved.engine, os.sched_getaffinity(0)).result()
    assert 1e8 < peak.read_bytes < 1e13 and 1e8 < peak.flops < 1e15
    # torch's products are as fast within an order of magnitude or two, on a machine that may be busy.
    other = MachineProbe("float32", threads=1)(0.1)
    assert 0.05 < product_rate(GROUPED["Q8_0"], 1) / other.flops < 50


@pytest.mark.parametrize(
    ("name", "ranks", "read", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 1, 3350e9, 989e12),
        ("NVIDIA L40S", 2, 2 * 864e9, 2 * 362e12),
        ("NVIDIA GeForce RTX 4090", 1, 0, 0),
    ],
)
def test_a_gpus_peak_is_its_makers(prepared: PreparedModel, name: str, ranks: int, read: float, flops: float) -> None:
    engine = replace(prepared.resolved.engine, device="cuda", tensor_parallel_size=ranks)
    peak = _gpu_peak(engine, replace(prepared.hardware, device="cuda", name=name, gpus=ranks))
    assert (peak.read_bytes, peak.flops) == (read, flops)
