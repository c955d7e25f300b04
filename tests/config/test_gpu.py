"""GPUs: what the driver says of them, which settings they take, and what a model takes there."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.config import (
    ConfigError,
    DoesNotFit,
    EngineConfig,
    Hardware,
    Resolved,
    read_settings,
    resolve,
    size_memory,
)
from penstock.config.graphs import MAX_GRAPH_SEQS, graph_sizes
from penstock.config.machine.devices import this_machine
from penstock.config.machine.gpu import Gpu, detect_gpu, torch_has_cuda, with_gpu
from penstock.config.memory import CONTEXT_BYTES, GRAPH_BYTES, gpu_budget, token_bytes
from penstock.config.weights import GGUF_FORMATS, WIDENED_BYTES, device_bytes, weights_bytes
from penstock.messages import MemoryRow
from tests.config.models import FULL, GIB, MIXED, SMALL, WINDOWED, machine
from tests.config.test_resolve import whole

H200 = Gpu(name="NVIDIA H200", memory=140 * GIB, capability="9.0")


class Driver:
    """libcuda of a machine with `count` GPUs; the call named `failing` gives an error."""

    def __init__(self, count: int = 1, failing: str = "") -> None:
        self.count = count
        self.failing = failing

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == self.failing:
                return 999
            self._answer(name, arguments)
            return 0

        return call

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> None:
        match name:
            case "cuDeviceGetCount":
                arguments[0]._obj.value = self.count
            case "cuDeviceGetName":
                ctypes.memmove(arguments[0], b"NVIDIA H200\0", 12)
            case "cuDeviceTotalMem_v2":
                arguments[0]._obj.value = 140 * GIB
            case "cuDeviceGetAttribute":
                arguments[0]._obj.value = {75: 9, 76: 0}[arguments[1]]


def test_the_driver_is_asked_for_the_first_gpu() -> None:
    assert detect_gpu(Driver()) == H200
    assert detect_gpu(Driver(count=8)) == replace(H200, count=8)
    assert detect_gpu(Driver(count=0)) is None


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGetCount", "cuDeviceGetName", "cuDeviceTotalMem_v2"])
def test_a_driver_that_fails_has_no_gpu(call: str) -> None:
    assert detect_gpu(Driver(failing=call)) is None


def test_whether_torch_was_built_for_cuda_is_told_by_its_folder(tmp_path: Path) -> None:
    assert not torch_has_cuda(tmp_path)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    assert torch_has_cuda(tmp_path)


def on(gpu: Gpu = H200, facts: Any = FULL, **flags: Any) -> Resolved:
    return resolve(read_settings(flags), whole(facts), with_gpu(machine(), gpu), folder="/models/tiny")


def test_defaults_of_a_gpu() -> None:
    resolved = on()
    engine = resolved.engine
    assert (engine.device, engine.depth, engine.gpu_memory_utilization) == ("cuda", 2, 0.9)
    assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (256, 2048)
    assert engine.kv_cache_bytes is None and not engine.enforce_eager and not engine.deterministic
    assert resolved.provenance["device"] == ("cuda", "default: there is NVIDIA H200")
    assert sum(row.bytes for row in resolved.memory.rows) == int(140 * GIB * 0.9)
    assert "0.9 of the GPU's" in resolved.memory.rows[-1].note


def test_auto_is_what_there_is() -> None:
    assert on(device="auto").engine.device == "cuda"
    cpu = resolve(read_settings({"device": "auto"}), whole(SMALL), machine(), folder="/models/tiny")
    assert cpu.engine.device == "cpu" and cpu.provenance["device"][1].startswith("default: there is no GPU")


def test_what_is_said_of_a_gpu_reaches_the_engine() -> None:
    said = {"gpu_memory_utilization": 0.5, "enforce_eager": True, "deterministic": True, "quantization": "fp8"}
    engine = on(device="cuda", kv_cache_dtype="fp8", **said).engine
    assert {name: getattr(engine, name) for name in said} == said
    assert engine.kv_dtype == "float8_e4m3fn"


def test_drafts_are_verified_with_one_plan_outstanding_if_a_method_is_named() -> None:
    for settings in ({}, {"speculation": "auto"}):
        resolved = on(**settings)
        assert (resolved.engine.speculation, resolved.engine.depth) == ("off", 2)
        assert "never measured on a GPU" in resolved.provenance["speculation"][1]
    engine = on(speculation="ngram").engine
    assert (engine.speculation, engine.num_speculative_tokens, engine.depth) == ("ngram", 31, 1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            {"kv_cache_dtype": "int8"},
            ["--kv-cache-dtype (command line) is int8", "NVIDIA H200", "set --kv-cache-dtype fp8"],
        ),
        ({"threads": 2}, ["--threads (command line) is 2", "NVIDIA H200", "leave it out"]),
        ({"device": "cpu"}, ["--device (command line) is cpu", "NVIDIA H200", "set --device cuda"]),
        (
            {"gpu_memory_utilization": 1.5},
            ["--gpu-memory-utilization (command line) is 1.5", "above 0 up to 1"],
        ),
        ({"gpu_memory_utilization": 0}, ["--gpu-memory-utilization", "above 0 up to 1"]),
    ],
)
def test_what_a_gpu_does_not_take_is_refused_with_the_remedy(flags: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        on(**flags)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"quantization": "fp8"}, ["--quantization (command line) is fp8", "a CPU", "set --quantization int8"]),
        ({"kv_cache_dtype": "fp8"}, ["--kv-cache-dtype (command line) is fp8", "a CPU", "set --kv-cache-dtype int8"]),
        ({"enforce_eager": True}, ["--enforce-eager (command line) is True", "a CPU", "leave it out"]),
        ({"gpu_memory_utilization": 0.5}, ["--gpu-memory-utilization", "0.5", "a CPU", "--kv-cache-memory"]),
        ({"device": "cuda"}, ["--device (command line) is cuda", "a CPU", "set --device cpu"]),
    ],
)
def test_what_only_a_gpu_takes_is_refused_on_a_cpu(flags: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(read_settings(flags), whole(SMALL), machine(), folder="/models/tiny")
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("flags", [{"deterministic": True}, {"enforce_eager": False}])
def test_what_changes_nothing_on_a_cpu_is_taken(flags: dict[str, Any]) -> None:
    assert resolve(read_settings(flags), whole(SMALL), machine(), folder="/models/tiny").engine.device == "cpu"


@pytest.mark.parametrize("setting", ["quantization", "kv_cache_dtype"])
def test_fp8_takes_a_gpu_that_multiplies_it(setting: str) -> None:
    old = Gpu(name="NVIDIA A100", memory=80 * GIB, capability="8.0")
    with pytest.raises(ConfigError, match=r"compute capability of 8\.9 .* NVIDIA A100 has 8\.0"):
        on(old, **{setting: "fp8"})
    assert getattr(on(Gpu(name="L4", memory=24 * GIB, capability="8.9"), **{setting: "fp8"}).engine, setting)
    assert on(old, quantization="int8").engine.quantization == "int8"


def test_sizes_of_graphs() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(3) == (1, 2, 3)
    assert graph_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert graph_sizes(256)[-2:] == (248, 256) and len(graph_sizes(256)) == 35
    assert graph_sizes(10_000)[-1] == MAX_GRAPH_SEQS == graph_sizes(MAX_GRAPH_SEQS)[-1]


def test_weights_lie_on_a_gpu_without_padding_but_of_codes() -> None:
    assert device_bytes(7, 40, "bf16", 32) == 7 * 40 * 2
    assert device_bytes(7, 40, "f32", 32, bias_size=4) == 7 * 40 * 4 + 7 * 4
    assert device_bytes(7, 40, "int8", 32) == device_bytes(7, 40, "fp8", 32) == 7 * 40 + 7 * 4
    assert device_bytes(7, 130, "int4", 64, bias_size=2) == 7 * (192 // 2 + 192 // 64 * 2) + 7 * 2
    assert device_bytes(7, 96, GGUF_FORMATS["Q8_0"], 0) == 7 * (128 + 4 * 2)
    assert device_bytes(7, 512, GGUF_FORMATS["Q4_K"], 0) == 7 * (256 + 16 * 2 + 2 * 4)
    assert device_bytes(7, 512, GGUF_FORMATS["Q6_K"], 0) == 7 * (512 + 32 + 2 * 2)


def engine(**changes: Any) -> EngineConfig:
    settings = {"max_model_len": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 512, **changes}
    return EngineConfig(model="m", name="m", device="cuda", **settings)


def test_a_known_model_in_fp8() -> None:
    """Qwen3-0.6B: a byte for each parameter, and a scale for each row."""
    matrices = sum(m.count * m.rows * m.columns for m in FULL.matrices)
    rows = sum(m.count * m.rows for m in FULL.matrices)
    assert weights_bytes(FULL, engine(quantization="fp8")) == matrices + 4 * rows + 2 * FULL.vector_elements
    assert token_bytes(FULL, engine(kv_cache_dtype="fp8")) == (28 * 2 * 8 * (128 + 4),)
    plan = size_memory(FULL, engine(quantization="fp8", kv_cache_dtype="fp8"), 16 * GIB)
    assert "fp8" in plan.rows[0].note and plan.rows[1].note.endswith(", fp8")


def test_a_context_and_graphs_take_their_part_and_the_pool_the_rest() -> None:
    config = engine(max_model_len=40_960)
    rows = {row.name: row.bytes for row in size_memory(FULL, config, 16 * GIB).rows}
    assert rows["runtime"] == CONTEXT_BYTES and rows["graphs"] > len(graph_sizes(64)) * GRAPH_BYTES
    assert rows["free"] < 16 * 114_688 < rows["KV cache"]
    eager = size_memory(FULL, replace(config, enforce_eager=True), 16 * GIB)
    assert "graphs" not in {row.name for row in eager.rows}
    assert eager.kv_bytes > rows["KV cache"]


@pytest.mark.parametrize(("sequences", "graphs"), [(64, 0), (65, WIDENED_BYTES)])
def test_codes_of_many_rows_are_widened_in_scratch_memory(sequences: int, graphs: int) -> None:
    """Steps outside CUDA graphs have theirs, and graphs have theirs if they decode so many sequences."""

    def bytes_of(name: str, **changes: Any) -> int:
        config = engine(max_num_seqs=sequences, **changes)
        return next(row.bytes for row in size_memory(FULL, config, 16 * GIB).rows if row.name == name)

    for name, more in (("activations", WIDENED_BYTES), ("graphs", graphs)):
        without = bytes_of(name, quantization="int8")
        assert bytes_of(name, quantization="int4") == without + more
        assert bytes_of(name, quantization="int4", deterministic=True) == without


def test_measured_rows_take_the_place_of_computed_ones() -> None:
    measured = (MemoryRow("weights", 2 * GIB), MemoryRow("activations", GIB), MemoryRow("runtime", GIB))
    plan = size_memory(FULL, engine(max_model_len=40_960), 16 * GIB, measured)
    assert [row.name for row in plan.rows] == ["weights", "KV cache", "activations", "runtime", "free"]
    assert sum(row.bytes for row in plan.rows) == 16 * GIB
    assert 12 * GIB - 16 * 114_688 <= plan.kv_bytes <= 12 * GIB


def test_the_budget_is_a_share_of_the_gpu() -> None:
    assert gpu_budget(80 * GIB, engine(gpu_memory_utilization=0.25)) == 20 * GIB


@given(
    facts=st.sampled_from([FULL, MIXED, WINDOWED, SMALL]),
    length=st.integers(1, 40_960),
    tokens=st.integers(1, 8192),
    extra=st.none() | st.integers(0, 4 * GIB),
    utilization=st.sampled_from([0.3, 0.9, 0.95]),
    total=st.integers(GIB, 24 * GIB),
)
def test_a_remedy_works_with_what_was_measured_too(
    facts: Any, length: int, tokens: int, extra: int | None, utilization: float, total: int
) -> None:
    config = engine(max_model_len=length, max_num_batched_tokens=tokens, gpu_memory_utilization=utilization)

    def sized(changed: EngineConfig) -> Any:
        """With measured rows that take `extra` more than computed ones, whatever the settings."""
        measured = None
        if extra is not None:
            plain = size_memory(facts, replace(changed, kv_cache_bytes=None), 1 << 50).rows
            first, *others = [row for row in plain if row.name not in ("KV cache", "free")]
            measured = (first, MemoryRow("more", extra), *others)
        return size_memory(facts, changed, gpu_budget(total, changed), measured)

    refusal = ""
    try:
        sized(config)
    except DoesNotFit as error:
        refusal = str(error)
    name, _, rest = refusal.partition("; set --")[2].partition(" ")
    if refusal and not name:
        assert "no single setting" in refusal
        return
    if name:
        kind = {"dtype": str, "quantization": str, "gpu-memory-utilization": float}.get(name, int)
        config = replace(config, **{name.replace("-", "_"): kind(rest.split()[0])})
    plan = sized(config)
    assert all(row.bytes >= 0 for row in plan.rows)


def test_this_machines_gpu_has_the_speeds_of_its_name() -> None:
    h200 = this_machine(with_gpu(machine(), H200))
    assert (h200.count, h200.bandwidth, h200.capability) == (1, 4800 * 10**9, "9.0")
    l40s = this_machine(with_gpu(machine(), Gpu(name="NVIDIA L40S", memory=48 * GIB, capability="8.9")))
    assert l40s.bandwidth == 864 * 10**9
    other = this_machine(with_gpu(machine(), Gpu(name="NVIDIA T400", memory=4 * GIB, capability="7.5")))
    assert other.memory == 4 * GIB and other.bandwidth < 10**11


@pytest.mark.parametrize("count", [1, 4])
def test_a_machine_of_gpus_is_one(count: int) -> None:
    hardware: Hardware = with_gpu(machine(), replace(H200, count=count))
    assert this_machine(hardware).count == count
    assert this_machine(hardware).machine(machine()) == replace(hardware, memory_available=140 * GIB)
