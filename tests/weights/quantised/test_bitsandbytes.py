"""NF4 and FP4 of bitsandbytes stay codes if rows are whole blocks of 64 values."""

from pathlib import Path

import pytest
import torch

from penstock.config import Split
from penstock.families import load_spec, shard
from penstock.families.shard import CannotSplit
from tests.weights.files import edit
from tests.weights.packed import needs_native
from tests.weights.quantised.conftest import Source
from tests.weights.quantised.test_load import PACKED, assert_same, load_fp32, planned_bytes
from tests.weights.quantised.test_refusals import MODULE, refusal
from tests.weights.quantised.writers import BNB4, KINDS, Kind, bnb4, change_config, write_pair


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_whole_blocks_stay_codes(source: Source, tmp_path: Path, kind: str, moe: bool, packed: str) -> None:
    quantised, values = write_pair(source(moe=moe, intermediate=128, hidden=128), tmp_path, KINDS[kind])
    assert_same(quantised, values, packed)
    stored = [fmt for p in load_spec(quantised).parameters for fmt in p.stored if fmt]
    assert {(fmt.name, fmt.codes, fmt.bits_per_weight) for fmt in stored} == {(kind.upper(), kind, 4.5)}


@needs_native
@pytest.mark.parametrize("packed", ["packed", "device"])
def test_they_take_four_and_a_half_bits(source: Source, tmp_path: Path, packed: str) -> None:
    quantised, _ = write_pair(source(intermediate=256, hidden=128), tmp_path, KINDS["nf4"])
    spec = load_spec(quantised)
    got = load_fp32(quantised, spec, packed)
    held = sum(got[p.name].nbytes for p in spec.parameters if p.kind != "vector")
    assert held == planned_bytes(quantised, spec, packed)
    down = got["layers.0.down.weight"]
    assert down.nbytes * 8 == 4.5 * 128 * 256


@pytest.mark.parametrize("split", [Split(2), Split(1, 2), Split(2, 1, True)], ids=str)
def test_ranks_have_their_parts(source: Source, tmp_path: Path, split: Split) -> None:
    folders = write_pair(source(moe=split.expert, intermediate=256, hidden=128), tmp_path, KINDS["nf4"])
    assert_same(*folders, "", split)


def test_ranks_cannot_divide_blocks(source: Source, tmp_path: Path) -> None:
    quantised, _ = write_pair(source(intermediate=192, hidden=128), tmp_path, KINDS["nf4"])
    with pytest.raises(CannotSplit, match=r"\(layers.0.down.weight, NF4\) into 96, which are no blocks of 64"):
        shard(load_spec(quantised), Split(2).places[0])


@pytest.mark.parametrize("packed", PACKED)
def test_larger_blocks_may_go_on_in_the_next_row(source: Source, tmp_path: Path, packed: str) -> None:
    kind = Kind(bnb4("nf4", nested=True, block=256), KINDS["nf4"].config)
    assert_same(*write_pair(source(intermediate=192, hidden=128), tmp_path, kind), packed, block=256)


def test_smaller_blocks_are_refused(source: Source, tmp_path: Path) -> None:
    kind = Kind(bnb4("nf4", nested=False, block=32), KINDS["nf4"].config)
    quantised, _ = write_pair(source(intermediate=192, hidden=128), tmp_path, kind)
    assert "has blocks of 32 values; expected a multiple of 64" in refusal(quantised)


def test_files_that_contradict_config_json_are_refused(source: Source, tmp_path: Path) -> None:
    quantised, _ = write_pair(source(intermediate=192, hidden=128), tmp_path, KINDS["nf4"])
    edit(quantised, lambda tensors: tensors[f"{MODULE}.weight.quant_map"].copy_(torch.linspace(-1, 1, 16)))
    assert f"'{MODULE}.weight.quant_map' has other values than those of NF4" in refusal(quantised)
    change_config(quantised, quantization_config=BNB4)  # whose default is FP4
    assert "is U8 without codes, but config.json says that it is quantised (FP4)" in refusal(quantised)
    change_config(quantised, quantization_config=BNB4 | {"bnb_4bit_quant_type": "af4"})
    assert "bnb_4bit_quant_type 'af4' is not supported; supported: fp4 or nf4" in refusal(quantised)
