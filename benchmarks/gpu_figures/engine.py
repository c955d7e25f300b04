"""Runs a model of random weights on a device with the production scheduler and runner, and times its steps."""

import gc
import random
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from gpu_figures.roofline import Peaks
from penstock.bench.roofline import MachineRates, least_seconds
from penstock.bench.workload import Case
from penstock.config import EngineConfig
from penstock.config.memory import token_bytes
from penstock.config.weights import matmul_bytes
from penstock.families import ModelSpec, model_facts, spec_from_config
from penstock.kernels import Needs, detect_platform, select_kernels, select_packing
from penstock.messages import GenerateRequest, SamplingParams, StepPlan, StepResult
from penstock.runtime.device import CudaDevice, HostDevice
from penstock.runtime.pages import KVPages
from penstock.runtime.runner import ModelRunner
from penstock.schedule import Scheduler, SchedulerConfig

PIECE = 1 << 26  # elements of a weight drawn at once
SPREAD = 0.02  # standard deviation of the weights
STEADY = 16  # steps after the last prompt that do not count, as clocks and caches settle


@dataclass
class Steps:
    """The times of a run's steps, in order."""

    tokens: list[int] = field(default_factory=list)  # sampled in the step
    prompts: list[bool] = field(default_factory=list)  # whether the step computed prompt tokens
    ended: list[float] = field(default_factory=list)  # host clock when the result arrived
    device: list[float] = field(default_factory=list)  # seconds on the device's clock
    seconds: float = 0.0  # of the whole run

    def note(self, plan: StepPlan, result: StepResult) -> None:
        self.tokens.append(sum(len(each.token_ids) for each in result.results))
        self.prompts.append(any(work.count > 1 for work in plan.work))
        self.ended.append(time.perf_counter())
        self.device.append(result.timing.forward + result.timing.sample)

    def decoding(self) -> tuple[float, float]:
        """Medians of a decode step: (seconds between results, seconds on the device). Prompts and ends are left out."""
        first = max((i for i, prompt in enumerate(self.prompts) if prompt), default=-1) + 1 + STEADY
        last = len(self.ended) - 1  # leaves out the step in which the sequences end
        if last - first < 2:
            raise ValueError(f"{len(self.ended)} steps are too few to time decoding: use more output tokens")
        between = [self.ended[i] - self.ended[i - 1] for i in range(first + 1, last)]
        return median(between), median(self.device[first + 1 : last])


class Engine:
    """Scheduler and runner of one model, with KV blocks for `sequences` of `length` tokens each."""

    def __init__(
        self,
        shape: Mapping[str, Any],
        device: torch.device,
        *,
        sequences: int,
        length: int,
        quantization: str = "none",
        kv_cache_dtype: str = "auto",
        deterministic: bool = False,
        step_tokens: int = 8192,
    ) -> None:
        self.spec = spec_from_config(shape)
        self.config = EngineConfig(
            model="random",
            name="random",
            dtype="bfloat16",
            quantization=quantization,  # type: ignore[arg-type]
            kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]
            device=device.type,  # type: ignore[arg-type]
            deterministic=deterministic,
            max_model_len=length,
            max_num_seqs=sequences,
            max_num_batched_tokens=max(step_tokens, sequences),
            depth=2 if device.type == "cuda" else 1,
        )
        self.facts = model_facts(self.spec)
        platform = detect_platform(device.type)
        needs = Needs(torch.bfloat16, self.config.block_size, self.spec.head_dims, deterministic=deterministic)
        parameters = random_parameters(self.spec, self.config, device)
        blocks = 1 + sequences * (-(-length // self.config.block_size) + 1)
        kv_dtype = getattr(torch, self.config.kv_dtype)
        sizes = [blocks] * len(self.spec.windows)
        pages = KVPages(self.spec, sizes, self.config.block_size, kv_dtype, device=device)
        self.runner = ModelRunner(
            self.spec,
            parameters,
            select_kernels(platform, needs),
            self.config,
            pages,
            CudaDevice(device) if device.type == "cuda" else HostDevice(),
        )
        self.runner.capture(progress=False)
        limits = SchedulerConfig(
            max_num_seqs=sequences,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=length,
            enable_prefix_caching=False,
        )
        self.scheduler = Scheduler(limits, self.runner.capacity)
        self._random = random.Random(0)
        self._count = 0

    def run(self, case: Case) -> Steps:
        """Runs the requests of a case, which all arrive at once. RuntimeError if one fails."""
        for _ in range(case.count):
            self._count += 1
            prompt = tuple(self._random.randrange(self.spec.vocab_size) for _ in range(case.prompt_len))
            sampling = SamplingParams(seed=0, max_tokens=case.output_len, temperature=0.0, ignore_eos=True)
            request = GenerateRequest(request_id=str(self._count), prompt_ids=prompt, sampling=sampling)
            self.scheduler.add(request, time.monotonic())
        steps, outstanding, began = Steps(), deque[StepPlan](), time.perf_counter()
        while True:
            while len(outstanding) < self.runner.capacity.depth:
                plan = self.scheduler.plan(time.monotonic())
                if plan is None:
                    break
                self.runner.submit(plan)
                outstanding.append(plan)
            if not outstanding:
                break
            result = self.runner.result()
            steps.note(outstanding.popleft(), result)
            for delta in self.scheduler.apply(result, time.monotonic()):
                if delta.error:
                    raise RuntimeError(f"request {delta.request_id} failed: {delta.error}")
        steps.seconds = time.perf_counter() - began
        return steps

    def close(self) -> None:
        """Frees the model's memory."""
        self.runner.close()
        del self.runner
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # -- rooflines ------------------------------------------------------------------------------------------------

    def decode_seconds(self, peaks: Peaks, sequences: int, context: float) -> float:
        """The least seconds of a decode step: max(W / BW, 2 P B / F) + B ctx kv / BW."""
        weights = matmul_bytes(self.facts, self.config, sequences)
        flops = 2.0 * self._with_head * sequences
        kv = sum(token_bytes(self.facts, self.config)) * context * sequences
        return max(weights / peaks.bandwidth, flops / self._flops(peaks)) + kv / peaks.bandwidth

    def case_seconds(self, peaks: Peaks, case: Case) -> float:
        """The least seconds of a case: see penstock.bench.roofline."""
        return least_seconds(case, self.facts, self.config, MachineRates(peaks.bandwidth, self._flops(peaks)))

    def prefill_flops(self, tokens: int) -> float:
        """Operations of the layers' products and of attention, in which a token sees half of the prompt on average."""
        layers = self._with_head - self.facts.vocab_size * self.facts.hidden_size
        attention = sum(layer.attention.query_width for layer in self.spec.layers) * 2 * tokens
        return 2.0 * layers * tokens + attention * tokens

    @property
    def _with_head(self) -> int:
        layers = sum(
            m.count * m.experts * m.share * m.rows * m.columns for m in self.facts.matrices if not m.vocabulary
        )
        return int(layers) + self.facts.vocab_size * self.facts.hidden_size

    def _flops(self, peaks: Peaks) -> float:
        return peaks.fp8_flops if self.config.quantization == "fp8" else peaks.bf16_flops


def random_parameters(spec: ModelSpec, config: EngineConfig, device: torch.device) -> dict[str, Any]:
    """A model's parameters, drawn and packed on the device. Norms are 1 or, with an offset, 0."""
    platform, needs = detect_platform(device.type), Needs(getattr(torch, config.dtype), config.block_size)
    packing = select_packing(platform, needs, config.quantization, config.quantization_group, device=device)
    source = torch.Generator(device).manual_seed(0)
    parameters: dict[str, Any] = {}
    for parameter in spec.parameters:
        if parameter.kind == "vector":
            value = 0.0 if spec.norm_offset or parameter.name.endswith("bias") else 1.0
            parameters[parameter.name] = torch.full(parameter.shape, value, dtype=needs.dtype, device=device)
            continue
        packer = packing(parameter.shape, parameter.kind, parameter.experts)
        rows, width = parameter.shape[0], parameter.shape[1]
        step = max(PIECE // width // 16 * 16, 16)  # a multiple of 16, as every packing requires
        for start in range(0, rows, step):
            piece = torch.empty(min(step, rows - start), width, dtype=needs.dtype, device=device)
            packer.put(start, piece.normal_(0.0, SPREAD, generator=source))
        parameters[parameter.name] = packer.finish()
    return parameters


def mean_context(case: Case) -> float:
    """The mean context of a sequence over the decode steps of a case."""
    return case.prompt_len + case.output_len / 2
