"""Loads runners on a device: measured memory, the resulting KV cache, warm-up, and tokens equal to a CPU runner's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from penstock.config import ConfigError, DoesNotFit, EngineConfig, RankPlace
from penstock.config.memory import gpu_budget
from penstock.kernels import Needs, Platform, select_kernels
from penstock.messages import NewSequence, SamplingParams, StepPlan, StepResult, Work
from penstock.runtime.loading import gpu as load_device
from penstock.runtime.loading.cpu import load_cpu_runner
from penstock.runtime.loading.device_memory import CudaMemory, MemoryUsage
from penstock.runtime.loading.gpu import load_gpu_runner
from penstock.runtime.loading.identity import identify, machine
from penstock.runtime.loading.load import load_runner
from penstock.runtime.loading.warmup import blocks_for_warm_up, warm_up_all_sizes
from penstock.weights.digest import WeightsDigest
from tests.runtime.mirror_device import PLAIN, load_mirror

Checkpoint = Callable[..., Path]
HERE = torch.device("cpu")
MIB = 1 << 20


class Memory:
    """A fake device memory of 8 GiB: the context takes 100 MiB, steps take `steps`."""

    def __init__(self, steps: int = 64 * MIB, others: int = 0) -> None:
        self.steps = steps
        self.others = others
        self.released = 0

    def usage(self) -> MemoryUsage:
        total, reserved = 8 << 30, 32 * MIB
        return MemoryUsage(total, total - reserved - self.others - 100 * MIB, reserved, 16 * MIB, reserved + self.steps)

    def release_unused(self) -> None:
        self.released += 1


def config(folder: Path, **changes: Any) -> EngineConfig:
    settings = {"max_model_len": 128, "max_num_seqs": 5, "max_num_batched_tokens": 48, "dtype": "float32", "depth": 2}
    return EngineConfig(model=str(folder), name="tiny", device="cuda", **{**settings, **changes})


def rows_of(runner: Any) -> dict[str, int]:
    return {row.name: row.bytes for row in runner.capacity.memory}


def first_tokens(runner: Any) -> list[tuple[int, ...]]:
    """Returns the first tokens of prompts of several lengths, each decoded in its own step."""
    greedy, groups = SamplingParams(seed=0, max_tokens=4, temperature=0.0), len(runner.capacity.groups)
    new = tuple(
        NewSequence(i, tuple(range(5, 8 + 4 * i)), 3 + 4 * i, 0, ((1 + 2 * i, 2 + 2 * i),) * groups, greedy, 0)
        for i in range(3)
    )
    prompts: StepResult = runner.execute(StepPlan(1, tuple(Work(n.seq, n.num_prompt, True) for n in new), new))
    work = tuple(Work(n.seq, 1, True) for n in new)
    decode: StepResult = runner.execute(StepPlan(2, work))
    return [a.token_ids + b.token_ids for a, b in zip(prompts.results, decode.results, strict=True)]


@pytest.mark.parametrize("variant", ["qwen3", "gemma3", "qwen2_moe"])
def test_it_computes_what_a_cpus_runner_does(tiny_checkpoint: Checkpoint, variant: str) -> None:
    settings = config(tiny_checkpoint(variant))
    runner = load_mirror(settings, Memory(), progress=False)
    host = load_cpu_runner(replace(settings, device="cpu", depth=1, kv_cache_bytes=8 * MIB, threads=1), progress=False)
    assert runner.capacity.depth == 2
    assert [group.window for group in runner.capacity.groups] == [group.window for group in host.capacity.groups]
    assert first_tokens(runner) == first_tokens(host)
    runner.close()


def test_memory_is_what_was_measured_and_the_pool_has_the_rest(tiny_checkpoint: Checkpoint) -> None:
    memory = Memory()
    settings = config(tiny_checkpoint("qwen3"), kv_cache_bytes=4 * MIB)
    runner = load_mirror(settings, memory, progress=False)
    rows = rows_of(runner)
    assert list(rows) == ["weights", "KV cache", "activations", "runtime", "graphs", "free"]
    assert rows["KV cache"] == runner.pages.bytes <= 4 * MIB
    assert rows["runtime"] == 100 * MIB
    assert 0 < rows["activations"] < 96 * MIB  # the peak, less weights and pages
    assert memory.released == 2
    more = rows_of(load_mirror(settings, Memory(steps=80 * MIB), progress=False))
    assert more["activations"] == rows["activations"] + 16 * MIB
    assert more["free"] == rows["free"] - 16 * MIB


def test_what_others_hold_is_not_there(tiny_checkpoint: Checkpoint) -> None:
    settings = config(tiny_checkpoint("qwen3"), enforce_eager=True)
    with pytest.raises(DoesNotFit, match=r"need .*, and .* are available"):
        load_mirror(settings, Memory(others=8 << 30), progress=False)
    rows = rows_of(load_mirror(settings, Memory(others=1 << 30), progress=False))
    assert rows["runtime"] == (1 << 30) + 100 * MIB and "graphs" not in rows


def test_steps_that_take_more_than_there_is_are_refused_with_the_setting(tiny_checkpoint: Checkpoint) -> None:
    settings = config(tiny_checkpoint("qwen3"))
    budget = gpu_budget(8 << 30, settings)
    with pytest.raises(DoesNotFit, match=r"; set --gpu-memory-utilization 0\.95"):
        load_mirror(settings, Memory(steps=budget), progress=False)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("load_parameters", ["while weights were read", "set --quantization int4"]),
        ("warm_up_all_sizes", ["while steps were measured", "set --max-num-batched-tokens 24 or less"]),
        ("warm_up_one_sequence", ["while graphs were captured", "set --gpu-memory-utilization 0.85 or less"]),
    ],
)
def test_memory_that_runs_out_names_when_and_the_remedy(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, function: str, words: list[str]
) -> None:
    def out_of_memory(*arguments: object, **keywords: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(load_device, function, out_of_memory)
    with pytest.raises(DoesNotFit) as caught:
        load_mirror(config(tiny_checkpoint("qwen3")), Memory(), progress=False)
    assert all(word in str(caught.value) for word in ["8.00 GiB ran out", *words]), str(caught.value)


def test_what_does_not_fit_is_refused_before_weights_are_read(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_checkpoint("qwen3") / "config.json").read_text())
    with pytest.raises(DoesNotFit, match="--kv-cache-memory"):
        load_mirror(config(tmp_path, kv_cache_bytes=1 << 10), Memory(), progress=False)


class Recorder:
    """A runner that records its plans."""

    def __init__(self, runner: Any) -> None:
        self.capacity = runner.capacity
        self.runner = runner
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        result: StepResult = self.runner.execute(plan)
        return result


def test_a_rehearsal_has_every_size_of_step_and_leaves_nobody(tiny_checkpoint: Checkpoint) -> None:
    settings = config(tiny_checkpoint("qwen3"))
    runner = Recorder(load_mirror(settings, Memory(), progress=False))
    assert runner.capacity.groups[0].num_blocks >= blocks_for_warm_up(settings)
    warm_up_all_sizes(runner, settings)
    steps = [tuple(work.count for work in plan.work) for plan in runner.plans]
    assert {(1,) * count for count in (1, 2, 4, 5)} <= set(steps)
    assert {(count,) for count in (1, 2, 4, 8, 16, 32, 48)} <= set(steps)
    largest = next(plan for plan in runner.plans if tuple(w.count for w in plan.work) == (10, 10, 10, 9, 9))
    assert all(new.sampling.top_k and new.sampling.logprobs and new.sampling.prompt_logprobs for new in largest.new)
    assert {new.seq for plan in runner.plans for new in plan.new} == {seq for p in runner.plans for seq in p.gone}
    for plan in runner.plans:  # nobody writes where another does, or to the null block
        ids = [block for new in plan.new for block in new.blocks[0]]
        assert len(set(ids)) == len(ids) and 0 not in ids
    assert len(first_tokens(runner)) == 3


def test_a_rehearsal_has_the_step_with_most_rows_of_logits(tiny_checkpoint: Checkpoint) -> None:
    settings = config(tiny_checkpoint("qwen3"), **SPECULATION)
    runner = Recorder(load_mirror(settings, Memory(), progress=False))
    warm_up_all_sizes(runner, settings)
    counts = [[len(work.draft_ids) for work in plan.work if work.sample] for plan in runner.plans]
    assert sum(max(counts, key=sum)) == settings.max_step_drafts == 32
    assert [7, 7, 6, 6, 6] in counts and len(first_tokens(runner)) == 3


SPECULATION = {"depth": 1, "speculation": "ngram", "num_speculative_tokens": 7}


@pytest.mark.parametrize(
    "changes",
    [
        {"max_model_len": 1},
        {"max_model_len": 3, "block_size": 1},
        {"max_num_seqs": 1},
        {"block_size": 64},
        {"max_model_len": 1, **SPECULATION},
        {"max_model_len": 3, "block_size": 1, **SPECULATION},
        {"max_num_seqs": 1, **SPECULATION},
        {"max_num_seqs": 48, **SPECULATION},
    ],
)
def test_a_rehearsal_keeps_within_narrow_limits(tiny_checkpoint: Checkpoint, changes: dict[str, Any]) -> None:
    settings = config(tiny_checkpoint("llama3"), **changes)
    runner = Recorder(load_mirror(settings, Memory(), progress=False))
    warm_up_all_sizes(runner, settings)
    for plan in runner.plans:
        assert len(plan.work) <= settings.max_num_seqs
        assert sum(work.count for work in plan.work) <= settings.max_num_batched_tokens
        assert all(new.num_prompt <= settings.max_model_len for new in plan.new)


@pytest.mark.parametrize("quantization", ["none", "fp8", "int4"])
def test_the_identity_tells_weights_on_a_device_apart(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    gpu = Platform("cuda", "9.0")
    found = []
    for seed, deterministic in ((0, False), (0, False), (1, False), (0, True)):
        folder = tiny_checkpoint("llama3", seed=seed)
        settings = config(folder, quantization=quantization, deterministic=deterministic)
        spec = load_device.load_spec(folder)
        needs = Needs(torch.float32, 16, (16,), deterministic)
        found.append(identify(spec, WeightsDigest(folder), settings, gpu, select_kernels(gpu, needs)))
    assert found[0] == found[1] and len(set(found)) == 3
    assert "NVIDIA H200" in json.loads(found[0].numerics)["machine"]


def test_threads_change_no_bit_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    kernels = select_kernels(PLAIN, Needs(torch.float32))
    gpu = Platform("cuda", "9.0")
    before, host = machine(gpu, kernels), machine(PLAIN, kernels)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert machine(gpu, kernels) == before and machine(PLAIN, kernels) != host
    finally:
        torch.set_num_threads(threads)


def test_a_gpus_memory_is_read_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    figures = {"memory_reserved": 7, "memory_allocated": 5, "max_memory_reserved": 9, "mem_get_info": (60, 100)}
    for name in (*figures, "synchronize", "empty_cache", "reset_peak_memory_stats"):

        def call(*device: object, name: str = name) -> object:
            calls.append(name)
            return figures.get(name)

        monkeypatch.setattr(torch.cuda, name, call)
    memory = CudaMemory(torch.device("cuda", 0))
    assert memory.usage() == MemoryUsage(total=100, free=60, reserved=7, allocated=5, peak=9)
    assert calls[0] == "synchronize"
    calls.clear()
    memory.release_unused()
    assert calls == ["synchronize", "empty_cache", "reset_peak_memory_stats"]


@pytest.mark.parametrize("error", [RuntimeError, AssertionError])
def test_without_a_gpu_loading_says_what_torch_says(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def init() -> None:
        raise error("Found no NVIDIA driver on your system. Please check that you have one")

    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(
        ConfigError, match="but torch finds no GPU: Found no NVIDIA driver on your system; set --device"
    ):
        load_runner(config(tiny_checkpoint("qwen3")))


def test_a_rank_whose_memory_does_not_do_says_which_it_is(tiny_checkpoint: Checkpoint) -> None:
    settings = config(tiny_checkpoint("qwen3"), tensor_parallel_size=2)
    with pytest.raises(DoesNotFit, match=r"^rank 1 of 2: the model does not fit: weights .* are available"):
        load_mirror(settings, Memory(others=8 << 30), RankPlace(settings.split, 1), "127.0.0.1:1", progress=False)


def test_a_rank_takes_the_gpu_of_its_number_on_its_machine(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[object] = []

    def load_device_runner(config: EngineConfig, device: torch.device, *others: object, **more: object) -> None:
        taken.append((device, others[2:]))

    monkeypatch.setattr(load_device, "load_device_runner", load_device_runner)
    monkeypatch.setattr(load_device, "detect_platform", lambda device: PLAIN)
    monkeypatch.setattr(load_device, "CudaDevice", lambda where: where)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    settings = config(tiny_checkpoint("qwen3"), tensor_parallel_size=2, pipeline_parallel_size=2)
    place = RankPlace(settings.split, 3)
    load_gpu_runner(settings, place, "there:1", (1, 2))
    second = torch.device("cuda", 1)
    assert taken == [second, (second, (place, "there:1"))]
    with pytest.raises(ConfigError, match="4 ranks of this machine need a GPU each, and it has 2: set a smaller"):
        load_gpu_runner(settings, place, "there:1", (3, 4))
