"""What the log says of weights from a GGUF file, and that they take the memory that was planned."""

import logging
from pathlib import Path

import pytest
import torch

from penstock.config import EngineConfig, detect_hardware
from penstock.families import load_spec
from penstock.kernels import Needs, detect_platform, select_packing
from penstock.kernels.native.packing import PackedWeight, SectionedWeight
from penstock.prepare.model import find_model
from penstock.runtime.loading.load import load_runner
from penstock.weights.load import load_parameters
from tests.smollm2 import smollm2
from tests.weights.gguf_values import write_model

pytestmark = pytest.mark.skipif(not detect_platform().isa, reason="no native kernels for this machine")
MIXED = {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "ffn_down": "F16"}


def log_of(path: Path, caplog: pytest.LogCaptureFixture, quantization: str) -> str:
    config = EngineConfig(
        model=str(path), name="x", max_model_len=64, kv_cache_bytes=8 << 20, threads=1, quantization=quantization
    )
    caplog.clear()
    with caplog.at_level(logging.INFO, "penstock"):
        load_runner(config, progress=False).close()
    return caplog.text


def test_the_log_says_what_is_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_model(tmp_path, "llama", MIXED, tie_word_embeddings=True)
    for quantization, others in (("none", "bfloat16"), ("int8", "int8"), ("int4", "int4")):
        text = log_of(path, caplog, quantization)
        assert f"weights in Q4_K, Q6_K and Q8_0 as in the file, others {others};" in text
        assert "no effect" not in text


def test_a_quantisation_without_effect_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_model(tmp_path, "llama", {"ffn_up": "Q4_0"}, tie_word_embeddings=True)
    wanted = "--quantization int8 has no effect: model.gguf has no matrix of floats, Q4_0 and Q8_0 as in the file"
    assert wanted in log_of(path, caplog, "int8")
    assert "no effect" not in log_of(path, caplog, "none")


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_dense_matrices_are_quantised_and_codes_stay(tmp_path: Path, quantization: str) -> None:
    path = write_model(tmp_path, "llama", MIXED, tie_word_embeddings=True)
    spec = load_spec(path)
    packing = select_packing(detect_platform(), Needs(torch.bfloat16), quantization)
    got = load_parameters(path, spec, torch.bfloat16, packing=packing)
    plain = load_parameters(
        path, spec, torch.bfloat16, packing=select_packing(detect_platform(), Needs(torch.bfloat16))
    )
    for name, weight in got.items():
        if not isinstance(weight, PackedWeight | SectionedWeight):
            continue
        if name.endswith(".down.weight"):
            (section,) = weight.sections
            assert (section.format.scheme == "grouped") == (quantization != "none")
            continue
        for section, other in zip(weight.sections, plain[name].sections, strict=True):
            assert all(map(torch.equal, section.tensors, other.tensors)), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_take_what_was_planned(dtype: str, tmp_path: Path) -> None:
    for path in (smollm2(), write_model(tmp_path, "llama", {**MIXED, "ffn_down": "Q3_K"}, tie_word_embeddings=False)):
        flags = {"dtype": dtype, "max_model_len": 256, "kv_cache_memory": "64MiB", "device": "cpu"}
        resolved = find_model(str(path), flags).resolve(detect_hardware())
        (row,) = (row for row in resolved.memory.rows if row.name == "weights")
        packing = select_packing(detect_platform(), Needs(getattr(torch, dtype)))
        loaded = load_parameters(path, load_spec(path), getattr(torch, dtype), packing=packing)
        assert row.bytes == sum(weight.nbytes for weight in loaded.values())
        assert row.note.endswith(" as in the file")
