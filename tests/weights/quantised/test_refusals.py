"""What is not read is refused in one line that names it; files that are broken in any way end in one line, too."""

import json
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from penstock.families import UnsupportedModel, load_spec
from penstock.families.checkpoint.stored import CheckpointError
from penstock.weights.load import load_parameters
from tests.weights.files import edit
from tests.weights.quantised.conftest import Source
from tests.weights.quantised.test_load import load_fp32
from tests.weights.quantised.writers import (
    AUTO_ROUND,
    AWQ_CONFIG,
    KINDS,
    change_config,
    compressed_config,
    gptq_config,
    write_pair,
)

MODULE = "model.layers.0.mlp.up_proj"
FUZZED = (
    "gptq",
    "gptq act-order",
    "gptq 3 bits zero points",
    "awq",
    "w4a16 zero points",
    "w4a16 actorder",
    "w8a8",
    "nvfp4",
    "mxfp4",
    "modelopt nvfp4",
    "nf4",
    "bitsandbytes int8",
)


def refusal(folder: Path) -> str:
    with pytest.raises((CheckpointError, UnsupportedModel)) as error:
        load_fp32(folder, load_spec(folder), "packed")
    assert "\n" not in str(error.value)
    return str(error.value)


def compressed(**fields: Any) -> dict[str, Any]:
    return {**compressed_config(4, 32), **fields}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "hqq"}, "quantization_config 'hqq' is not supported; supported: gptq, awq (gemm), "),
        (gptq_config(4, 32, checkpoint_format="marlin"), "'marlin' is not supported; supported: gptq or gptq_v2"),
        (gptq_config(5, 32), "bits 5 is not supported; supported: 2, 3, 4, 8"),
        (gptq_config(4, 24), "group_size 24 is not supported; supported: multiples of 32, or -1 for whole rows"),
        (gptq_config(4, 32, dynamic={"+:(a+)+b": {}}), "pattern '+:(a+)+b' is not supported; supported: patterns with"),
        (gptq_config(4, 32, dynamic={"-:(": {}}), "pattern '-:(' is not supported; supported: regular expressions ("),
        (AWQ_CONFIG | {"version": "gemv"}, "version 'gemv' is not supported; supported: gemm"),
        (AWQ_CONFIG | {"bits": 8}, "bits 8 is not supported; supported: 4"),
        (compressed(format="marlin-24"), "format 'marlin-24' is not supported; supported: pack-quantized, "),
        (
            compressed(sparsity_config={"format": "sparse-24-bitmask"}),
            "format 'sparse-24-bitmask' is not supported; supported: dense: no sparsity",
        ),
        (compressed_config(5, 32), "weights 'int of 5 bits, strategy group' is not supported; supported: weights of 2"),
        (compressed(transform_config={"u": {}}), "transform_config 'with transforms' is not supported"),
        (compressed(config_groups={}), "config_groups None is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'W4A8_AWQ' is not supported; supported: FP8 or"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit False is not supported"),
        (AUTO_ROUND | {"packing_format": "auto_round:marlin"}, "packing_format 'auto_round:marlin' is not supported"),
        (AUTO_ROUND | {"data_type": "mx_fp"}, "data_type 'mx_fp' is not supported; supported: int"),
    ],
)  # fmt: skip
def test_configurations(source: Source, tmp_path: Path, config: dict[str, Any], expected: str) -> None:
    quantised, _ = write_pair(source(), tmp_path, KINDS["gptq"])
    change_config(quantised, quantization_config=config)
    assert expected in refusal(quantised)


Change = Callable[[dict[str, torch.Tensor]], Any]
CHANGES: list[tuple[str, Change, str]] = [
    ("gptq", lambda t: t.pop(f"{MODULE}.scales"), f"'{MODULE}.qweight' has codes, but there is no '{MODULE}.scales'"),
    ("gptq", lambda t: t.update({f"{MODULE}.scales": torch.ones(2, 192).half()}), "is F16 [2, 192]; expected [3, 192]"),
    ("gptq", lambda t: t[f"{MODULE}.scales"].fill_(torch.nan), f"'{MODULE}.qweight': its scales hold infinity or NaN"),
    (
        "gptq",
        lambda t: t[f"{MODULE}.qzeros"].fill_(5),
        'has zero points other than 8, but config.json says "sym": true',
    ),
    ("gptq", lambda t: t[f"{MODULE}.g_idx"].copy_(torch.arange(96).flip(0) // 32), "config.json does not say so"),
    ("gptq act-order", lambda t: t[f"{MODULE}.g_idx"].fill_(7), "names group 7 or 7; there are groups 0 to 2"),
    ("gptq act-order", lambda t: t[f"{MODULE}.g_idx"].fill_(-9), "names group -9 or -9; there are groups 0 to 2"),
    (
        "awq",
        lambda t: (
            [t.pop(f"{MODULE}.{end}") for end in ("qweight", "qzeros", "scales")]
            and t.update({f"{MODULE}.weight": torch.zeros(192, 96)})
        ),
        f"'{MODULE}.weight' is F32 without codes, but config.json says that it is quantised (AWQ int4 g32",
    ),
    ("w4a16", lambda t: t[f"{MODULE}.weight_shape"].fill_(7), "says [7, 7], but there are 192 rows"),
    ("w8a8", lambda t: t.update({f"{MODULE}.weight_zero_point": torch.ones(192, 1)}), 'json says "symmetric": true'),
    ("nf4", lambda t: t[f"{MODULE}.weight.quant_state.bitsandbytes__nf4"].fill_(65), "is no state of bitsandbytes"),
    ("nvfp4", lambda t: t[f"{MODULE}.weight_global_scale"].fill_(0.0), "its scales hold infinity or NaN"),
]


@pytest.mark.parametrize(("kind", "change", "expected"), CHANGES)
def test_tensors(source: Source, tmp_path: Path, kind: str, change: Change, expected: str) -> None:
    quantised, _ = write_pair(source(), tmp_path, KINDS[kind])
    edit(quantised, change)
    assert expected in refusal(quantised)


@st.composite
def damages(draw: st.DrawFn) -> tuple[str, str, Any]:
    """(what is changed, how, with what)."""
    what = draw(st.sampled_from(["drop", "resize", "retype", "fill", "bytes", "config"]))
    return what, str(draw(st.integers(0, 9))), draw(st.integers(-3, 300))


WHOLE: dict[str, tuple[Path, dict[str, torch.Tensor], dict[str, Any]]] = {}  # what is damaged, by kind
DTYPES = (torch.int32, torch.int64, torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32)
VALUES = (None, 0, -1, 7, 1 << 40, "x", [], {}, True, 1.5)


def damage(tensors: dict[str, torch.Tensor], config: dict[str, Any], what: str, place: int, value: int) -> None:
    names = sorted(name for name in tensors if name.startswith(MODULE))
    name = names[place % len(names)]
    tensor = tensors[name]
    if what == "drop":
        del tensors[name]
    elif what == "resize":
        shape = list(tensor.shape) or [1]
        shape[place % len(shape)] = abs(value)
        tensors[name] = torch.zeros(shape, dtype=torch.float32).to(tensor.dtype)
    elif what == "retype":
        tensors[name] = tensor.float().nan_to_num().to(DTYPES[value % len(DTYPES)])
    elif what == "fill":
        flat = tensor.reshape(-1).view(torch.uint8)
        flat.fill_(value & 255)
    elif what == "bytes":
        flat = tensor.reshape(-1).view(torch.uint8)
        flat[value % len(flat)] = (value * 31) & 255
    else:
        fields = config["quantization_config"]
        if place % 2 and "config_groups" in fields:
            fields = fields["config_groups"]["group_0"]["weights"]
        fields[sorted(fields)[value % len(fields)]] = VALUES[place % len(VALUES)]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("kind", FUZZED)
@given(data=st.data())
def test_anything_broken_loads_or_is_refused_in_one_line(
    source: Source, tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject
) -> None:
    """Some changes do no harm, such as other codes. Nothing else than an error of ours may come of them."""
    if kind not in WHOLE:
        folder, _ = write_pair(source(), tmp_path_factory.mktemp("broken"), KINDS[kind])
        config = json.loads((folder / "config.json").read_text())
        WHOLE[kind] = folder, load_file(folder / "model.safetensors"), config
    quantised, whole, config = WHOLE[kind]
    tensors, config = {name: tensor.clone() for name, tensor in whole.items()}, deepcopy(config)
    for what, place, value in data.draw(st.lists(damages(), min_size=1, max_size=2)):
        if any(name.startswith(MODULE) for name in tensors):
            damage(tensors, config, what, int(place), value)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, quantised / "model.safetensors")
    (quantised / "config.json").write_text(json.dumps(config))
    with suppress(CheckpointError, UnsupportedModel):
        load_parameters(quantised, load_spec(quantised), torch.float32, progress=False)
