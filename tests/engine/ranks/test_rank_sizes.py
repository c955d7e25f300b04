"""What each rank holds, and the KV blocks for which all of them have room."""

import json
from pathlib import Path

import pytest

from penstock.config import DoesNotFit, EngineConfig
from penstock.engine.ranks.sizes import size_model

GIB = 1 << 30
MIXTURE = {
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 307,
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "max_position_embeddings": 512,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    return tmp_path


def config(folder: Path, **settings: object) -> EngineConfig:
    return EngineConfig(model=str(folder), name="tiny", max_model_len=512, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("split", "parts"),
    [
        ({"pipeline_parallel_size": 2}, ("layers 0 to 1 of 3", "layers 2 to 2 of 3")),
        (
            {"tensor_parallel_size": 2},
            ("layers 0 to 2 of 3, heads 0 to 1 of 4", "layers 0 to 2 of 3, heads 2 to 3 of 4"),
        ),
        (
            {"tensor_parallel_size": 2, "expert_parallel": True},
            (
                "layers 0 to 2 of 3, heads 0 to 1 of 4, experts 0 to 1 of 4",
                "layers 0 to 2 of 3, heads 2 to 3 of 4, experts 2 to 3 of 4",
            ),
        ),
    ],
    ids=["stages", "heads", "experts"],
)
def test_what_a_rank_holds_is_said(split: dict[str, object], parts: tuple[str, ...], folder: Path) -> None:
    assert size_model(config(folder, **split), [GIB, GIB]).parts == parts


def test_all_have_as_many_blocks_as_the_one_with_the_least_room(folder: Path) -> None:
    asked = config(folder, tensor_parallel_size=2, max_num_seqs=4096)
    plenty, less = size_model(asked, [GIB, GIB]).num_blocks, size_model(asked, [GIB // 2, GIB]).num_blocks
    assert less == size_model(asked, [GIB // 2, GIB // 2]).num_blocks  # the first has the sampler as well
    assert 0 < less[0] < size_model(asked, [GIB, GIB // 2]).num_blocks[0] < plenty[0]
    with pytest.raises(DoesNotFit):
        size_model(asked, [GIB, 1 << 10])
