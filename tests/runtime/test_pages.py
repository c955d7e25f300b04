"""KV pages: one contiguous piece per block, and views of it per layer."""

import mmap
from pathlib import Path

import pytest
import torch

from penstock.families import spec_from_config
from penstock.messages import BlockCopy
from penstock.runtime.pages import HUGE_PAGE, KVPages
from tests.checkpoints import tiny_model


def make_pages(dtype: torch.dtype = torch.float32, device: str = "cpu", blocks: tuple[int, int] = (6, 9)) -> KVPages:
    config = tiny_model("gemma3_linear").config.to_dict() | {"architectures": ["Gemma3ForCausalLM"]}
    spec = spec_from_config(config)  # full, sliding, sliding, full
    return KVPages(spec, blocks, 4, dtype, device)


def test_a_page_holds_a_block_for_all_layers_of_its_group() -> None:
    pages = make_pages()
    assert [tuple(group.shape) for group in pages.groups] == [(6, 2, 2, 2, 4, 48), (9, 2, 2, 2, 4, 48)]
    assert all(group.is_contiguous() for group in pages.groups)
    for group in pages.groups:
        group[1:] = 0
    first, second, third, fourth = pages.layers
    first.keys[3, 1, 2] = 1.0
    fourth.values[3, 0, 0] = 2.0
    second.keys[3] = 3.0
    third.values[8] = 4.0
    full, sliding = pages.groups
    assert full[3, 0, 0, 1, 2].unique().tolist() == [1.0] and full[3, 1, 1, 0, 0].unique().tolist() == [2.0]
    assert sliding[3, 0, 0].unique().tolist() == [3.0] and sliding[8, 1, 1].unique().tolist() == [4.0]
    assert full.sum() == 48 * 3.0 and sliding.sum() == 2 * 4 * 48 * 7.0


def test_copies_touch_only_their_blocks() -> None:
    pages = make_pages()
    for group in pages.groups:
        group[:] = torch.arange(len(group)).view(-1, 1, 1, 1, 1, 1)
    pages.copy([BlockCopy(1, 7, 3), BlockCopy(0, 1, 2)])
    assert pages.groups[0][:, 0, 0, 0, 0, 0].tolist() == [0, 1, 1, 3, 4, 5]
    assert pages.groups[1][:, 1, 1, 1, 3, 23].tolist() == [0, 1, 2, 7, 4, 5, 6, 7, 8]


def test_the_null_block_is_zero_from_the_start() -> None:
    assert all(not group[0].any() for group in make_pages().groups)


def test_pages_in_fp8_have_scales_behind_each_heads_tokens() -> None:
    pages = make_pages(torch.float8_e4m3fn)
    assert [tuple(group.shape[-2:]) for group in pages.groups] == [(4, 48 + 4)] * 2
    keys = pages.layers[0].keys
    assert keys.view(torch.float32).shape[-1] == 13  # as the attention reads the scales
    pages.groups[0][1] = 1.5
    pages.copy([BlockCopy(0, 1, 5)])
    assert pages.groups[0].float().amax((1, 2, 3, 4, 5))[[0, 1, 5]].tolist() == [0.0, 1.5, 1.5]


def test_pages_lie_on_the_device_they_are_given() -> None:
    pages = make_pages(torch.bfloat16, "meta")
    assert all(group.device.type == "meta" for group in (*pages.groups, pages.layers[0].keys))
    assert pages.bytes == sum(count * 2 * 2 * 2 * 4 * 48 * 2 for count in (6, 9))


def resident() -> int:
    """Bytes of this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_trimmed_pages_give_their_memory_back_and_can_be_used_again() -> None:
    pages = make_pages(blocks=(10_001, 10_001))
    first, second = pages.groups
    first.fill_(1.0)
    second.fill_(2.0)
    before = resident()
    pages.trim((2_501, 5_001))
    size = first.nbytes * 0.75 + second.nbytes * 0.5
    assert before - resident() == pytest.approx(size, rel=0.05, abs=2 * HUGE_PAGE), size
    assert first[2_500].eq(1.0).all() and second[5_000].eq(2.0).all(), "below the limit nothing changes"
    assert first[-2].eq(0.0).all()
    first[-2] = 3.0
    assert first[-2].eq(3.0).all() and size > 20 << 20
