"""gpt-oss in MXFP4, and that its sinks and the bound of its SwiGLU count."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.config import Split
from penstock.families import UnsupportedModel, load_spec, shard, spec_from_config
from penstock.families.checkpoint.stored import CheckpointError
from penstock.kernels import Needs, detect_platform, elementwise, select_packing
from penstock.weights.checkpoint import check_tensors, stored_tensors
from penstock.weights.load import load_parameters
from tests.checkpoints import tiny_model, write_tokenizer
from tests.models.logits import Checkpoint, expected_logits, kernels_on, logits_of, make_prompts
from tests.models.test_split import TORCH
from tests.weights.files import edit
from tests.weights.gguf_values import values_of

Edit = Callable[[dict[str, torch.Tensor]], None]
NATIVE = bool(detect_platform().isa)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in MXFP4, as gpt-oss is published, and the same in float32, with the values by transformers."""
    coded, dense = (tmp_path_factory.mktemp(name) for name in ("coded", "dense"))
    tiny_model("gpt_oss").save_pretrained(dense)
    config = json.loads((dense / "config.json").read_text()) | {"intermediate_size": 64}
    (dense / "config.json").write_text(json.dumps(config))
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (coded / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(3)
    floats = load_file(dense / "model.safetensors")
    codes = {name: tensor for name, tensor in floats.items() if ".experts." not in name}
    for name in [name for name in floats if ".experts." in name and not name.endswith("_bias")]:
        rows = 128 if "gate_up" in name else 64
        blocks = torch.randint(256, (6, rows, 2, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 125, (6, rows, 2), dtype=torch.uint8, generator=generator)
        bias = torch.randn(6, rows, generator=generator)
        codes |= {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": bias}
        floats[f"{name}_bias"] = bias
        floats[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(floats, dense / "model.safetensors")
    save_file(codes, coded / "model.safetensors")
    write_tokenizer(coded)
    return coded, dense


@pytest.mark.parametrize("packed", [pytest.param(True, marks=pytest.mark.skipif(not NATIVE, reason="native")), False])
@pytest.mark.parametrize("split", [Split(), Split(2), Split(2, 1, True)], ids=str)
def test_mxfp4_has_the_values_that_transformers_decodes(folders: tuple[Path, Path], split: Split, packed: bool) -> None:
    coded, dense = folders
    spec, plain = load_spec(coded), load_spec(dense)
    packing = select_packing(detect_platform(), Needs(torch.float32)) if packed else None
    for place in split.places:
        mine, same = shard(spec, place), shard(plain, place)
        got = load_parameters(coded, mine, torch.float32, whole=spec, packing=packing, progress=False)
        want = load_parameters(dense, same, torch.float32, whole=plain, progress=False)
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            assert torch.equal(torch.from_numpy(values_of(got[name])).view(tensor.shape), tensor), name
        if packed:  # a model in MXFP4 stays in MXFP4
            assert {got[f"layers.0.experts.{part}.weight"].format.codes for part in ("gate_up", "down")} == {"mxfp4"}


def logits(folder: Path, change: Edit = lambda parameters: None) -> list[torch.Tensor]:
    spec = load_spec(folder)
    parameters = load_parameters(folder, spec, torch.float32, progress=False)
    change(parameters)
    return logits_of(spec, parameters, kernels_on(TORCH, spec), make_prompts()[-3:])


def farthest(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    each = zip(some, others, strict=True)
    return max((a.log_softmax(-1) - b.log_softmax(-1)).abs().max().item() for a, b in each)


def test_sinks_count(tiny_checkpoint: Checkpoint) -> None:
    def without(parameters: dict[str, Any]) -> None:
        for name in parameters:
            if name.endswith("sinks.weight"):
                parameters[name] = torch.full_like(parameters[name], -torch.inf)

    folder = tiny_checkpoint("gpt_oss")
    assert farthest(logits(folder), logits(folder, without)) > 0.1


def test_the_bound_of_the_activation_counts(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With inputs of the activation that often pass it."""
    model = tiny_model("gpt_oss")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.gate_up_proj *= 5
    model.save_pretrained(tmp_path)
    prompts = make_prompts()[-3:]
    bounded = logits(tmp_path)
    assert farthest(bounded, [expected_logits(model, prompt) for prompt in prompts]) < 1e-4
    monkeypatch.setattr(elementwise, "SWIGLU_LIMIT", 8.0)
    assert farthest(bounded, logits(tmp_path)) > 1e-2


def refused() -> Iterator[tuple[Edit, str]]:
    def short(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.mlp.experts.down_proj_scales"
        tensors[name] = tensors[name][:, :, :1].contiguous()

    yield short, "down_proj_scales', U8 [6, 64, 1], are no MXFP4; expected U8, with 16 bytes of blocks for each scale"
    yield lambda tensors: tensors.pop("model.layers.1.mlp.experts.down_proj_scales"), "has no tensor"


@pytest.mark.parametrize(("change", "message"), refused())
def test_broken_pairs_are_refused(folders: tuple[Path, Path], change: Edit, message: str, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folders[0] / name).read_bytes())
    edit(tmp_path, change)
    spec = load_spec(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        check_tensors(spec, stored_tensors(tmp_path, spec))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [{"swiglu_limit": 8.0}, {"swiglu_alpha": 1.7}, {"quantization_config": {"quant_method": "fp8"}}],
    ids=str,
)
def test_what_kernels_do_not_compute_is_refused(tiny_checkpoint: Checkpoint, change: dict[str, Any]) -> None:
    config = json.loads((tiny_checkpoint("gpt_oss") / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match=next(iter(change))):
        spec_from_config(config | change)


def test_other_families_have_no_experts_in_mxfp4(tiny_checkpoint: Checkpoint) -> None:
    config = json.loads((tiny_checkpoint("mixtral") / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match=r"quantization_config 'mxfp4' is not supported; .* mxfp4 in gpt-oss"):
        spec_from_config(config | {"quantization_config": {"quant_method": "mxfp4"}})
