"""KV pages: one contiguous piece per block, and views of it per layer."""

import torch

from penstock.families import spec_from_config
from penstock.messages import BlockCopy
from penstock.runtime.pages import KVPages
from tests.checkpoints import tiny_model


def make_pages() -> KVPages:
    config = tiny_model("gemma3_linear").config.to_dict() | {"architectures": ["Gemma3ForCausalLM"]}
    spec = spec_from_config(config)  # full, sliding, sliding, full
    return KVPages(spec, (6, 9), 4, torch.float32)


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


def test_clear_and_copy_touch_only_their_blocks() -> None:
    pages = make_pages()
    for group in pages.groups:
        group[:] = torch.arange(len(group)).view(-1, 1, 1, 1, 1, 1)
    pages.clear(0, [2, 5])
    pages.copy([BlockCopy(1, 7, 3), BlockCopy(0, 1, 2)])
    assert pages.groups[0][:, 0, 0, 0, 0, 0].tolist() == [0, 1, 1, 3, 4, 0]
    assert pages.groups[1][:, 1, 1, 1, 3, 23].tolist() == [0, 1, 2, 7, 4, 5, 6, 7, 8]


def test_the_null_block_is_zero_from_the_start() -> None:
    assert all(not group[0].any() for group in make_pages().groups)
