"""`penstock plan` of models that are divided, on hardware that is only named."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import RunCommand

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 80,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    return str(tmp_path)


def test_a_split_is_planned_on_hardware_that_is_elsewhere(run_command: RunCommand, model: str, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    flags = ("--hardware", "8xH100", "--link", "100GB/s", "--tensor-parallel-size", "8", "--json", str(out))
    done = run_command("plan", model, *flags)
    assert done.returncode == 0, done.stderr
    assert "Splits on 8xH100: 80.00 GiB, 3350 GB/s, link 100 GB/s each" in done.stdout
    plan = json.loads(out.read_text())
    splits: dict[tuple[int, int], dict[str, Any]] = {
        (split["tensor_parallel_size"], split["pipeline_parallel_size"]): split for split in plan["splits"]
    }
    # 141 GB of weights: 80 GiB do not hold them, so two ranks are the fewest.
    assert set(splits) == {(2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (8, 1), (4, 2), (2, 4), (1, 8)}
    assert [split["asked"] for split in splits.values()].count(True) == 1
    asked = splits[8, 1]
    assert asked["asked"] and len(asked["memory_by_rank"]) == 8
    assert plan["memory"] == asked["memory_by_rank"][0]
    decode = asked["decode"]
    each = [161 * 8192 * 2 + (0 if rank == 0 else 16032 * 4) for rank in range(8)]
    assert [sum(rank.values()) for rank in decode["moved_by_rank"]] == each
    assert decode["moved_bytes"] == sum(each)
    assert decode["link_seconds"] == pytest.approx((7 * 161 * 8192 * 2 + 7 * 16032 * 4) / 100e9)
    assert decode["memory_seconds"] == pytest.approx(70.55e9 * 2 / 8 / 3350e9, rel=0.02)
    assert splits[1, 2]["decode"]["moved_bytes"] == 8192 * 2


def test_a_gpu_that_is_elsewhere_is_planned_with_fp8_and_what_cuda_takes(
    run_command: RunCommand, model: str, tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    flags = ("--hardware", "H200", "--quantization", "fp8", "--kv-cache-dtype", "fp8", "--max-model-len", "8192")
    done = run_command("plan", model, *flags, "--gpu-memory-utilization", "0.8", "--json", str(out))
    assert done.returncode == 0, done.stderr
    plan = json.loads(out.read_text())
    rows = {row["name"]: row["bytes"] for row in plan["memory"]}
    assert rows["weights"] == pytest.approx(70.55e9, rel=0.01)
    assert rows["runtime"] > 0 and rows["graphs"] > 0
    assert sum(rows.values()) == int(141e9 * 0.8)
    assert plan["settings"]["device"] == {"value": "cuda", "from": "default: there is H200"}
    token = 80 * 2 * 8 * (128 + 4)  # a byte for each element, and a scale for each head
    assert rows["KV cache"] == plan["num_blocks"][0] * 16 * token


def test_figures_are_a_cpus_unless_told_otherwise(run_command: RunCommand, model: str, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    flags = ("--hardware", "2x141GB:4.8GB/s:3GB/s", "--tensor-parallel-size", "2", "--json", str(out))
    found = []
    for more in ((), ("--device", "cuda")):
        done = run_command("plan", model, *flags, *more)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(out.read_text())["settings"]["device"]["value"])
    assert found == ["cpu", "cuda"]


def test_threads_of_the_split_asked_for_do_not_hide_others(run_command: RunCommand, tmp_path: Path) -> None:
    found = []
    for flags in ((), ("--threads", str(len(os.sched_getaffinity(0))))):
        done = run_command("plan", "--json", str(tmp_path / "plan.json"), *flags)
        assert done.returncode == 0, done.stderr
        splits = json.loads((tmp_path / "plan.json").read_text())["splits"]
        found.append([(split["tensor_parallel_size"], split["pipeline_parallel_size"]) for split in splits])
    assert found[0] == found[1]


def test_where_the_model_does_not_fit_the_splits_that_do_are_shown(run_command: RunCommand, model: str) -> None:
    done = run_command("plan", model, "--hardware", "8xH100")
    assert done.returncode == 2
    assert "TP=2" in done.stdout and "one rank" not in done.stdout
    assert "* bfloat16" in done.stdout and "does not fit" in done.stdout
    assert "the model does not fit" in done.stderr and done.stderr.strip().endswith(
        "or one of the quantisations or splits above"
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--hardware", "8xFoo"), "'8xFoo' is not known: name A100"),
        (("--hardware", "8xH100", "--tensor-parallel-size", "3"), "does not divide the 8 KV heads: use 1, 2, 4 or 8"),
        (
            ("--hardware", "4xH100", "--tensor-parallel-size", "8"),
            "TP=8 takes 8 ranks, but 4xH100 has 4: set --hardware with more",
        ),
        (("--hardware", "8xH100", "--link", "fast"), "--link: 'fast' is no speed"),
        (("--hardware", "8xH100", "--device", "cpu"), "--device (command line) is cpu, but the hardware is 8xH100"),
        (("--hardware", "2xA100", "--quantization", "fp8"), "2xA100 has 8.0; set --quantization int8"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    run_command: RunCommand, model: str, flags: tuple[str, ...], words: str
) -> None:
    done = run_command("plan", model, *flags)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_quantisations_are_compared(run_command: RunCommand, tiny_checkpoint: Any, tmp_path: Path) -> None:
    """Their figures are those of a plan of each by itself."""
    model, out = str(tiny_checkpoint("qwen3", dtype="bfloat16")), tmp_path / "plan.json"
    done = run_command("plan", model, "--json", str(out), "--kv-cache-memory", "1MiB", "--max-model-len", "64")
    assert done.returncode == 0 and "* bfloat16" in done.stdout, done.stderr
    rows = {(row["quantization"], row["kv_cache_dtype"]): row for row in json.loads(out.read_text())["quantizations"]}
    assert set(rows) == {(weights, pages) for weights in ("none", "int8", "int4") for pages in ("auto", "int8")}
    for (weights, pages), row in rows.items():
        flags = ("--quantization", weights, "--kv-cache-dtype", pages, "--kv-cache-memory", "1MiB")
        assert run_command("plan", model, "--json", str(out), *flags, "--max-model-len", "64").returncode == 0
        alone = json.loads(out.read_text())
        assert row["weights_bytes"] == alone["memory"][0]["bytes"]
        (split,) = [split for split in alone["splits"] if split["asked"]]
        assert (row["kv_tokens"], row["decode_read_bytes"]) == (split["kv_tokens"], split["decode"]["read_bytes"])
    assert rows["none", "int8"]["kv_tokens"] > 1.5 * rows["none", "auto"]["kv_tokens"]
    assert rows["int4", "auto"]["weights_bytes"] < rows["int8", "auto"]["weights_bytes"]


def test_a_file_that_is_quantised_already_has_no_choice(run_command: RunCommand, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    assert run_command("plan", "smollm2-135m", "--json", str(out)).returncode == 0
    plan = json.loads(out.read_text())
    assert plan["quantizations"] == [] and plan["types"][0]["type"] == "Q4_1"
    assert 1e9 < plan["hardware"]["bandwidth"] < 5e12
