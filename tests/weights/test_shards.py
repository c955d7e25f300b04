"""The ranks' weights together are the model's, each rank reads its own alone, and the whole checkpoint is checked."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from penstock.config import Split
from penstock.config.weights import COLUMNS, LINE_BYTES
from penstock.families import ModelSpec, shard
from penstock.families.checkpoint.stored import CheckpointError
from penstock.kernels import Needs, detect_platform, select_packing
from penstock.kernels.native.packer import NativePacking
from penstock.kernels.native.packing import PackedWeight
from penstock.weights import load, reads
from penstock.weights.checkpoint import tensor_shapes
from penstock.weights.load import load_parameters
from penstock.weights.matrices import MatrixReader
from tests.families.divisible import CONFIGS, spec_of, stacked_shapes
from tests.often import often
from tests.weights.files import edit

needs_native = pytest.mark.skipif(not detect_platform().isa, reason="no native kernels for this machine")
SPLITS = [Split(2), Split(1, 2), Split(4, 2), Split(2, 5)]
EXPERT_SPLITS = [Split(2, 1, True), Split(4, 3, True)]


def write(spec: ModelSpec, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint of random tensors, as a spec says."""
    generator = torch.Generator().manual_seed(1)
    shapes = stacked_shapes(tensor_shapes(spec))
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def load_ranks(folder: Path, spec: ModelSpec, split: Split, **options: Any) -> list[dict[str, Any]]:
    dtype = options.pop("dtype", torch.float32)
    return [load_parameters(folder, shard(spec, place), dtype, whole=spec, **options) for place in split.places]


# on each rank
WHOLE = ("router", "choice", "expert_scales", "shared.gate", "output_scale", "query_down", "latent", "key_rope")


def joined(spec: ModelSpec, number: int, name: str, parts: Sequence[Tensor]) -> Tensor:
    """The whole of a parameter of a layer from the parts of its tensor ranks, expert by expert."""
    kind = name.rpartition(".")[0]
    if kind in ("q_norm", "k_norm") and getattr(spec.layers[number].attention, "qk_norm", "") == "centered":
        return torch.cat(list(parts))  # each head's own
    if kind.endswith("norm") or kind in WHOLE:
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    if kind == "qkv":
        attention = spec.layers[number].attention
        q, kv = (width // len(parts) for width in (attention.query_width, attention.kv_width))
        return torch.cat([torch.cat(halves) for halves in zip(*(p.split([q, kv, kv]) for p in parts), strict=True)])
    if kind in ("output", "down", "shared.down", "experts.down"):
        return torch.cat(list(parts), -1)
    moe = next((layer.moe for layer in spec.layers if layer.moe), None)
    if kind in ("up", "sinks", "query", "query_rope", "key_up", "value_up"):
        return torch.cat(list(parts))
    blocks = 2 * (moe.num_experts if moe and kind.startswith("experts") else 1)
    return torch.cat([part.view(blocks, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 1)


def assembled(spec: ModelSpec, split: Split, ranks: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """All parameters of the model from those of the ranks."""
    whole: dict[str, Tensor] = {}
    first = 0
    for stage in range(split.pipeline):
        group = ranks[stage * split.tensor : (stage + 1) * split.tensor]
        for name in group[0]:
            parts = [rank[name] for rank in group if name in rank]
            if not name.startswith("layers."):
                whole[name] = torch.cat(parts) if name in ("embedding.weight", "head.weight") else parts[0]
                continue
            _, number, rest = name.split(".", 2)
            once = ("output.bias", "down.bias", *(() if split.expert else ("experts.down.bias",)))
            if rest in once:
                value = parts[0]
                assert len(parts) == 1
            elif split.expert and rest.startswith("experts."):
                value = torch.cat(parts)
            else:
                value = joined(spec, first + int(number), rest, parts)
            whole[f"layers.{first + int(number)}.{rest}"] = value
        first += sum(name.endswith(".output.weight") for name in group[0])
    return whole


CASES = [
    (family, split)
    for family in CONFIGS
    for split in SPLITS + (EXPERT_SPLITS if family.endswith(("moe", "mixtral", "gpt_oss")) else [])
]
# Each family in the most parts, and two families in each way.
OFTEN = [(family, split) for family, split in CASES if family in ("llama", "qwen2_moe") or split.tensor == 4]


@pytest.mark.parametrize(("family", "split"), often(CASES, OFTEN), ids=str)
def test_the_ranks_together_have_the_whole_model(
    family: str, split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "READ_BYTES", 3000)  # many reads, the last of each tensor shorter
    spec = spec_of(family)
    write(spec, tmp_path)
    want = load_parameters(tmp_path, spec, torch.float32)
    got = assembled(spec, split, load_ranks(tmp_path, spec, split))
    if spec.tie_embeddings and split.pipeline > 1:
        assert torch.equal(got.pop("head.weight"), want["embedding.weight"])
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_parts_are_converted_as_the_whole_is(stored: torch.dtype, tmp_path: Path) -> None:
    spec, split = spec_of("qwen2_moe"), Split(2, 2)
    write(spec, tmp_path, stored)
    want = load_parameters(tmp_path, spec, torch.bfloat16)
    got = assembled(spec, split, load_ranks(tmp_path, spec, split, dtype=torch.bfloat16))
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


@contextmanager
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What is read of tensors within, by system calls and from mapped pages."""
    counts: list[int] = []
    preadv, parts = os.preadv, reads._read_parts

    def counted_preadv(*arguments: Any) -> int:
        counts.append(preadv(*arguments))
        return counts[-1]

    def counted_parts(descriptor: int, target: NDArray[np.uint8], *arguments: Any) -> None:
        counts.append(target.nbytes)
        parts(descriptor, target, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", counted_preadv)
        patch.setattr(reads, "_read_parts", counted_parts)
        yield counts


@pytest.mark.parametrize(("family", "split"), often(CASES, OFTEN), ids=str)
def test_a_rank_reads_no_byte_that_is_not_its_own(
    family: str, split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(family)
    write(spec, tmp_path)
    for place in split.places:
        mine = shard(spec, place)
        with bytes_read(monkeypatch) as counts:
            load_parameters(tmp_path, mine, torch.float32, whole=spec)
        assert sum(counts) == 4 * mine.num_parameters()


@needs_native
def test_native_threads_read_whole_rows_and_leave_columns(tmp_path: Path) -> None:
    spec, split = spec_of("llama"), Split(2)
    write(spec, tmp_path)
    for place in split.places:
        mine = shard(spec, place)
        reader = MatrixReader(tmp_path, mine, NativePacking("float32", "none", 32, "avx2"), whole=spec)
        reader.close()
        left = sum(piece.bytes for piece in reader.unread)
        assert {piece.source.name.split(".")[-2] for piece in reader.unread} == {"o_proj", "down_proj"}
        vectors = sum(parameter.size for parameter in mine.parameters if parameter.kind == "vector")
        assert reader.bytes + left == 4 * (mine.num_parameters() - vectors)


def by_block(weight: PackedWeight) -> list[Tensor]:
    """The lines of a weight and its scales and minima, each [blocks, along k, bytes or columns]."""
    blocks = weight.lines.numel() // LINE_BYTES * weight.format.values // weight.k
    parts = [part for name, part in weight.parts.items() if part is not None and name != "lines"]
    return [weight.lines.view(blocks, -1, LINE_BYTES), *(part.reshape(blocks, -1, COLUMNS) for part in parts)]


@needs_native
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("split", [Split(2), Split(2, 2)], ids=str)
def test_packed_parts_are_parts_of_the_packed_whole(split: Split, quantization: str, tmp_path: Path) -> None:
    """Where parts are whole blocks and whole groups, packing does not see the division. The scales of int16 are of a
    whole row, so a part of the columns has scales of its own."""
    changes = {"num_attention_heads": 8, "head_dim": 64, "num_key_value_heads": 4}  # int4: 256 columns for each rank
    spec = spec_of("llama", **changes, hidden_size=256, intermediate_size=512, vocab_size=320)
    write(spec, tmp_path, torch.bfloat16)
    packing = select_packing(detect_platform(), Needs(torch.bfloat16), quantization)
    whole = load_parameters(tmp_path, spec, torch.bfloat16, packing=packing)
    ranks = load_ranks(tmp_path, spec, split, dtype=torch.bfloat16, packing=packing)
    compared = 0
    for place, rank in zip(split.places, ranks, strict=True):
        first = 3 * place.stage  # 5 layers in two stages: 3 and 2
        for name, mine in rank.items():
            if not isinstance(mine, PackedWeight):
                continue
            number = name.split(".")[1]
            theirs = whole[name.replace(number, str(first + int(number)), 1) if number.isdigit() else name]
            columns = mine.k < theirs.k
            if name.endswith("qkv.weight") or (columns and mine.column_scales is not None):
                continue  # q, k and v lie apart in the whole
            for part, of in zip(by_block(mine), by_block(theirs), strict=True):
                cut = (slice(None), slice(place.tensor_rank * part.shape[1], None)) if columns else ()
                cut = cut or (slice(place.tensor_rank * part.shape[0], None),)
                assert torch.equal(part, of[cut][: part.shape[0], : part.shape[1]]), name
            compared += 1
    assert compared >= 3 * len(ranks)


@needs_native
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize(("family", "split"), [("qwen2_moe", Split(2, 2)), ("qwen3_moe", Split(4, 1, True))], ids=str)
def test_parts_packed_while_read_are_parts_packed_at_once(
    family: str, split: Split, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "READ_BYTES", 3000)
    spec = spec_of(family)
    write(spec, tmp_path, torch.bfloat16)
    packing = select_packing(detect_platform(), Needs(torch.bfloat16), quantization)
    dense = load_ranks(tmp_path, spec, split, dtype=torch.bfloat16)
    packed = load_ranks(tmp_path, spec, split, dtype=torch.bfloat16, packing=packing)
    for place, values, weights in zip(split.places, dense, packed, strict=True):
        for parameter in shard(spec, place).parameters:
            if parameter.kind == "vector":
                continue
            packer = packing(parameter.shape, parameter.kind, parameter.experts, sensitive=parameter.sensitive)
            packer.put(0, values[parameter.name])
            each = zip(weights[parameter.name].tensors, packer.finish().tensors, strict=True)
            assert all(torch.equal(got, want) for got, want in each), parameter.name


def test_every_rank_checks_the_whole_checkpoint(tmp_path: Path) -> None:
    spec = spec_of("qwen3")
    write(spec, tmp_path)
    edit(tmp_path, lambda t: t.pop("model.layers.4.mlp.up_proj.weight"))
    for place in Split(2, 2).places:
        with pytest.raises(CheckpointError, match=r"has no tensor model\.layers\.4\.mlp\.up_proj\.weight"):
            load_parameters(tmp_path, shard(spec, place), torch.float32, whole=spec)


def test_a_tied_head_that_differs_is_refused_by_the_rank_whose_row_it_is(tmp_path: Path) -> None:
    spec, split = spec_of("qwen3"), Split(2, 3)
    write(spec, tmp_path)

    def differ(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][200, 3] += 1

    edit(tmp_path, differ)
    for place in split.places:
        # The second half of the vocabulary, in the stages that have the embedding or the head.
        holds_it = place.tensor_rank == 1 and (place.first or place.last)
        refusal = pytest.raises(CheckpointError, match=r"lm_head\.weight is tied to model\.embed_tokens")
        with refusal if holds_it else nullcontext():
            load_parameters(tmp_path, shard(spec, place), torch.float32, whole=spec)


def test_a_file_that_shrinks_while_columns_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("llama")
    path = write(spec, tmp_path) / "model.safetensors"

    def shrink(*arguments: object) -> None:
        os.truncate(path, path.stat().st_size // 2)

    monkeypatch.setattr(load, "check_tensors", shrink)
    mine = shard(spec, Split(2).places[1])
    only = tuple(p for p in mine.parameters if p.name.endswith("down.weight"))
    with pytest.raises(CheckpointError, match="ended at byte"):
        load_parameters(tmp_path, replace(mine, parameters=only), torch.float32, whole=spec)
