"""`penstock quantize`: what it writes, what it says, and that an interrupted run ends with the same bytes."""

import json
import math
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.gguf import read_gguf
from penstock.quantize.job import STATE
from penstock.quantize.texts import class_texts
from penstock.text import Tokenizer
from penstock.weights.packaged import embedded_model
from tests.cli.conftest import RunCommand
from tests.cli.quantize.decoded import decoded_tensors, mean_nats, transformers_model
from tests.often import often

MODEL = str(embedded_model())
LAYERS = 2
FEW = ("--windows", "8", "--threads", "1")


def made(run: RunCommand, out: Path, *flags: str, model: str = MODEL) -> dict[str, Any]:
    file = out.with_name(f"{out.name}.json")
    done = run("quantize", model, str(out), *FEW, "--json", str(file), *flags)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(file.read_text())
    result["said"] = done.stdout
    assert str(out) in done.stdout and "bits a weight" in done.stdout
    assert not out.with_name(f"{out.name}.partial").exists()
    return result


@pytest.fixture(scope="module")
def short_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first two layers of the embedded model: a layer takes seconds."""
    from safetensors.torch import load_file, save_file

    folder: Path = tmp_path_factory.mktemp("short") / "model"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS, "max_window_layers": LAYERS}))
    left_out = tuple(f"model.layers.{layer}." for layer in range(LAYERS, config["num_hidden_layers"]))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(left_out)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def all_bytes(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(path.iterdir())
    return {file.name if path.is_dir() else "": file.read_bytes() for file in files}


@pytest.mark.long
def test_the_table_is_what_transformers_measures(run_command: RunCommand, short_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    result = made(run_command, tmp_path / "out", "--scheme", "int4", model=str(short_model))
    rows = {row["class"]: row for row in result["table"]}
    assert list(rows) == ["prose", "code", "arithmetic", "JSON", "all"]
    tokenizer, windows = Tokenizer.load(MODEL), []
    for name, text in class_texts().items():
        ids = tokenizer.encode(text(), add_special_tokens=False)
        windows.append([ids[i * 512 : i * 512 + 512] for i in range(8)])
        assert rows[name]["tokens"] == 8 * 511
    quantized = transformers_model(tmp_path / "out")
    original = AutoModelForCausalLM.from_pretrained(
        short_model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for model, key in ((quantized, "perplexity"), (original, "base_perplexity")):
        assert math.exp(mean_nats(model, windows[1])) == pytest.approx(rows["code"][key], rel=2e-3)
    assert 0 < rows["code"]["change_percent"] < 8 and 0 < rows["code"]["kl"] < 0.1
    assert 0.8 < rows["all"]["agreement"] < 1
    methods = {choice["method"].rpartition("+")[2] for choice in result["choices"]}
    assert methods <= {"gptq", "gptq-ordered", "mse"} and len(result["choices"]) == LAYERS * 4
    assert "same token" in result["said"] and f"{rows['code']['perplexity']:,.3f}" in result["said"]


@pytest.mark.parametrize(
    "flags",
    [
        ("--scheme", "int4", "--zero-points", "--group", "96", "--method", "gptq"),
        ("--scheme", "int8", "--group", "0", "--method", "rtn"),
        ("--scheme", "int4", "--format", "gptq", "--method", "mse"),
        ("--scheme", "int3", "--method", "gptq", "--zero-points"),
        ("--scheme", "w8a8", "--method", "mse"),
        ("--scheme", "fp8", "--method", "rtn"),
    ],
    ids=" ".join,
)
def test_codes_in_the_file_are_near_the_weights(
    run_command: RunCommand, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    from safetensors.torch import load_file

    from tests.weights.quantised.writers import write_floats

    model = str(write_floats(tmp_path / "model", tie_word_embeddings=True))
    made(run_command, tmp_path / "out", "--no-table", "--keep", "*.1.mlp.down_proj", *flags, model=model)
    found, original = decoded_tensors(tmp_path / "out"), load_file(Path(model) / "model.safetensors")
    assert found.keys() == original.keys()
    bits = {"int8": 8, "int4": 4, "int3": 3}.get(flags[1], 6)
    for name, tensor in original.items():
        difference = (found[name] - tensor.float()).square().mean().sqrt() / tensor.float().square().mean().sqrt()
        exact = "norm" in name or "embed" in name or "1.mlp.down" in name
        assert difference == 0 if exact else 0 < difference < 4 * 2.0**-bits, (name, difference)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    ignored = config.get("ignore") or [name[2:] for name in config["dynamic"]]
    assert "model.layers.1.mlp.down_proj" in ignored
    assert Tokenizer.load(tmp_path / "out").encode("def f():") == Tokenizer.load(model).encode("def f():")


def test_the_bar_is_full_when_all_is_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from penstock.cli.models import quantize as command
    from tests.weights.quantised.writers import write_floats

    bars: list[tuple[int, list[int]]] = []

    @contextmanager
    def recorded(what: str, total: int) -> Iterator[Callable[[int], None]]:
        bars.append((total, []))
        yield bars[-1][1].append

    monkeypatch.setattr(command, "work_progress", recorded)
    monkeypatch.setattr(command, "CHECKED", 1)
    monkeypatch.setattr(command, "WINDOW_TOKENS", 64)
    model, threads = write_floats(tmp_path / "model"), torch.get_num_threads()
    options = command.QuantizeOptions("int4", None, False, None, "rtn", "builtin", 1, None, table=True, threads=1)
    try:
        command.quantize(str(model), str(tmp_path / "out"), options, None)
    finally:
        torch.set_num_threads(threads)
    ((total, steps),) = bars
    windows = 4 * command.CHECKED
    assert sum(steps) == total > windows and sum(steps[-windows:]) == windows


# Small changes make the router of random weights choose other experts.
NEAR = {"mixtral": 0.05, "gemma2": 2e-3, "phi3": 2e-3, "deepseek_v2": 0.05}


@pytest.mark.parametrize("variant", often(NEAR, ["mixtral", "gemma2"]))
def test_mixtures_and_other_layouts_are_quantised(
    run_command: RunCommand, tmp_path: Path, tiny_checkpoint: Callable[..., Path], variant: str
) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    folder, out = tiny_checkpoint(variant), tmp_path / variant
    result = made(run_command, out, "--scheme", "int8", "--group", "0", model=str(folder))
    assert result["table"][-1]["kl"] < NEAR[variant]
    assert all(choice["error"] is not None for choice in result["choices"]), "each was measured, every expert too"
    found, original = decoded_tensors(out), load_file(folder / "model.safetensors")
    assert found.keys() == original.keys()
    assert sum(not torch.equal(found[name], original[name].float()) for name in found) >= 10
    AutoModelForCausalLM.from_pretrained(folder)


def gguf_source(model: str | Path, folder: Path) -> Path:
    """A model as a GGUF file in F32."""
    from safetensors.torch import load_file, save_file

    from tests.gguf_models import write_gguf

    floats = folder / "fp32"
    shutil.copytree(model, floats)
    tensors = load_file(floats / "model.safetensors")
    save_file({name: tensor.float() for name, tensor in tensors.items()}, floats / "model.safetensors")
    return write_gguf(floats, folder / "model-f32.gguf", kind="F32")


@pytest.mark.long
@pytest.mark.parametrize(
    "kinds",
    [
        [("Q8_0", 8.6, "rtn")],
        pytest.param([("Q4_K_M", 5.5, "gptq"), ("Q4_0", 5.3, "mse")], marks=pytest.mark.rare),
    ],
)
def test_gguf_files_are_read_by_the_engine_and_as_good_as_the_table_says(
    run_command: RunCommand, short_model: Path, tmp_path: Path, kinds: list[tuple[str, float, str]]
) -> None:
    source, changes = gguf_source(short_model, tmp_path), {}
    for kind, bits, method in kinds:
        out = tmp_path / f"{kind}.gguf"
        result = made(run_command, out, "--scheme", f"gguf:{kind}", "--method", method, model=str(source))
        row = result["table"][-1]
        changes[kind] = row["change_percent"]
        file = read_gguf(out)
        assert (
            file.file_type == kind
            and file.metadata["tokenizer.ggml.tokens"] == read_gguf(source).metadata["tokenizer.ggml.tokens"]
        )
        parameters = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
        assert 8 * sum(tensor.size for tensor in file.tensors.values()) / parameters < bits
        done = run_command(
            *("bench", "quality", str(out), "--against", str(source), "--dtype", "float32", "--windows", "8"),
            *("--json", str(tmp_path / "against.json"), "--kv-cache-memory", "64MiB"),
        )
        assert done.returncode == 0, done.stderr
        [*_, ours] = json.loads((tmp_path / "against.json").read_text())["results"]
        assert ours["perplexity"] == pytest.approx(row["perplexity"], rel=5e-3)
        assert ours["base_perplexity"] == pytest.approx(row["base_perplexity"], rel=1e-3)
    assert abs(changes.get("Q8_0", 0.0)) < 0.5
    assert "Q4_0" not in changes or changes["Q4_K_M"] < changes["Q4_0"]


@pytest.mark.long
@pytest.mark.parametrize("to_gguf", [False, pytest.param(True, marks=pytest.mark.rare)])
def test_a_run_that_is_killed_goes_on_to_the_same_bytes(
    tmp_path: Path, to_gguf: bool, tiny_checkpoint: Callable[..., Path]
) -> None:
    folder = tiny_checkpoint("qwen3")
    model, suffix, flags = str(folder), "", ("--scheme", "int4", "--group", "16")
    if to_gguf:
        from tests.gguf_models import write_gguf

        model = str(write_gguf(folder, tmp_path / "source.gguf", kind="F32"))
        suffix, flags = ".gguf", ("--scheme", "gguf:Q4_0", "--method", "gptq")

    def start(out: Path, threads: int = 1) -> subprocess.Popen[bytes]:
        command = (sys.executable, "-m", "penstock", "quantize", model, str(out), *FEW[:-1], str(threads), *flags)
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    whole, killed = tmp_path / f"whole{suffix}", tmp_path / f"killed{suffix}"
    assert start(whole).wait(timeout=300) == 0
    state, draw = tmp_path / f"{killed.name}.partial" / STATE, random.Random(5)
    for threads in (1, 2):  # at random times after the state has changed
        before = state.stat().st_mtime_ns if state.exists() else 0
        process = start(killed, threads)
        while process.poll() is None and (not state.exists() or state.stat().st_mtime_ns == before):
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert not killed.exists()
    assert start(killed, threads=3).wait(timeout=300) == 0
    assert all_bytes(killed) == all_bytes(whole)


def test_another_run_is_not_mixed_with_this_one(run_command: RunCommand, tmp_path: Path) -> None:
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    partial.mkdir()
    (partial / "settings.json").write_text("{}")
    (partial / STATE).write_bytes(b"")
    done = run_command("quantize", MODEL, str(out), "--method", "rtn", "--no-table")
    assert done.returncode != 0 and "out.partial has parts of a run with other options" in done.stderr
    (partial / "settings.json").unlink()
    made(run_command, out, "--method", "rtn", "--no-table")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--scheme", "int5"), ("--scheme is 'int5'", "int8, int4, int3")),
        (("--method", "best"), ("--method is 'best'", "auto, rtn")),
        (("--scheme", "int3", "--format", "compressed-tensors"), ("does not hold --scheme int3", "--format gptq")),
        (("--scheme", "w8a8", "--group", "32"), ("--group has no effect", "leave it out")),
        (("--group", "100"), ("--group is 100", "32, 64 or 128")),
        (("--group", "192"), ("--group 192 does not divide the 256 columns", "--group 256, 128")),
        (("--scheme", "gguf:Q4_K_M"), ("makes a file", ".gguf")),
        (("--keep", "*.nothing"), ("--keep *.nothing fits no matrix", "self_attn.q_proj")),
        (("--keep", "*"), ("--keep * leaves no matrix",)),
        (("--calibration", "missing.txt"), ("--calibration missing.txt", "UTF-8 text")),
        (("--json", "no-such-folder/x.json"), ("--json", "no-such-folder")),
    ],
)
def test_a_mistake_is_one_clear_line(
    run_command: RunCommand, tmp_path: Path, flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = run_command("quantize", MODEL, str(tmp_path / "out"), *flags)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("penstock: ")]
    for word in words:
        assert word in line
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_models_and_outputs_that_do_not_fit_are_refused(
    run_command: RunCommand, tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    (tmp_path / "there").mkdir()
    source = gguf_source(MODEL, tmp_path)
    for model, out, flags, words in (
        (MODEL, "there", (), "is there already"),
        (MODEL, "x.gguf", ("--scheme", "gguf:Q8_0"), "a GGUF file of it in F16 or BF16"),
        (str(source), "x", (), "name a folder in safetensors"),
        (str(tiny_checkpoint("granite_4_hybrid")), "x", ("--group", "16"), "use --method mse --no-table"),
    ):
        done = run_command("quantize", model, str(tmp_path / out), *flags)
        assert done.returncode != 0 and words in done.stderr, done.stderr
    made(run_command, tmp_path / "out", "--method", "rtn", "--no-table")
    done = run_command("quantize", str(tmp_path / "out"), str(tmp_path / "again"))
    assert done.returncode != 0 and "Traceback" not in done.stderr


def test_weights_that_are_not_finite_name_the_tensor(run_command: RunCommand, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "broken"
    shutil.copytree(MODEL, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    done = run_command("quantize", str(folder), str(tmp_path / "out"), "--method", "mse", "--no-table")
    assert done.returncode != 0 and "model.layers.2.mlp.up_proj.weight" in done.stderr and "not finite" in done.stderr
