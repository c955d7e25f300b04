"""FlashInfer as a provider of attention, with a stand-in for the library: see flashinfer_library.py."""

import gc
import importlib.metadata
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config import ConfigError, EngineConfig
from penstock.kernels import AttentionBatch, CannotQuantize, Needs, Platform, check_attention, check_kv_dtype
from penstock.kernels import flashinfer as provider
from penstock.kernels.attention import ReferenceAttention, run_attention
from penstock.kernels.flashinfer import FlashInferAttention, FlashInferPlan, library
from penstock.kernels.ops import PAGED_ATTENTION
from penstock.messages import Window
from penstock.runtime.loading import gpu as load_device
from penstock.runtime.loading.gpu import load_device_runner
from tests.kernels.flashinfer_library import BatchPrefillWithPagedKVCacheWrapper
from tests.runtime.loading.test_load_device import Memory
from tests.runtime.mirror_device import MirrorAttention, MirrorDevice

GPU = Platform("cuda", "9.0")
ASKED = Needs(torch.bfloat16, head_dims=(128,), attention="flashinfer")


class Wrappers:
    """The wrappers that a provider has made."""

    def __init__(self) -> None:
        self.made: list[BatchPrefillWithPagedKVCacheWrapper] = []

    def __call__(self, *arguments: Any, **named: Any) -> BatchPrefillWithPagedKVCacheWrapper:
        self.made.append(BatchPrefillWithPagedKVCacheWrapper(*arguments, **named))
        return self.made[-1]


def attention() -> tuple[FlashInferAttention, Wrappers]:
    wrappers = Wrappers()
    return FlashInferAttention(MirrorAttention(), wrappers), wrappers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_agrees_with_the_reference(dtype: torch.dtype) -> None:
    """Table entries of blocks outside the window are ignored: they name pages that do not exist."""
    ours, wrappers = attention()
    for query, keys, values, batch, *scores in PAGED_ATTENTION.inputs(dtype, 0):
        if scores[1:] != [0.0, None] or batch.window.chunked:  # see Needs.plain_scores
            continue
        want = run_attention(ReferenceAttention(), (query, keys, values, batch, *scores))
        tables = batch.block_tables.copy()
        for table, first, context in zip(tables, batch.first_seen() // 16, batch.context_lens, strict=True):
            table[:first] = table[-(-context // 16) :] = 10**6
        got = run_attention(ours, (query, keys, values, replace(batch, block_tables=tables), *scores))
        largest = want.abs().max().item() if want.numel() else 0.0
        torch.testing.assert_close(got, want, rtol=0.0, atol=PAGED_ATTENTION.tolerance[dtype] * largest)
    assert sum(wrapper.plans for wrapper in wrappers.made) > 5
    assert len(wrappers.made) == 1  # reused, one plan after the other


def step(*lens: tuple[int, int], window: int = 0) -> AttentionBatch:
    queries, contexts = np.array(lens, np.int64).T
    tables = np.arange(1, 1 + 4 * len(lens)).reshape(len(lens), 4)
    return AttentionBatch(16, Window(window), np.concatenate([[0], np.cumsum(queries)]), contexts, tables)


def test_layers_share_a_plan_and_steps_that_are_held_have_wrappers_of_their_own() -> None:
    ours, wrappers = attention()
    pages = torch.randn(9, 2, 2, 16, 64, dtype=torch.bfloat16)
    keys, values = pages[:, 0], pages[:, 1]
    steps = [ours.plan(step((5, 20), (1, 33))), ours.plan(step((7, 7), (2, 30), window=4))]
    wide, narrow = (torch.randn(6, heads, 64, dtype=torch.bfloat16) for heads in (4, 2))
    other = torch.randn(9, 4, 64, dtype=torch.bfloat16)

    def results(first: FlashInferPlan, second: FlashInferPlan) -> list[torch.Tensor]:
        return [
            ours(wide, keys, values, first, 0.125),
            ours(wide, keys, values, first, 0.125),
            ours(wide, keys, values, first, 0.25),  # a layer with another scale, and one with other heads
            ours(narrow, keys, values, first, 0.125),
            ours(other, keys, values, second, 0.125),
        ]

    one, again = results(*steps), results(*steps)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert torch.equal(one[0], one[1]) and not torch.equal(one[0], one[2])
    assert [wrapper.plans for wrapper in wrappers.made] == [1, 1, 1, 1]
    steps.clear()
    gc.collect()
    third = ours.plan(step((6, 6)))
    ours(wide, keys, values, third, 0.125)
    assert sorted(wrapper.plans for wrapper in wrappers.made) == [1, 1, 1, 2]


def test_a_step_without_prompts_is_not_planned() -> None:
    ours, wrappers = attention()
    pages = torch.randn(9, 2, 2, 16, 64, dtype=torch.bfloat16)
    batch, query = step((1, 20), (1, 33)), torch.randn(2, 4, 64, dtype=torch.bfloat16)
    prepared = ours.prepare(batch, pages[:, 0])
    assert not isinstance(prepared, FlashInferPlan)
    got = ours(query, pages[:, 0], pages[:, 1], prepared, 0.125)
    torch.testing.assert_close(got, ReferenceAttention()(query, pages[:, 0], pages[:, 1], batch, 0.125))
    assert not wrappers.made


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"paged_kv_indptr": [0, 2]}, "batch_size + 1"),
        ({"paged_kv_indptr": [0, 2, 6]}, "paged_kv_indptr[-1]"),
        ({"paged_kv_last_page_len": [17, 1]}, "page_size"),
        ({"qo_indptr": [0, 40, 41]}, "no shorter"),
        ({"q_data_type": torch.float32}, "no kernel"),
        ({"kv_data_type": torch.float8_e4m3fn}, "no kernel"),
        ({"num_kv_heads": 3}, "multiple"),
    ],
)
def test_the_stand_in_refuses_what_does_not_fit(changes: dict[str, Any], words: str) -> None:
    wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(64, dtype=torch.uint8), "HND")
    with pytest.raises(RuntimeError, match="before plan"):
        wrapper.run(torch.zeros(6, 4, 64), (torch.zeros(9, 2, 16, 64),) * 2)
    arrays = {
        "qo_indptr": [0, 5, 6],
        "paged_kv_indptr": [0, 2, 5],
        "paged_kv_indices": [1, 2, 3, 4, 5],
        "paged_kv_last_page_len": [4, 1],
    }
    sizes = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64, "page_size": 16, "causal": True}
    given = {**arrays, **sizes, "q_data_type": torch.bfloat16, **changes}
    given |= {name: torch.tensor(given[name], dtype=torch.int32) for name in arrays}
    with pytest.raises(ValueError) as caught:
        wrapper.plan(**given)
    assert words in str(caught.value)


# -- choosing it ------------------------------------------------------------------------------------------------------


def test_it_computes_where_it_is_asked_for_and_can() -> None:
    def chosen(**changes: Any) -> str:
        return PAGED_ATTENTION.select(GPU, replace(ASKED, **changes)).name

    assert chosen() == "flashinfer"
    assert chosen(attention="auto") == chosen(attention="triton") == "triton"
    assert chosen(head_dims=(128, 96)) == chosen(dtype=torch.float32) == "triton"
    assert chosen(deterministic=True) == "triton_fixed"
    assert PAGED_ATTENTION.select(Platform("cpu", "AVX2"), ASKED).name == "torch"


def test_fp8_pages_are_not_for_it() -> None:
    with pytest.raises(CannotQuantize, match=r"fp8 needs the attention of our GPU kernels.* it is flashinfer"):
        check_kv_dtype(GPU, ASKED, "float8_e4m3fn")


def install(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    """Install an empty module as the library, with this version."""

    def version(name: str) -> str:
        if name != "flashinfer-python" or not found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(provider, "version", version)
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))


@pytest.mark.parametrize("found", ["0.6.0", "0.7.2.post1", "1.0rc1"])
def test_versions_that_will_do(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, found)
    check_attention(ASKED)
    assert library() is sys.modules["flashinfer"]


@pytest.mark.parametrize(("found", "words"), [("", "is not installed"), ("0.5.9", "0.5.9, too old")])
def test_a_library_that_is_missing_or_too_old_is_an_error_with_the_remedy(
    found: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, found)
    with pytest.raises(ConfigError) as caught:
        check_attention(ASKED)
    assert words in str(caught.value)
    assert "pip install 'flashinfer-python>=0.6', or set --attention-backend triton" in str(caught.value)
    check_attention(replace(ASKED, attention="auto"))


def test_it_is_missed_before_weights_are_read(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "")
    monkeypatch.setattr(provider, "HEAD_DIMS", (48,))
    monkeypatch.setattr(load_device, "load_parameters", None)
    folder = tiny_checkpoint("qwen3", dtype="bfloat16")
    settings = EngineConfig(model=str(folder), name="tiny", device="cuda", depth=2, attention_backend="flashinfer")
    with pytest.raises(ConfigError, match="not installed"):
        load_device_runner(settings, MirrorDevice(), GPU, Memory(), progress=False)


def test_a_library_that_cannot_be_imported_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.7.2")
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match="importing it fails"):
        check_attention(ASKED)


def test_heads_that_it_has_nothing_for_are_said_to_be_tritons(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, "")
    with caplog.at_level(logging.WARNING):
        check_attention(replace(ASKED, head_dims=(96, 128, 96)))
    (record,) = caplog.records
    assert record.getMessage() == (
        "attention is computed by Triton: FlashInfer supports head sizes 64, 128, 256, and the model has 96"
    )
