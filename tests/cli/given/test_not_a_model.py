"""What newcomers name as a model and is none: one line says what it is and what to do."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import RunCommand
from tests.cli.test_wrong_use import assert_one_line
from tests.gguf_models import write_gguf

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 988097824\n"
PAGE = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n" + b" " * 100
PICKLE = b"\x80\x02}q\x00(X\x05\x00\x00\x00model" + b"\0" * 100


def config(**fields: object) -> bytes:
    return json.dumps(fields).encode()


# The files of a folder, and what the error says.
FOLDERS: dict[str, tuple[dict[str, bytes], tuple[str, ...]]] = {
    "empty": ({}, ("it is empty", "check the path")),
    "no-config": ({"readme.md": b"hello"}, ("no config.json", "name the folder that has config.json")),
    "weights-only": ({"model.safetensors": b"x" * 99}, ("no config.json, only weights", "download config.json")),
    "pickles-only": ({"pytorch_model.bin": PICKLE}, ("no config.json, only pickles", "safetensors or GGUF")),
    "one-level-up": ({"inner/config.json": b"{}"}, ("inner has: name that folder",)),
    "original": ({"consolidated.00.pth": b"x", "params.json": b"{}"}, ("original files", "Hugging Face layout")),
    "adapter": (
        {"adapter_config.json": config(base_model_name_or_path="meta-llama/Llama-3.2-1B"), "adapter_model.bin": b"x"},
        ("PEFT adapter", "'meta-llama/Llama-3.2-1B'", "merge it"),
    ),
    "broken-adapter": ({"adapter_config.json": PAGE}, ("PEFT adapter", "merge it")),
    "diffusers": ({"model_index.json": b"{}", "unet/config.json": b"{}"}, ("diffusers pipeline", "language model")),
    "pointer": ({"config.json": POINTER}, ("config.json is a git-lfs pointer", "git lfs pull")),
    "page": ({"config.json": PAGE}, ("config.json is a web page", "download the file itself")),
    "bloom": (
        {"config.json": config(architectures=["BloomForCausalLM"], model_type="bloom")},
        ("'BloomForCausalLM' is not supported", "such as Qwen/Qwen3-0.6B", "AttentionInterface"),
    ),
    "gemma3n": (
        {"config.json": config(architectures=["Gemma3nForConditionalGeneration"])},
        ("nearest", "is Gemma3ForCausalLM"),
    ),
    "vision": ({"config.json": config(architectures=["Qwen3VLForConditionalGeneration"])}, ("nearest", "is Qwen3")),
    "bert": (
        {"config.json": config(architectures=["DebertaV2ForMaskedLM"])},
        ("'DebertaV2ForMaskedLM'", "fills gaps in a text", "supported of these: BertModel"),
    ),
    "embedder": ({"config.json": config(architectures=["DebertaV2Model"])}, ("such a model embeds text",)),
    "classifier": ({"config.json": config(architectures=["LlamaForSequenceClassification"])}, ("classifies text",)),
    "t5": ({"config.json": config(architectures=["T5ForConditionalGeneration"])}, ("encoder",)),
    "whisper": ({"config.json": config(architectures=["WhisperForConditionalGeneration"])}, ("transcribes speech",)),
    "unnamed": (
        {"config.json": config(model_type="llama")},
        ("no architecture is named", 'add "architectures": ["LlamaForCausalLM"]'),
    ),
    "nothing-said": ({"config.json": b"{}"}, ("no architecture is named", "supported: ArceeForCausalLM")),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder(run_command: RunCommand, tmp_path: Path, name: str) -> None:
    files, words = FOLDERS[name]
    folder = tmp_path / name
    folder.mkdir()
    for file, content in files.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(content)
    assert_one_line(run_command("plan", str(folder)), str(folder), *words)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model.gguf", POINTER, ("model.gguf is a git-lfs pointer", "git lfs pull")),
        ("model.gguf", PAGE, ("model.gguf is a web page",)),
        ("model.gguf", b"", ("model.gguf is empty; download it again",)),
        ("model.gguf", PICKLE, ("model.gguf is a pickle",)),
        ("model.gguf", b"GGUF", ("truncated",)),
        ("model.safetensors", b"x" * 99, ("is a file of weights; name its folder",)),
        ("pytorch_model.bin", PICKLE, ("is a pickle", "use safetensors or GGUF")),
        ("model.bin", b"GGUF" + b"\0" * 99, ("is a GGUF file; rename it", ".gguf")),
        ("model.zip", b"PK\x03\x04" + b"\0" * 99, ("zip archive",)),
        ("model.tar.gz", b"\x1f\x8b" + b"\0" * 99, ("an archive; unpack it and name the folder",)),
        ("notes.txt", b"hello", ("is a file; name a GGUF file, or the folder",)),
    ],
)
def test_a_file(run_command: RunCommand, tmp_path: Path, name: str, content: bytes, words: tuple[str, ...]) -> None:
    (tmp_path / name).write_bytes(content)
    assert_one_line(run_command("plan", str(tmp_path / name)), name, *words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (POINTER, ("model.safetensors is a git-lfs pointer", "git lfs pull")),
        (PAGE, ("model.safetensors is a web page",)),
        (b"", ("model.safetensors is empty",)),
        (None, ("has no weights", "download them")),
        (PICKLE, ("pytorch_model.bin is not read", "can run code", "transformers")),
    ],
)
def test_weights_that_are_something_else(
    run_command: RunCommand,
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    content: bytes | None,
    words: tuple[str, ...],
) -> None:
    source, folder = tiny_checkpoint("qwen3"), tmp_path / "model"
    folder.mkdir()
    for path in source.iterdir():
        if path.name != "model.safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    if content is not None:
        (folder / ("pytorch_model.bin" if content is PICKLE else "model.safetensors")).write_bytes(content)
    assert_one_line(run_command("plan", str(folder)), str(folder), *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "bloom"}, ("'bloom'", "such as Qwen/Qwen3-0.6B", "supported: llama")),
        ({"general.architecture": "gemma3n"}, ("'gemma3n'", "the nearest that is supported is gemma3")),
        ({"general.architecture": "clip"}, ("mmproj", "name the file of its language model")),
        ({"general.type": "mmproj"}, ("mmproj", "name the file of its language model")),
        ({"general.type": "adapter"}, ("LoRA adapter", "name the file of the model")),
        ({"general.type": "imatrix"}, ("importance matrix",)),
        ({"general.architecture": "bert"}, ("'bert'", "encoder")),
    ],
)
def test_a_gguf_file_of_another_kind(
    run_command: RunCommand,
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    changes: dict[str, str],
    words: tuple[str, ...],
) -> None:
    path = write_gguf(tiny_checkpoint("llama2"), tmp_path / "some.gguf", changes=changes)
    assert_one_line(run_command("plan", str(path)), "some.gguf", *words)


def test_a_vocabulary_without_a_model(
    run_command: RunCommand, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_gguf(tiny_checkpoint("llama2"), tmp_path / "vocab.gguf", edit=lambda tensors: tensors.clear())
    assert_one_line(run_command("plan", str(path)), "vocab.gguf", "a vocabulary only; name a file with weights")
