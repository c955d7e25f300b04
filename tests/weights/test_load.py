"""Parameters are what transformers loads, whatever the files' layout and dtype; and broken checkpoints are refused."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.core_model_loading import revert_weight_conversion

from penstock.config.weights import cpu_format
from penstock.families import ModelSpec, TensorSource, load_spec
from penstock.families.checkpoint.folder import tensors_of_folder
from penstock.families.checkpoint.stored import CheckpointError
from penstock.kernels import Needs, detect_platform, select_packing
from penstock.kernels.native.pack import pack
from penstock.weights import load, matrices, reads
from penstock.weights.load import load_parameters
from tests.checkpoints import VARIANTS, split_checkpoint, tiny_model
from tests.weights.files import edit

needs_native = pytest.mark.skipif(not detect_platform().isa, reason="no native kernels for this machine")
INT4_SIZE = 30 if detect_platform().isa == "amx" else 27  # MiB, with scales by column or of two levels
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def assembled(state: dict[str, torch.Tensor], spec: ModelSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What the parameters should be, from a transformers state dict."""

    def rows(source: TensorSource) -> torch.Tensor:
        stack, part, number = source.name.partition("[")
        return rows_of(state[stack][int(number[:-1])] if part else state[stack], source)

    return {p.name: torch.cat([rows(s) for s in p.sources]).to(dtype) for p in spec.parameters}


def rows_of(tensor: torch.Tensor, source: TensorSource) -> torch.Tensor:
    """What a source takes of its tensor."""
    rows = (tensor.T if source.transposed else tensor)[source.first_row : source.end_row : source.step]
    if source.columns:
        rows = rows[:, source.first_column : source.first_column + source.columns]
    if not source.order:
        return rows
    head = torch.cat([first + step * torch.arange(count) for first, count, step in source.order])
    return torch.cat([rows[start + head] for start in range(0, source.rows, len(head))])


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(want)
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and got[name].is_contiguous()
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_equal_the_model_transformers_wrote(tiny_checkpoint: Callable[..., Path], variant: str) -> None:
    folder = tiny_checkpoint(variant)
    spec = load_spec(folder)
    model = tiny_model(variant)
    state = revert_weight_conversion(model, model.state_dict())  # experts are one tensor in it, and apart on disk
    assert_equal(load_parameters(folder, spec, torch.float32), assembled(state, spec, torch.float32))


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_conversion_equals_tensor_to(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, stored: str, wanted: str
) -> None:
    monkeypatch.setattr(reads, "READ_BYTES", 1000)  # many reads, the last of each tensor shorter
    folder = tiny_checkpoint("llama_bias", dtype=stored)
    spec = load_spec(folder)
    assert spec.checkpoint_dtype == stored
    state = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in state.values()} == {DTYPES[stored]}
    assert_equal(load_parameters(folder, spec, DTYPES[wanted]), assembled(state, spec, DTYPES[wanted]))


def test_shards_load_as_one_file_does(tiny_checkpoint: Callable[..., Path]) -> None:
    one, three = tiny_checkpoint("qwen3"), tiny_checkpoint("qwen3", shards=3)
    assert len(list(three.glob("*.safetensors"))) == 3
    assert_equal(
        load_parameters(three, load_spec(three), torch.float32), load_parameters(one, load_spec(one), torch.float32)
    )


@pytest.fixture
def copy(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A checkpoint of its own, to break."""

    def of(variant: str, **options: object) -> Path:
        return Path(shutil.copytree(tiny_checkpoint(variant, **options), tmp_path / variant))

    return of


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_parameters(folder, load_spec(folder), torch.float32)
    return str(caught.value)


def test_a_tied_head_that_is_stored_all_the_same_is_skipped(copy: Callable[..., Path]) -> None:
    folder = copy("qwen2")
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "head.weight" not in load_parameters(folder, load_spec(folder), torch.float32)


def test_a_tied_head_that_differs_is_refused(copy: Callable[..., Path]) -> None:
    folder = copy("qwen2")
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    message = refusal(folder)
    assert "lm_head.weight is tied to model.embed_tokens.weight" in message and "tie_word_embeddings" in message


def test_rotary_buffers_of_old_checkpoints_are_skipped(copy: Callable[..., Path]) -> None:
    folder = copy("llama2")
    edit(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert load_parameters(folder, load_spec(folder), torch.float32)


def test_missing_tensors_are_named_and_counted(copy: Callable[..., Path]) -> None:
    folder = copy("llama2")
    edit(folder, lambda t: [t.pop(name) for name in list(t) if "mlp" in name])
    message = refusal(folder)
    assert "has no tensor model.layers.0.mlp.gate_proj.weight, " in message and "and 4 more" in message


def test_an_unexpected_tensor_is_named(copy: Callable[..., Path]) -> None:
    folder = copy("llama2")
    edit(folder, lambda t: t.update({"model.layers.1.self_attn.q_proj.bias": torch.zeros(64)}))
    assert "unexpected tensor model.layers.1.self_attn.q_proj.bias" in refusal(folder)


def test_a_tensor_of_another_shape_is_named_with_both(copy: Callable[..., Path]) -> None:
    folder = copy("llama2")
    edit(folder, lambda t: t.update({"model.norm.weight": torch.ones(63)}))
    assert "model.norm.weight [63] (expected [64])" in refusal(folder)


def test_a_transposed_matrix_is_refused(copy: Callable[..., Path]) -> None:
    folder = copy("llama2")
    name = "model.layers.0.mlp.down_proj.weight"
    edit(folder, lambda t: t.update({name: t[name].T.contiguous()}))
    assert f"{name} [112, 64] (expected [64, 112])" in refusal(folder)


def test_a_dtype_that_is_not_loaded_is_named(copy: Callable[..., Path]) -> None:
    folder = copy("llama2")
    edit(folder, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    assert "model.norm.weight (I8)" in refusal(folder)


def test_a_truncated_file_is_named(copy: Callable[..., Path]) -> None:
    folder = copy("llama2")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    message = refusal(folder)
    assert "truncated" in message and str(path) in message


def test_a_file_that_shrinks_while_it_is_read(copy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy("llama2")
    path = folder / "model.safetensors"

    def shrink(*arguments: object) -> None:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 1000)

    monkeypatch.setattr(load, "check_tensors", shrink)
    assert "ended at byte" in refusal(folder)


@needs_native
def test_a_file_that_shrinks_while_native_threads_read_it(
    copy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy("llama2")
    path = folder / "model.safetensors"
    monkeypatch.setattr(matrices, "check_tensors", lambda *_: os.truncate(path, path.stat().st_size // 2))
    packing = select_packing(detect_platform(), Needs(torch.float32))
    with pytest.raises(CheckpointError, match=r"ended at byte \d+"):
        load_parameters(folder, load_spec(folder), torch.float32, packing=packing)


def test_a_missing_shard_is_named(copy: Callable[..., Path]) -> None:
    folder = copy("llama2", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "the shard model-00002-of-00003.safetensors is missing, which holds" in refusal(folder)


def test_a_whole_file_wins_over_an_old_index(copy: Callable[..., Path]) -> None:
    """As in transformers: a model that is saved into the folder of another leaves the other's index there."""
    folder = copy("llama2")
    expected = tensors_of_folder(folder)
    index = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert tensors_of_folder(folder) == expected


def test_a_folder_without_weights(copy: Callable[..., Path]) -> None:
    folder = copy("llama2")
    (folder / "model.safetensors").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json is there" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    assert "pytorch_model.bin is not read, as loading it can run code" in refusal(folder)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{", "not valid JSON"),
        ({}, "weight_map is not an object"),
        ({"weight_map": {"a": 1}}, "weight_map is not an object"),
        ({"weight_map": {"a": "../model.safetensors"}}, "'../model.safetensors' is not the name"),
        ({"weight_map": {"a": "/etc/passwd"}}, "'/etc/passwd' is not the name"),
        ({"weight_map": {"a": "shard.bin"}}, "'shard.bin' is not the name"),
    ],
)
def test_a_broken_index_is_refused(copy: Callable[..., Path], index: object, words: str) -> None:
    folder = copy("llama2", shards=2)
    path = folder / "model.safetensors.index.json"
    path.write_text(index if isinstance(index, str) else json.dumps(index))
    assert words in refusal(folder)


def test_an_index_that_disagrees_with_its_shards_is_refused(copy: Callable[..., Path]) -> None:
    folder = copy("llama2", shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first, second = sorted(set(index["weight_map"].values()))
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    moved = {n: second if f == first else first for n, f in index["weight_map"].items()}
    path.write_text(json.dumps({"weight_map": moved}))
    assert "which model.safetensors.index.json places in" in refusal(folder)


def test_an_index_of_tensors_that_no_shard_has_is_refused(copy: Callable[..., Path]) -> None:
    folder = copy("llama2", shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    assert "model.extra" in refusal(folder)


@pytest.mark.parametrize("large", [False, True])
def test_loading_says_how_much_and_how_fast(
    tiny_checkpoint: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    large: bool,
) -> None:
    """A small model has no rate: it would be that of the imports beside it."""
    monkeypatch.setattr(load, "LARGE", 1000 if large else 10**9)
    folder = tiny_checkpoint("llama2")
    with caplog.at_level(logging.INFO, "penstock.weights"):
        load_parameters(folder, load_spec(folder), torch.float32)
    (record,) = caplog.records
    size = r"\d+ [KM]iB"
    rate = r" \(\d+\.\d GB/s\)" if large else ""
    assert re.fullmatch(rf"read {size} of weights from {folder.name} in \d+\.\d s{rate}", record.getMessage())


def test_a_terminal_gets_a_progress_bar(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_checkpoint("llama2")
    spec = load_spec(folder)
    capsys.readouterr()  # transformers shows a bar if it has just written the checkpoint
    load_parameters(folder, spec, torch.float32)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    load_parameters(folder, spec, torch.float32)
    assert "loading" in capsys.readouterr().err
    load_parameters(folder, spec, torch.float32, progress=False)
    assert capsys.readouterr().err == ""


def test_memory_while_loading_is_the_result_and_a_few_pieces(tmp_path: Path) -> None:
    """384 MiB of fp32 become 192 MiB of bf16: a second copy of either would show."""
    script = Path(__file__).with_name("peak_memory.py")
    command = [sys.executable, str(script), str(tmp_path), str(24 * 1024)]
    peak, size = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert size == 192
    assert 180 <= peak <= size + (reads.READERS * reads.READ_BYTES >> 20) + 16


@needs_native
@pytest.mark.parametrize(
    ("quantization", "size"), [("none", 96), ("int4", 30 if detect_platform().isa == "amx" else 27)]
)
def test_memory_while_packing_is_the_packed_size_and_a_few_pieces(tmp_path: Path, quantization: str, size: int) -> None:
    script = Path(__file__).with_name("peak_memory.py")
    command = [sys.executable, str(script), str(tmp_path), str(12 * 1024), quantization]
    peak, taken = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert taken == size
    assert size - 12 <= peak <= 1.15 * size + 16


@needs_native
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("variant", ["llama_bias", "qwen3", "gemma3"])
def test_packed_while_read_is_what_packing_the_tensors_gives(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, variant: str, quantization: str
) -> None:
    monkeypatch.setattr(reads, "READ_BYTES", 3000)  # some pieces end within a block of packed columns
    folder = tiny_checkpoint(variant, dtype="bfloat16")
    spec = load_spec(folder)
    packing = select_packing(detect_platform(), Needs(torch.bfloat16), quantization)
    packed = load_parameters(folder, spec, torch.bfloat16, packing=packing)
    dense = load_parameters(folder, spec, torch.bfloat16)
    assert list(packed) == list(dense)
    for parameter in spec.parameters:
        got, tensor = packed[parameter.name], dense[parameter.name]
        if parameter.kind == "vector":
            assert torch.equal(got, tensor)
            continue
        settings = ("bfloat16", quantization, 32, detect_platform().isa)
        fmt = cpu_format(parameter.kind, (), *settings, sensitive=parameter.sensitive)
        want = pack(tensor, None, fmt, gated=parameter.kind == "gated")
        assert (got.n, got.k, got.format, got.gated) == (want.n, want.k, want.format, want.gated)
        assert all(torch.equal(x, y) for x, y in zip(got.tensors, want.tensors, strict=True)), parameter.name


@needs_native
def test_a_tensor_that_cannot_be_quantised_is_named(copy: Callable[..., Path]) -> None:
    folder = copy("qwen3")
    name = "model.layers.1.mlp.up_proj.weight"
    edit(folder, lambda t: t[name].__setitem__((5, 7), torch.nan))
    packing = select_packing(detect_platform(), Needs(torch.bfloat16), "int8")
    with pytest.raises(CheckpointError, match=rf"'{name}': 1 rows hold infinity or NaN.*--quantization none"):
        load_parameters(folder, load_spec(folder), torch.bfloat16, packing=packing)


def test_nothing_is_allocated_for_a_checkpoint_that_is_refused(
    copy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy("llama2")
    edit(folder, lambda t: t.pop("model.norm.weight"))
    monkeypatch.setattr(torch, "empty", lambda *arguments, **options: pytest.fail("allocated before it was checked"))
    assert "has no tensor model.norm.weight" in refusal(folder)


def test_splitting_a_checkpoint_keeps_every_tensor(copy: Callable[..., Path]) -> None:
    folder = copy("llama2")
    before = load_file(folder / "model.safetensors")
    split_checkpoint(folder, 4)
    after = {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}
    assert set(after) == set(before)
