"""Quantised checkpoints load as those of the values that their codes and scales make: as plain tensors, packed for a
CPU, packed for a GPU, and divided among ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from penstock.config import EngineConfig, Split
from penstock.config.weights import weights_bytes
from penstock.families import ModelSpec, load_spec, model_facts, shard
from penstock.families.shard import CannotSplit
from penstock.kernels import Needs, Platform, detect_platform, select_packing
from penstock.kernels.native.packing import SectionedWeight
from penstock.kernels.triton.weights import JoinedWeight
from penstock.weights.load import load_parameters
from tests.models.logits import FP32_ATOL, FP32_RTOL, expected_logits, kernels_on, logits_of
from tests.often import often
from tests.weights.files import edit
from tests.weights.gguf_values import values_of
from tests.weights.packed import DEVICE, NATIVE, load_fp32, needs_native
from tests.weights.quantised.conftest import Source
from tests.weights.quantised.writers import KINDS, change_config, compressed_config, gptq, integers, write_pair

PACKED = [NATIVE, DEVICE, ""]


def in_order(weight: Any) -> NDArray[np.float32]:
    """The values of a parameter, in the order of its matrices' columns."""
    if isinstance(weight, SectionedWeight | JoinedWeight):
        return np.concatenate([in_order(section) for section in weight.sections])
    order, values = getattr(weight, "order", None), values_of(weight)
    return values if order is None else values[:, np.argsort(order.numpy())]


def assert_same(
    quantised: Path, values: Path, packed: str = "", split: Split | None = None, block: int = 64
) -> dict[str, Any]:
    """The parameters are those of the values, bit for bit, but for packed NF4 and FP4. Returns the last rank's."""
    whole, dense = load_spec(quantised), load_spec(values)
    got: dict[str, Any] = {}
    for place in (split or Split()).places:
        got = load_fp32(quantised, shard(whole, place), packed, whole=whole)
        want = load_fp32(values, shard(dense, place), whole=dense)
        assert list(got) == list(want)
        for name, parameter in want.items():
            bound = rounding(got[name], parameter.numpy(), block)
            if bound is None:
                np.testing.assert_array_equal(in_order(got[name]), parameter.numpy(), name)
            else:
                assert (np.abs(in_order(got[name]) - parameter.numpy()) <= bound).all(), name
    return got


def rounding(weight: Any, values: NDArray[np.float32], block: int) -> NDArray[np.float32] | None:
    """How far packed values of NF4 and FP4 may be from the file's: a part of the largest in their block."""
    part = {"nf4": 0.0037, "fp4": 0.0032}.get(weight.format.codes) if hasattr(weight, "format") else None
    if part is None:
        return None
    return np.repeat(part * np.abs(values.reshape(-1, block)).max(-1), block).reshape(values.shape)


# Codes of each size and each way to scale them.
FEW = ("gptq", "gptq 3 bits zero points", "gptq act-order", "awq", "w4a16 zero points", "w8a8", "nvfp4", "mxfp4", "nf4")


@needs_native
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_codes_times_scales(source: Source, tmp_path: Path, kind: str) -> None:
    check_values(source, tmp_path, kind, "packed")


@pytest.mark.parametrize("packed", PACKED[1:])
@pytest.mark.parametrize("kind", often(KINDS, FEW))
def test_values_are_the_same_on_a_device_and_as_tensors(source: Source, tmp_path: Path, kind: str, packed: str) -> None:
    check_values(source, tmp_path, kind, packed)


def check_values(source: Source, tmp_path: Path, kind: str, packed: str) -> None:
    quantised, values = write_pair(source(), tmp_path, KINDS[kind])
    assert_same(quantised, values, packed)
    spec = load_spec(quantised)
    coded = [p.name for p in spec.parameters if any(p.stored)]
    if coded or KINDS[kind].coded:
        assert len(coded) == KINDS[kind].coded * len(spec.layers)


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("kind", ["gptq zero points", "awq", "w4a16", "w8a8", "nvfp4", "nf4", "bitsandbytes int8"])
def test_experts(source: Source, tmp_path: Path, kind: str, packed: str) -> None:
    assert_same(*write_pair(source(moe=True, intermediate=96), tmp_path, KINDS[kind]), packed)


@pytest.mark.parametrize("split", [Split(2), Split(1, 2), Split(2, 1, True)], ids=str)
@pytest.mark.parametrize("kind", ["gptq", "gptq 3 bits zero points", "awq", "w4a16 zero points"])
def test_ranks_have_their_parts(source: Source, tmp_path: Path, kind: str, split: Split) -> None:
    folders = write_pair(source(moe=split.expert, intermediate=192), tmp_path, KINDS[kind])
    assert_same(*folders, "packed" if detect_platform().isa else "", split)


def test_a_split_that_cuts_groups_is_refused(source: Source, tmp_path: Path) -> None:
    kind = replace(KINDS["w8a16"], write=integers(8, 128), config=compressed_config(8, 128))
    quantised, values = write_pair(source(), tmp_path, kind)
    assert_same(quantised, values)  # the last group of 192 columns has 64
    with pytest.raises(CannotSplit, match=r"\(layers.0.output.weight, int8 g128\) into 96, which are no blocks of 128"):
        shard(load_spec(quantised), Split(2).places[0])


@needs_native
@pytest.mark.parametrize("kind", ["gptq", "awq", "w8a8", "mxfp4", "gptq act-order"])
@pytest.mark.parametrize("packed", ["packed", "device"])
def test_they_take_what_was_planned(source: Source, tmp_path: Path, kind: str, packed: str) -> None:
    quantised, _ = write_pair(source(), tmp_path, KINDS[kind])
    spec = load_spec(quantised)
    got = load_fp32(quantised, spec, packed)
    held = sum(got[p.name].nbytes for p in spec.parameters if p.kind != "vector")
    assert held == planned_bytes(quantised, spec, packed)


def planned_bytes(quantised: Path, spec: ModelSpec, packed: str) -> int:
    """The bytes of the matrices by the plan of memory, packed for a CPU or for a device."""
    device, isa = ("cuda", "") if packed == "device" else ("cpu", "avx2")
    engine = EngineConfig(model=str(quantised), name="tiny", device=device, depth=1, dtype="float32")
    facts = msgspec.structs.replace(model_facts(spec), vector_elements=0, float32_elements=0, isa=isa)
    return weights_bytes(facts, engine)


def test_act_order_and_ranks(source: Source, tmp_path: Path) -> None:
    """Columns that have an order of their own are not cut; experts' are read as floats."""
    quantised, values = write_pair(source(), tmp_path / "dense", KINDS["gptq act-order"])
    assert_same(quantised, values, split=Split(1, 2))
    with pytest.raises(CannotSplit, match=r"int4 g32 in act-order\) into 96, which are no blocks of 192: use 1"):
        shard(load_spec(quantised), Split(2).places[0])
    quantised, values = write_pair(source(moe=True, intermediate=96), tmp_path / "moe", KINDS["gptq act-order"])
    got = assert_same(quantised, values, "packed" if detect_platform().isa else "")
    stored = {p.name.rpartition(".")[0]: p.stored[0] for p in load_spec(quantised).parameters}
    assert stored["layers.0.experts.down"] is None and stored["layers.0.qkv"] is not None
    assert got["layers.0.experts.down.weight"].nbytes


def test_rules_for_modules(source: Source, tmp_path: Path) -> None:
    """GPTQModel's `dynamic`: modules in floats, and modules with settings of their own; and a quantised head."""
    quantised, values = write_pair(source(), tmp_path, KINDS["gptq"])
    plain, wide = "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj"
    floats = load_file(source() / "model.safetensors")
    head, of_head = gptq()("lm_head", floats["lm_head.weight"])
    eight, of_eight = gptq(8, 0)(wide, floats[f"{wide}.weight"])

    def mix(tensors: dict[str, torch.Tensor]) -> None:
        for end in ("qweight", "qzeros", "scales", "g_idx"):
            tensors.pop(f"{plain}.{end}")
        tensors[f"{plain}.weight"] = floats[f"{plain}.weight"]
        del tensors["lm_head.weight"]
        tensors |= {**head, **eight}
        tensors[f"{wide}.bias"] = torch.zeros(len(of_eight))  # AutoGPTQ adds such biases

    edit(quantised, mix)
    of_values = {"lm_head.weight": of_head, f"{wide}.weight": of_eight, f"{plain}.weight": floats[f"{plain}.weight"]}
    edit(values, lambda tensors: tensors.update(of_values))
    rules = {r"-:.*\.1\.mlp\.down_proj": {}, r"+:.*\.0\.self_attn\.q_proj": {"bits": 8, "group_size": -1}}
    change_config(quantised, quantization_config={**KINDS["gptq"].config, "dynamic": rules, "lm_head": True})
    assert_same(quantised, values)
    assert {fmt.name for p in load_spec(quantised).parameters for fmt in p.stored if fmt} == {
        "GPTQ int4 g32",
        "GPTQ int8 by row",
    }
    extra = {plain: {"bits": 16}, r".*\.0\.self_attn\.q_proj": {"bits": 8, "group_size": -1}, "lm_head": {"bits": 4}}
    change_config(quantised, quantization_config={**KINDS["auto-round"].config, "extra_config": extra})
    assert_same(quantised, values)


def test_a_file_beside_config_json(source: Source, tmp_path: Path) -> None:
    quantised, values = write_pair(source(), tmp_path, KINDS["gptq"])
    change_config(quantised, quantization_config=None)
    fields = {name: value for name, value in KINDS["gptq"].config.items() if name != "quant_method"}
    (quantised / "quantize_config.json").write_bytes(msgspec.json.encode(fields))
    assert_same(quantised, values)


def test_modules_in_floats(source: Source, tmp_path: Path) -> None:
    """`modules_to_not_convert` of AWQ, and `ignore` with scales of keys and values in compressed-tensors."""
    floats = load_file(source() / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    for kind, ends, fields in (
        ("awq", ("qweight", "qzeros", "scales"), {"modules_to_not_convert": ["layers.0.mlp.down"]}),
        ("w4a16", ("weight_packed", "weight_shape", "weight_scale"), {"ignore": ["lm_head", f"re:.*{name[-9:]}$"]}),
    ):
        quantised, values = write_pair(source(), tmp_path / kind, KINDS[kind])

        def keep(tensors: dict[str, torch.Tensor], ends: tuple[str, ...] = ends) -> None:
            for layer in (0, 1) if "weight_shape" in ends else (0,):
                module = name.replace("0", str(layer))
                for end in ends:
                    tensors.pop(f"{module}.{end}")
                tensors[f"{module}.weight"] = floats[f"{module}.weight"]
            tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(1.0)

        edit(quantised, keep)
        kept = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in ((0, 1) if kind == "w4a16" else (0,))]
        edit(values, lambda tensors, kept=kept: tensors.update({each: floats[each] for each in kept}))
        change_config(quantised, quantization_config={**KINDS[kind].config, **fields})
        assert_same(quantised, values)


@needs_native
@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("kind", ["gptq", "gptq act-order", "awq", "w8a8", "nvfp4", "nf4"])
def test_logits(source: Source, tmp_path: Path, kind: str, moe: bool) -> None:
    """By plain torch they are those of the values. The native kernels round activations, which moves them by less than
    a fifth of their size, as with our own int8 and int4."""
    quantised, values = write_pair(source(moe=moe, intermediate=96 if moe else 192), tmp_path, KINDS[kind])
    tokens = torch.randint(307, (40,), generator=torch.Generator().manual_seed(3)).tolist()

    def logits(folder: Path, platform: Platform) -> torch.Tensor:
        spec = load_spec(folder)
        packing = select_packing(platform, Needs(torch.float32)) if platform.isa else None
        parameters = load_parameters(folder, spec, torch.float32, packing=packing, progress=False)
        return logits_of(spec, parameters, kernels_on(platform, spec), [tokens])[0]

    plain = Platform("cpu", "AVX2")
    want = expected_logits(AutoModelForCausalLM.from_pretrained(values, dtype=torch.float32).eval(), tokens)
    ours = logits(quantised, plain)
    torch.testing.assert_close(ours.log_softmax(-1), want.log_softmax(-1), rtol=FP32_RTOL, atol=FP32_ATOL)
    native = logits(quantised, detect_platform())
    assert (native - ours).norm().item() < 0.2 * ours.norm().item()
