"""What the machine allows: measured bandwidth and arithmetic, and the least time a case can take with them."""

import time
from collections.abc import Callable

import msgspec

from penstock.bench.workload import Case
from penstock.families import ModelSpec


class Machine(msgspec.Struct, frozen=True):
    bandwidth: float  # bytes read per second, all threads
    flops: float  # multiply-adds counted twice, per second: the best GEMM torch has for the dtype


def _rate(work: float, run: Callable[[], object], seconds: float = 0.5) -> float:
    """The best rate seen over `seconds` of repetition, after one run to warm up."""
    run()
    best, end = 0.0, time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        run()
        best = max(best, work / (time.perf_counter() - start))
    return best


def measure(dtype: str, threads: int = 0) -> Machine:
    """Reads 512 MB and multiplies matrices of 1024³ in `dtype` and in float32; takes about two seconds."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    data = torch.ones(64 << 20, dtype=torch.int64)
    bandwidth = _rate(data.numel() * 8, data.sum)
    del data
    flops, size = 0.0, 1024
    for kind in {dtype, "float32"}:
        left = torch.rand(size, size).to(getattr(torch, kind))
        flops = max(flops, _rate(2.0 * size**3, lambda left=left: left @ left))  # type: ignore[misc]
    return Machine(bandwidth, flops)


def matmul_parameters(spec: ModelSpec) -> int:
    """Those every token is multiplied with: all but embedding and head."""
    return sum(part.size for part in spec.parameters if len(part.shape) == 2 and part.name.startswith("layers."))


def least_seconds(case: Case, spec: ModelSpec, element_size: int, machine: Machine) -> float:
    """Prefill of every prompt, then output_len - 1 decode steps of the whole batch, each at the roofline.

    prefill = 2 P IN N / F with P the layers' matrices; a decode step reads every weight once, the head included,
    and the KV cache of every request: max(W / BW, 2 (P + head) N / F) + N ctx kv / BW.
    """
    layers = matmul_parameters(spec)
    with_head = layers + spec.vocab_size * spec.hidden_size
    kv_bytes = sum(spec.kv_bytes_per_token(group, element_size) for group in range(len(spec.windows)))
    prefill = 2.0 * layers * case.prompt_len * case.count / machine.flops
    weights = max(with_head * element_size / machine.bandwidth, 2.0 * with_head * case.count / machine.flops)
    steps = case.output_len - 1
    context = case.prompt_len + steps / 2
    return prefill + steps * (weights + case.count * context * kv_bytes / machine.bandwidth)
