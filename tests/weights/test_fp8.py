"""Checkpoints in FP8 load as those of the values that codes and scales make."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.quantizers import quantizer_finegrained_fp8

from penstock.config import Split
from penstock.families import UnsupportedModel, load_spec, shard
from penstock.families.checkpoint.stored import CheckpointError
from penstock.kernels import Needs, Platform, detect_platform, select_packing
from penstock.weights import reads
from penstock.weights.load import load_parameters
from tests.kernels.device_weights import dense
from tests.weights.files import edit

Pair = Callable[..., tuple[Path, Path]]
ONE = Split()
BLOCK = (24, 40)  # rows and columns: no size of a tiny model is a multiple of both
PLAIN = ("norm", "embed", "lm_head", "mlp.gate.", ".bias")  # what checkpoints in FP8 keep in floats
CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}
KINDS: dict[str, tuple[dict[str, Any], str]] = {  # quantization_config, and the end of the scales' names
    "blocks": ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": BLOCK}, "_scale_inv"),
    "even blocks": ({"quant_method": "fp8", "weight_block_size": [16, 16]}, "_scale_inv"),
    "rows": (CHANNELS, "_scale"),
    "tensors": ({"quant_method": "fp8", "activation_scheme": "static"}, "_scale"),
}


def quantized(weight: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and values of a matrix, by blocks of so many rows and columns."""
    codes, values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scale = (weight[place].abs().amax() / 448).to(torch.bfloat16).float()
            codes[place] = (weight[place] / scale).to(torch.float8_e4m3fn)
            values[place] = codes[place].float() * scale
            scales[i, j] = scale
    return codes, scales, values


def write_pair(source: Path, to: Path, kind: str) -> tuple[Path, Path]:
    """A checkpoint in FP8, and one of its values."""
    config, end = KINDS[kind]
    inside, outside = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.ndim != 2 or any(part in name for part in PLAIN):
            inside[name] = outside[name] = tensor
            continue
        block = {"blocks": BLOCK, "even blocks": (16, 16), "rows": (1, tensor.shape[1]), "tensors": tensor.shape}[kind]
        inside[name], scales, outside[name] = quantized(tensor.float(), *block)
        inside[name + end] = scales[0, 0] if kind == "tensors" else scales.bfloat16() if kind == "rows" else scales
        if kind == "tensors":
            inside[name.removesuffix("weight") + "input_scale"] = torch.tensor(1.0)
    folders = to / "fp8", to / "values"
    for folder, tensors in zip(folders, (inside, outside), strict=True):
        shutil.copytree(source, folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folders[0], quantization_config=config)
    return folders


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def same(got: Any, want: Any) -> bool:
    """Whether two parameters, packed or not, are the same bits."""
    if isinstance(got, torch.Tensor):
        return torch.equal(got, want)
    return all(torch.equal(x, y) for x, y in zip(got.tensors, want.tensors, strict=True))


def assert_same(fp8: Path, values: Path, dtype: torch.dtype, split: Split = ONE, quantization: str = "") -> None:
    whole, dense = load_spec(fp8), load_spec(values)
    packing = select_packing(detect_platform(), Needs(dtype), quantization) if quantization else None
    for place in split.places:
        got = load_parameters(fp8, shard(whole, place), dtype, whole=whole, packing=packing)
        want = load_parameters(values, shard(dense, place), dtype, whole=dense, packing=packing)
        assert list(got) == list(want)
        for name, parameter in want.items():
            assert same(got[name], parameter), name


@pytest.fixture
def pair(tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """Reads are small: they begin within a block of scales."""
    monkeypatch.setattr(reads, "READ_BYTES", 1000)
    return lambda variant, kind="blocks": write_pair(tiny_checkpoint(variant), tmp_path, kind)


@pytest.mark.parametrize("variant", ["qwen3", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_codes_times_scales(pair: Pair, variant: str, kind: str) -> None:
    assert_same(*pair(variant, kind), torch.float32)


@pytest.mark.parametrize("variant", ["qwen3", "deepseek_v3"])
def test_a_rank_reads_its_part(pair: Pair, variant: str) -> None:
    assert_same(*pair(variant), torch.float32, Split(2))


@pytest.mark.skipif(not detect_platform().isa, reason="no native kernels for this machine")
@pytest.mark.parametrize("variant", ["qwen3", "deepseek_v3"])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_they_are_packed_as_floats_are(pair: Pair, variant: str, quantization: str) -> None:
    assert_same(*pair(variant), torch.bfloat16, quantization=quantization)


def on_device(folder: Path, quantization: str) -> dict[str, Any]:
    """The parameters as a GPU's kernels get them. They are packed here."""
    here = torch.device("cpu")
    packing = select_packing(Platform("cuda", "9.0"), Needs(torch.bfloat16), quantization, device=here)
    return load_parameters(folder, load_spec(folder), torch.bfloat16, packing=packing, device=here)


@pytest.mark.parametrize("kind", ["rows", "tensors"])
@pytest.mark.parametrize("variant", ["qwen3", "qwen3_moe"])
def test_a_gpu_keeps_codes_whose_rows_have_a_scale_each(pair: Pair, variant: str, kind: str) -> None:
    fp8, values = pair(variant, kind)
    got, want = on_device(fp8, "fp8"), load_parameters(values, load_spec(values), torch.float32)
    stored, kept = load_file(fp8 / "model.safetensors"), 0
    for parameter in load_spec(fp8).parameters:
        tensors = [stored[source.name] for source in parameter.sources]
        if tensors[0].dtype == torch.float8_e4m3fn:
            weight = got[parameter.name]
            assert torch.equal(weight.values.view(torch.uint8), torch.cat([each.view(torch.uint8) for each in tensors]))
            assert torch.equal(dense(weight), want[parameter.name]), parameter.name
            kept += 1
    assert kept >= 4 * len(load_spec(fp8).layers)


@pytest.mark.parametrize(
    ("kind", "quantization"), [("blocks", "fp8"), ("rows", "int8"), ("rows", "int4"), ("rows", "none")]
)
def test_other_codes_are_quantised_anew_on_a_gpu(pair: Pair, kind: str, quantization: str) -> None:
    fp8, values = pair("qwen3", kind)
    got, want = on_device(fp8, quantization), on_device(values, quantization)
    for name, weight in want.items():
        same = torch.equal if isinstance(weight, torch.Tensor) else lambda x, y: torch.equal(dense(x), dense(y))
        assert same(got[name], weight), name


def test_a_code_that_is_no_number_is_refused(pair: Pair) -> None:
    fp8, _ = pair("qwen3", "rows")
    name = "model.layers.0.mlp.up_proj.weight"
    edit(fp8, lambda tensors: tensors[name].view(torch.uint8)[1].fill_(255))
    with pytest.raises(CheckpointError, match=r"layers.0.gate_up.weight: rows 0 to \d+ hold infinity or NaN"):
        on_device(fp8, "fp8")


def test_values_are_those_of_transformers(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    fp8, values = pair("qwen3", "even blocks")  # it needs sizes that blocks divide
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)  # needed on a GPU only
    model = AutoModelForCausalLM.from_pretrained(fp8, quantization_config=FineGrainedFP8Config(dequantize=True))
    theirs, ours = model.state_dict(), load_file(values / "model.safetensors")
    for name, tensor in ours.items():
        assert torch.equal(theirs[name], tensor.to(theirs[name].dtype)), name


def refusal(folder: Path) -> str:
    with pytest.raises((CheckpointError, UnsupportedModel)) as error:
        load_parameters(folder, load_spec(folder), torch.float32)
    return str(error.value)


def test_what_is_wrong_is_named(pair: Pair) -> None:
    fp8, _ = pair("qwen3")
    name = "model.layers.0.mlp.up_proj.weight"
    edit(fp8, lambda tensors: tensors.update({name + "_scale_inv": torch.ones(2, 2)}))
    assert f"'{name}_scale_inv', F32 [2, 2], are no scales of '{name}'" in refusal(fp8)
    edit(fp8, lambda tensors: tensors.pop(name + "_scale_inv"))
    assert f"'{name}' is FP8, but there is no '{name}_scale_inv', its scales" in refusal(fp8)
    change_config(fp8, quantization_config={"quant_method": "fp8", "weight_block_size": [128]})
    assert "weight_block_size [128] is not supported; supported: rows and columns" in refusal(fp8)
    change_config(fp8, quantization_config=CHANNELS | {"config_groups": {"a": {"weights": {"num_bits": 5}}}})
    assert "weights 'int of 5 bits, strategy tensor' is not supported; supported: weights of 2, 3, 4 or 8" in refusal(
        fp8
    )
