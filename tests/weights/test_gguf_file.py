"""The tensors of GGUF files by Hugging Face's names: every value, and what a file may not hold."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray
from safetensors.numpy import load_file

from penstock.config import Split
from penstock.families import load_spec, shard
from penstock.families.checkpoint.stored import CheckpointError, Shift, StoredTensor
from penstock.gguf import TYPES, read_gguf
from penstock.weights.checkpoint import check_tensors, stored_tensors
from penstock.weights.load import load_parameters
from tests.checkpoints import STATES
from tests.gguf_models import REFORMED, REPRESENTABLE, Written, write_gguf, writer


@pytest.fixture
def written(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Written:
    return writer(tiny_checkpoint, tmp_path)


def shift(stored: StoredTensor) -> float:
    return sum(step.by for step in stored.steps if isinstance(step, Shift))


def values(stored: StoredTensor, order: tuple[tuple[int, int, int], ...]) -> NDArray[np.float32]:
    """The values of a float32 tensor, in the order of Hugging Face's checkpoints."""
    rows = np.fromfile(stored.path, np.float32, stored.size // 4, offset=stored.offset).reshape(stored.shape)
    if order:
        (_, half, step), _ = order
        rows = rows.reshape(-1, half, step, *stored.shape[1:]).swapaxes(1, 2).reshape(stored.shape)
    return np.asarray(rows + np.float32(shift(stored)), np.float32)


@pytest.mark.parametrize("variant", REPRESENTABLE)
def test_every_value_is_the_checkpoints(written: Written, tiny_checkpoint: Callable[..., Path], variant: str) -> None:
    expected = load_file(tiny_checkpoint(variant) / "model.safetensors")
    path = written(variant)
    found, theirs = stored_tensors(path), load_spec(tiny_checkpoint(variant))
    sources = {source.name: source for p in load_spec(path).parameters for source in p.sources}
    plain = {source.name: source for p in theirs.parameters for source in p.sources}
    assert found.keys() == expected.keys()
    orders = {
        name: () if name not in sources or sources[name].order == plain[name].order else sources[name].order
        for name in found
    }
    for name, stored in found.items():
        got, error = values(stored, orders[name]), 1.2e-7 if shift(stored) else 0
        np.testing.assert_allclose(got, expected[name], rtol=0, atol=error, err_msg=name)
    rotated = {name for name, order in orders.items() if order}
    is_llama = variant.startswith(("llama", "mistral", "ministral", "mixtral", "granite", "smollm3"))
    assert rotated == {name for name in found if is_llama and (".q_proj." in name or ".k_proj." in name)}
    shifted_names = {name for name, stored in found.items() if shift(stored)}
    assert shifted_names == {name for name in found if variant.startswith("gemma") and name.endswith("norm.weight")}


def loaded_equally(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Raises unless parameters are equal; norms of Gemma and Qwen3-Next, which a file has with 1 added,
    and decays, of which it has the exponential, but for a rounding."""
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        error = 1.2e-7 if name.endswith("norm.weight") else 1e-6 if name.endswith("decay.weight") else 0
        torch.testing.assert_close(ours[name], expected, rtol=0, atol=error, msg=name)


@pytest.mark.parametrize("variant", [*REPRESENTABLE, *REFORMED])
@pytest.mark.parametrize("split_tensors", [0, 9])
def test_a_file_is_loaded_as_its_checkpoint(
    written: Written, tiny_checkpoint: Callable[..., Path], variant: str, split_tensors: int
) -> None:
    folder, path = tiny_checkpoint(variant), written(variant, split_tensors=split_tensors)
    ours = load_parameters(path, load_spec(path), torch.float32, progress=False)
    loaded_equally(ours, load_parameters(folder, load_spec(folder), torch.float32, progress=False))


UNDIVIDED = ("llama3", "olmo2", "olmo3", "falcon", "gemma4", *STATES)  # one KV head; a norm over all heads; states


@pytest.mark.parametrize("variant", [variant for variant in (*REPRESENTABLE, *REFORMED) if variant not in UNDIVIDED])
def test_ranks_load_the_same_parts_of_a_file_as_of_its_checkpoint(
    written: Written, tiny_checkpoint: Callable[..., Path], variant: str
) -> None:
    folder, path = tiny_checkpoint(variant), written(variant)
    theirs, ours = load_spec(folder), load_spec(path)
    for place in Split(2).places:
        loaded_equally(
            load_parameters(path, shard(ours, place), torch.float32, whole=ours, progress=False),
            load_parameters(folder, shard(theirs, place), torch.float32, whole=theirs, progress=False),
        )


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("variant", ["llama_bias", "mixtral", "qwen3", "deepseek_v3"])
def test_codes_are_loaded_as_their_values(
    written: Written, tiny_checkpoint: Callable[..., Path], tmp_path: Path, variant: str, kind: str
) -> None:
    """Without native kernels: into a checkpoint of the values, by way of a file of type F32."""
    number = GGMLQuantizationType[kind]

    def round_off(tensors: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            if tensor.ndim > 1 and ".ffn_gate_inp" not in name and tensor.shape[-1] % 32 == 0:
                tensors[name] = quants.dequantize(quants.quantize(tensor, number), number)
            elif tensor.ndim > 1 and ".ffn_gate_inp" not in name:
                tensors[name] = tensor.astype(np.float16).astype(np.float32)

    codes = written(variant, kind=kind)
    values = write_gguf(tiny_checkpoint(variant), tmp_path / "values.gguf", edit=round_off)
    loaded_equally(
        load_parameters(codes, load_spec(codes), torch.float32, progress=False),
        load_parameters(values, load_spec(values), torch.float32, progress=False),
    )


def test_gate_and_up_of_experts_may_be_one_tensor(
    written: Written, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """As llama.cpp's conversion writes them with --fuse-gate-up-exps, and for Gemma 4 in any case."""

    def fuse(tensors: dict[str, Any]) -> None:
        for i in range(3):
            halves = [tensors.pop(f"blk.{i}.ffn_{half}_exps.weight") for half in ("gate", "up")]
            tensors[f"blk.{i}.ffn_gate_up_exps.weight"] = np.concatenate(halves, axis=1)

    apart = written("qwen2_moe_plain", kind="Q8_0")
    fused = write_gguf(tiny_checkpoint("qwen2_moe_plain"), tmp_path / "fused.gguf", kind="Q8_0", edit=fuse)
    assert load_spec(fused) == load_spec(apart)
    loaded_equally(*(load_parameters(path, load_spec(path), torch.float32, progress=False) for path in (fused, apart)))


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_glms_q_k_and_v_may_be_one_tensor(
    written: Written, tiny_checkpoint: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    """As the first checkpoints of GLM-4 have them, which llama.cpp's conversion keeps."""

    def fuse(tensors: dict[str, Any]) -> None:
        for i in range(3):
            for end in ("weight", "bias"):
                parts = [tensors.pop(f"blk.{i}.attn_{part}.{end}") for part in "qkv"]
                tensors[f"blk.{i}.attn_qkv.{end}"] = np.concatenate(parts)

    apart = written("glm", kind=kind)
    fused = write_gguf(tiny_checkpoint("glm"), tmp_path / "fused.gguf", kind=kind, edit=fuse)
    check_tensors(load_spec(fused), stored_tensors(fused))
    assert load_spec(fused).layers == load_spec(apart).layers
    loaded_equally(*(load_parameters(path, load_spec(path), torch.float32, progress=False) for path in (fused, apart)))


def test_gemmas_norms_are_loaded_as_the_checkpoint_has_them(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """In bfloat16 as in float32: 1 is subtracted before the values are rounded."""
    folder = tiny_checkpoint("gemma3")
    path = write_gguf(folder, tmp_path / "m.gguf")
    for dtype in (torch.float32, torch.bfloat16):
        theirs = load_parameters(folder, load_spec(folder), dtype, progress=False)
        ours = load_parameters(path, load_spec(path), dtype, progress=False)
        norms = [name for name in theirs if name.endswith("norm.weight")]
        assert len(norms) == 6 * 6 + 1
        for name in norms:
            if dtype == torch.bfloat16:
                assert (ours[name] == theirs[name]).float().mean() > 0.95  # but for values halfway between two
            else:
                torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1.2e-7)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_rows_of_every_type_are_where_they_are_stored(written: Written, kind: str) -> None:
    path = written("qwen2_moe_plain", kind=kind)
    found, spec = stored_tensors(path), load_spec(path)
    check_tensors(spec, found)
    expected = {tensor.name: tensor for tensor in read_gguf(path).tensors.values()}
    expert = found["model.layers.2.mlp.experts.5.gate_proj.weight"]
    assert (expert.name, expert.dtype, expert.shape) == ("blk.2.ffn_gate_exps.weight", kind, (40, 64))
    whole = expected[expert.name]
    assert expert.offset == whole.offset + 5 * whole.size // 7 and expert.size == 40 * expert.row_bytes
    row = np.fromfile(path, np.uint8, expert.row_bytes, offset=expert.offset + 3 * expert.row_bytes)
    all_rows = np.fromfile(path, np.uint8, whole.size, offset=whole.offset).reshape(7, 40, -1)
    number = GGMLQuantizationType[kind]
    assert (quants.dequantize(row, number) == quants.dequantize(all_rows, number)[5, 3]).all()


def test_dimensions_of_one_may_be_missing(written: Written) -> None:
    """llama.cpp leaves out leading ones where it quantises a file."""
    name = "blk.1.ffn_gate_inp_shexp.weight"
    path = written("qwen2_moe_plain", edit=lambda tensors: tensors.update({name: tensors[name].reshape(-1)}))
    assert read_gguf(path).tensors[name].shape == (64,)
    assert stored_tensors(path)["model.layers.1.mlp.shared_expert_gate.weight"].shape == (1, 64)
    check_tensors(load_spec(path), stored_tensors(path))


def test_the_factors_of_rope_are_no_weights(written: Written) -> None:
    path = written("llama3")
    assert "rope_freqs.weight" in read_gguf(path).tensors
    check_tensors(load_spec(path), stored_tensors(path))


def test_types_of_the_file_may_differ(written: Written) -> None:
    kinds = {"token_embd.weight": "Q8_0", "blk.0.attn_v.weight": "Q5_1"}
    path = written("llama2", kind="Q4_0", kinds=kinds)
    found = stored_tensors(path)
    check_tensors(load_spec(path), found)
    types = {name: stored.dtype for name, stored in found.items()}
    assert types["model.embed_tokens.weight"] == "Q8_0" and types["model.layers.0.self_attn.v_proj.weight"] == "Q5_1"
    assert types["model.layers.1.self_attn.v_proj.weight"] == "Q4_0" and types["model.norm.weight"] == "F32"
    assert types["model.layers.0.mlp.down_proj.weight"] == "F16"  # rows of 112 values
    stored = found["model.layers.1.self_attn.v_proj.weight"]
    assert stored.row_bytes == 64 // 32 * TYPES["Q4_0"].block_bytes


def _drop(tensors: dict[str, Any]) -> None:
    del tensors["blk.1.ffn_up.weight"]


def _add(tensors: dict[str, Any]) -> None:
    tensors["blk.1.surprise.weight"] = np.zeros((2, 2), np.float32)


def _cut(tensors: dict[str, Any]) -> None:
    tensors["output_norm.weight"] = tensors["output_norm.weight"][:-1]


def _narrow(tensors: dict[str, Any]) -> None:
    tensors["blk.0.attn_q.weight"] = tensors["blk.0.attn_q.weight"][:32]


def _fewer_experts(tensors: dict[str, Any]) -> None:
    tensors["blk.0.ffn_up_exps.weight"] = tensors["blk.0.ffn_up_exps.weight"][:4]


def _twice(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"] = tensors["output_norm.weight"]


def _deep(tensors: dict[str, Any]) -> None:
    tensors["blk.0.ffn_up_exps.weight"] = tensors["blk.0.ffn_up_exps.weight"][None]


@pytest.mark.parametrize(
    ("variant", "options", "words"),
    [
        (
            "llama2",
            {"edit": _drop},
            "has no tensor model.layers.1.mlp.up_proj.weight, which a llama model with this",
        ),
        ("llama2", {"edit": _add}, "has the unexpected tensor blk.1.surprise.weight"),
        ("llama2", {"edit": _cut}, "of another shape than metadata says: model.norm.weight [63] (expected [64])"),
        ("llama2", {"edit": _narrow}, "model.layers.0.self_attn.q_proj.weight [32, 64] (expected [64, 64])"),
        ("llama2", {"edit": _twice}, "'model.norm.weight' is also there by the name 'model.norm.weight'"),
        ("mixtral", {"edit": _fewer_experts}, "has no tensor model.layers.0.block_sparse_moe.experts.4.w3.weight"),
        ("mixtral", {"edit": _deep}, "'blk.0.ffn_up_exps.weight' has the shape [1, 5, 72, 64]"),
        (
            "qwen2",
            {"kinds": {"output_norm.weight": "Q8_0"}},
            "that are quantised (supported: F32, BF16, F16): model.norm.weight (Q8_0)",
        ),
        ("qwen2", {"kinds": {"blk.2.attn_k.bias": "Q4_0"}}, "model.layers.2.self_attn.k_proj.bias (Q4_0)"),
        (
            "gemma3",
            {"kinds": {"output_norm.weight": "F16"}},
            "added in another type than F32: model.norm.weight (F16)",
        ),
    ],
)
def test_a_file_of_another_model_is_refused(
    written: Written, variant: str, options: dict[str, Any], words: str
) -> None:
    path = written(variant, **options)
    with pytest.raises(CheckpointError) as caught:
        check_tensors(load_spec(path), stored_tensors(path))
    assert words in str(caught.value) and "\n" not in str(caught.value)
