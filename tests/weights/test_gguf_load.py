"""Parameters of GGUF files have the values that the gguf package decodes, in Hugging Face's order of rows."""

import logging
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from penstock.config import EngineConfig, Split
from penstock.config.weights import GGUF_FORMATS, cpu_format, format_of, held_as, packed_bytes, weights_bytes
from penstock.families import ModelSpec, load_spec, model_facts, shard
from penstock.families.checkpoint.stored import CheckpointError
from penstock.families.shard import CannotSplit, possible_splits
from penstock.kernels import Needs, detect_platform, select_packing
from penstock.kernels.native.packing import PackedWeight, SectionedWeight
from penstock.weights import load, reads
from penstock.weights.load import load_parameters
from tests.often import often
from tests.smollm2 import smollm2
from tests.weights.gguf_values import Values, values_of, write_model
from tests.weights.packed import DEVICE, NATIVE, load_fp32, needs_native

QKV = ("attn_q", "attn_k", "attn_v")

# The family, and the types of its tensors.
MODELS: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "one type": ("llama", {}, {"attention_bias": True}),
    "q, k and v differ": (
        "llama",
        {"attn_q": "Q4_0", "attn_k": "Q8_0", "attn_v": "Q4_1", "ffn_gate": "Q5_1", "ffn_up": "Q5_0"},
        {"attention_bias": True, "tie_word_embeddings": False},
    ),
    "K-quants": (
        "llama",
        {
            **dict.fromkeys(("attn_q", "attn_k", "ffn_gate", "attn_output"), "Q4_K"),
            "attn_v": "Q6_K",
            "ffn_up": "Q5_K",
            "ffn_down": "Q3_K",
            "token_embd.weight": "Q2_K",
        },
        {"tie_word_embeddings": True},
    ),
    "some floats": (
        "qwen2",
        {"attn_k": "F16", "ffn_up": "BF16", "attn_output": "F32", "output.weight": "F16"},
        {"tie_word_embeddings": False},
    ),
    "tables": ("qwen3", dict.fromkeys(QKV, "IQ4_NL") | {"ffn_gate": "IQ4_XS", "ffn_up": "Q4_K"}, {}),
    "experts": (
        "mixtral",
        {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q6_K", "ffn_down_exps": "Q5_0", "attn_k": "Q4_0"},
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "experts and a shared one": (
        "qwen2_moe",
        {"ffn_gate_exps": "Q4_0", "ffn_up_exps": "Q4_1", "ffn_down_exps": "Q6_K", "ffn_up_shexp": "Q5_K"},
        {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 512},
    ),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    family, kinds, changes = MODELS[request.param]
    monkeypatch.setattr(reads, "READ_BYTES", 20_000)  # many reads, the last of each tensor shorter
    return write_model(tmp_path, family, kinds, **changes)


def assert_values(want: Values, spec: ModelSpec, got: dict[str, Any]) -> None:
    assert list(got) == [parameter.name for parameter in spec.parameters]
    for parameter in spec.parameters:
        np.testing.assert_array_equal(values_of(got[parameter.name]), want.of(parameter), parameter.name)


@pytest.mark.parametrize("packed", [NATIVE, DEVICE, ""])
def test_values_are_those_of_gguf(model: Path, packed: str) -> None:
    spec = load_spec(model)
    assert_values(Values(model), spec, load_fp32(model, spec, packed=packed))


def test_values_without_native_code(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "instruction_sets", lambda: ())
    spec = load_spec(model)
    assert_values(Values(model), spec, load_fp32(model, spec, packed=""))


@needs_native
@pytest.mark.parametrize("split", [Split(2), Split(1, 2), Split(2, 1, True)], ids=str)
def test_ranks_have_the_values_of_their_parts(model: Path, split: Split) -> None:
    check_ranks(model, split, "packed")


@pytest.mark.parametrize("packed", [DEVICE, ""])
@pytest.mark.parametrize("split", often([Split(2), Split(1, 2), Split(2, 1, True)], [Split(2)]), ids=str)
def test_ranks_have_the_same_on_a_device_and_as_tensors(model: Path, split: Split, packed: str) -> None:
    check_ranks(model, split, packed)


def check_ranks(model: Path, split: Split, packed: str) -> None:
    whole = load_spec(model)
    if split.expert and not any(layer.moe for layer in whole.layers):
        pytest.skip("has no experts")
    total, want = 0, Values(model)
    for place in split.places:
        spec = shard(whole, place)
        got = load_fp32(model, spec, packed=packed, whole=whole)
        assert_values(want, spec, got)
        total += spec.num_parameters()
    assert total >= whole.num_parameters()


@needs_native
def test_codes_stay_codes_on_a_device_and_take_what_was_planned(model: Path) -> None:
    spec = load_spec(model)
    engine = EngineConfig(model=str(model), name="tiny", device="cuda", depth=2, dtype="float32")
    got = load_fp32(model, spec, packed="device")
    facts = msgspec.structs.replace(model_facts(spec), vector_elements=0, float32_elements=0)
    matrices = [p.name for p in spec.parameters if p.kind != "vector"]
    biases = [name.replace(".weight", ".bias") for name in matrices]
    held = sum(got[name].nbytes for name in (*matrices, *biases) if name in got)
    assert held == weights_bytes(facts, engine) < 0.75 * weights_bytes(facts.without_codes(), engine)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_stay_codes(model: Path, dtype: torch.dtype) -> None:
    """Tensors have formats of their own, but for gated halves and experts: these are as large as all of them need, or
    floats if one has floats."""
    spec, types, name = load_spec(model), Values(model), str(dtype).removeprefix("torch.")
    isa, packing = detect_platform().isa, select_packing(detect_platform(), Needs(dtype))
    coded = 0
    for parameter_name, weight in load_parameters(model, spec, dtype, packing=packing).items():
        parameter = next(each for each in spec.parameters if each.name == parameter_name)
        if parameter.kind == "vector":
            continue
        assert isinstance(weight, PackedWeight | SectionedWeight)
        together = parameter.kind != "matrix" or parameter.experts > 1
        each = [types.types(replace(parameter, sources=(source,))) for source in parameter.sources]
        wants = []
        for stored in [types.types(parameter)] if together else each:
            if parameter.kind == "router" or stored & {"F32", "F16", "BF16"}:
                wants.append(cpu_format(parameter.kind, (), name, "none", 32, isa))
            else:
                wants.append(format_of(GGUF_FORMATS[kind] for kind in stored))
                coded += 1
        assert [section.format for section in weight.sections] == [held_as(fmt, isa) for fmt, _ in groupby(wants)]
        for section in weight.sections:
            size = packed_bytes(section.n, section.k, section.format, gated=section.gated)
            assert section.nbytes == section.count * size
    assert coded >= 2


@pytest.mark.parametrize("packed", [NATIVE, pytest.param("", marks=pytest.mark.rare)])
def test_a_real_file(packed: str) -> None:
    """SmolLM2: q and k of Q4_1, the embedding and some others of Q8_0."""
    path = smollm2()
    spec = load_spec(path)
    want = Values(path)
    assert {kind for parameter in spec.parameters for kind in want.types(parameter)} == {"Q4_1", "Q8_0", "F32"}
    assert_values(want, spec, load_fp32(path, spec, packed=packed))


def test_a_split_that_cuts_blocks_is_refused(tmp_path: Path) -> None:
    spec = load_spec(write_model(tmp_path, "llama", {"ffn_down": "Q6_K"}))
    assert possible_splits(spec, 4) == [Split(), Split(2), Split(1, 2), Split(2, 2)]
    with pytest.raises(CannotSplit) as caught:
        shard(spec, Split(4).places[1])
    assert str(caught.value) == (
        "--tensor-parallel-size 4 cuts rows of 512 values (layers.0.down.weight, Q6_K) into 128, which are no blocks "
        "of 256: use 1 or 2"
    )


@pytest.mark.parametrize("packed", [NATIVE, ""])
def test_columns_that_cut_a_block_are_refused(tmp_path: Path, packed: str) -> None:
    """By the reads as well, if the file is not what the spec was made from."""
    path = write_model(tmp_path, "llama", {"ffn_down": "Q8_0"})
    whole = load_spec(path)
    write_model(tmp_path, "llama", {"ffn_down": "Q6_K"})
    with pytest.raises(CheckpointError) as caught:  # of columns 128 to 255
        load_fp32(path, shard(whole, Split(4).places[1]), packed=packed, whole=whole)
    assert str(caught.value) == (
        f"{path}: blk.0.ffn_down.weight is Q6_K, whose blocks of 256 values cannot be divided at column 128: use fewer "
        "ranks (--tensor-parallel-size)"
    )


def test_the_log_names_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_model(tmp_path, "llama", {})
    with caplog.at_level(logging.INFO, "penstock.weights.load"):
        load_parameters(path, load_spec(path), torch.float32)
    assert f" of weights from {path.name} in " in caplog.text
