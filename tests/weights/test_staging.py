"""Weights read into a device's memory: the same bits as on the host, by whatever pieces and however packed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penstock.families import load_spec
from penstock.families.checkpoint.stored import CheckpointError
from penstock.kernels import DensePacker, Needs, Packing, Platform, select_packing
from penstock.weights import reads
from penstock.weights.load import load_parameters
from penstock.weights.staging import DeviceStaging
from tests.kernels.device_weights import dense, pack
from tests.weights.files import edit

Checkpoint = Callable[..., Path]
HERE = torch.device("cpu")  # a device without streams, whose memory need not be pinned


def packing(quantization: str) -> Packing:
    return select_packing(Platform("cuda", "9.0"), Needs(torch.bfloat16), quantization, 32, HERE)


@pytest.mark.parametrize("variant", ["qwen3", "llama_bias", "qwen2_moe"])
@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_dense_parameters_are_those_of_the_host(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, variant: str, stored: str
) -> None:
    folder = tiny_checkpoint(variant, dtype=stored)
    spec = load_spec(folder)
    want = load_parameters(folder, spec, torch.bfloat16)
    monkeypatch.setattr(reads, "DEVICE_READ_BYTES", 1000)  # many pieces: every reader uses both of its buffers
    got = load_parameters(folder, spec, torch.bfloat16, packing=packing("none"), device=HERE)
    assert list(got) == list(want)
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


@pytest.mark.parametrize("quantization", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("variant", ["llama3", "qwen3_moe"])
def test_quantised_while_they_are_read_they_are_what_quantising_gives(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, quantization: str, variant: str
) -> None:
    folder = tiny_checkpoint(variant, dtype="bfloat16")
    spec = load_spec(folder)
    whole = load_parameters(folder, spec, torch.bfloat16)
    monkeypatch.setattr(reads, "DEVICE_READ_BYTES", 3000)
    got = load_parameters(folder, spec, torch.bfloat16, packing=packing(quantization), device=HERE)
    for parameter in spec.parameters:
        weight, tensor = got[parameter.name], whole[parameter.name]
        if parameter.kind in ("vector", "router"):
            assert torch.equal(weight, tensor), parameter.name
            continue
        scheme = "int8" if quantization == "int4" and parameter.kind == "vocabulary" else quantization
        assert torch.equal(dense(weight), dense(pack(tensor, scheme, 32))), parameter.name


def test_what_cannot_be_quantised_is_named(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = tiny_checkpoint("llama2")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    tensor = "model.layers.1.mlp.down_proj.weight"
    edit(tmp_path, lambda tensors: tensors[tensor].__setitem__((3, 5), torch.nan))
    assert load_file(tmp_path / "model.safetensors")[tensor].isnan().any()
    with pytest.raises(CheckpointError, match=r"layers\.1\.down\.weight: .*--quantization none"):
        load_parameters(tmp_path, load_spec(tmp_path), torch.bfloat16, packing=packing("fp8"), device=HERE)


def test_a_buffer_is_waited_for_and_then_filled_again() -> None:
    staging = DeviceStaging(64, HERE, torch.cpu.current_stream())
    packer = DensePacker((6, 4), torch.float32, HERE)
    seen = set()
    for row in range(6):
        buffer = staging.buffer(16)
        seen.add(buffer.data_ptr())
        buffer.view(torch.float32).fill_(row)
        staging.put(packer.put, row, buffer.view(torch.float32).view(1, 4))
    staging.close()
    assert len(seen) == 2
    assert torch.equal(packer.finish(), torch.arange(6.0)[:, None].expand(6, 4))


def test_a_readers_thread_works_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins with the first device, whichever was chosen in another: what it pins would be that one's."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cpu, "set_device", chosen.append)
    second = torch.device("cpu", 1)
    DeviceStaging(64, second, torch.cpu.current_stream())
    assert chosen == [second]
