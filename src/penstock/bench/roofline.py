"""Measures the machine's bandwidth and arithmetic, and computes the least time of a case with them."""

import time
from collections.abc import Callable

import msgspec

from penstock.bench.workload import Case
from penstock.config import EngineConfig, ModelFacts
from penstock.config.weights import WeightFormat, cpu_format
from penstock.families.step_cost import model_costs
from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.team import ThreadTeam

SIDE = 1024  # of the square matrices that are multiplied


class MachineRates(msgspec.Struct, frozen=True):
    """The highest rates measured on a machine."""

    bandwidth: float  # bytes read per second, all threads
    flops: float  # multiply-adds counted twice, per second: the best product for the weights, see MachineProbe
    gemm_flops: float = 0.0  # the best of torch's products alone; 0: not measured


def average(before: MachineRates, after: MachineRates) -> MachineRates:
    """The mean of two measurements."""
    pairs = zip(msgspec.structs.astuple(before), msgspec.structs.astuple(after), strict=True)
    return MachineRates(*((first + last) / 2 for first, last in pairs))


class MachineProbe:
    """Measures the machine each time it is called, with all threads.

    It reads 512 MB, and multiplies matrices of 1024 x 1024: by torch in `dtype` and float32, and by the native kernels
    in the integer type that they use for the weights, if any.
    """

    def __init__(self, dtype: str, threads: int = 0, quantization: str = "none") -> None:
        import torch

        if threads:
            torch.set_num_threads(threads)
        self._data = torch.ones(64 << 20, dtype=torch.int64)
        self._gemms: list[Callable[[], object]] = []
        for kind in {dtype, "float32"}:
            left = torch.rand(SIDE, SIDE).to(getattr(torch, kind))
            self._gemms.append(lambda left=left: left @ left)  # type: ignore[misc]
        self._native: Callable[[], object] | None = None
        if fmt := _integers(dtype, quantization):
            from penstock.kernels.native.linear import NativeLinear
            from penstock.kernels.native.pack import pack
            from penstock.kernels.native.session import Session

            # A separate team of threads: the process's own team is pinned, and engines started here would inherit that.
            linear = NativeLinear(Session(ThreadTeam(instruction_sets()[0], torch.get_num_threads())))
            weight, x = pack(torch.rand(SIDE, SIDE), None, fmt), left.float()
            self._native = lambda: linear(x, weight)

    def __call__(self, seconds: float = 0.5) -> MachineRates:
        """The best rates, each over `seconds` of repetition."""
        bandwidth = _rate(self._data.numel() * 8, self._data.sum, seconds)
        rates = [_rate(2.0 * SIDE**3, gemm, seconds) for gemm in self._gemms]
        best = max(rates)
        # Drop products that are far slower, such as torch's bf16 without AVX512.
        self._gemms = [gemm for gemm, rate in zip(self._gemms, rates, strict=True) if 2 * rate > best]
        native = 0.0 if self._native is None else _rate(2.0 * SIDE**3, self._native, seconds)
        return MachineRates(bandwidth, max(best, native), best)


def measure(dtype: str, threads: int = 0, quantization: str = "none") -> MachineRates:
    """Measures the machine once, in about two seconds."""
    return MachineProbe(dtype, threads, quantization)()


def _integers(dtype: str, quantization: str) -> WeightFormat | None:
    """The integers in which the native kernels multiply a layer's matrices, if any: of int4 the bytes it becomes."""
    found = instruction_sets()
    if not found:
        return None
    quantization = "int8" if quantization == "int4" else quantization
    fmt = cpu_format("matrix", (), dtype, quantization, 0, found[0])
    return None if fmt.scheme in ("f32", "bf16") else fmt


def _rate(work: float, run: Callable[[], object], seconds: float) -> float:
    """The best rate over `seconds` of repetition, after a warm-up run."""
    run()
    best, end = 0.0, time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        run()
        best = max(best, work / (time.perf_counter() - start))
    return best


def least_seconds(case: Case, facts: ModelFacts, engine: EngineConfig, machine: MachineRates) -> float:
    """The least seconds of a case: prefill of all prompts, then output_len - 1 decode steps of the whole batch.

    Prefill takes 2 P IN N / F, with P the parameters of the layers' matrices (only the experts that a token uses). A
    decode step reads the weights that it needs once, the head included, and the KV cache of every request:
    max(W / BW, 2 (P + head) N / F) + N ctx kv / BW.
    """
    costs = model_costs(facts, engine)
    kv_bytes = sum(costs.block_bytes) / engine.block_size
    prefill = costs.layer_flops * case.prompt_len * case.count / machine.flops
    flops = (costs.layer_flops + costs.head_flops) * case.count
    weights = max(costs.weight_bytes(case.count) / machine.bandwidth, flops / machine.flops)
    steps = case.output_len - 1
    context = case.prompt_len + steps / 2
    return prefill + steps * (weights + case.count * context * kv_bytes / machine.bandwidth)
