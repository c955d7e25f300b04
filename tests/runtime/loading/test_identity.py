"""What keys and values depend on besides tokens."""

from collections.abc import Callable
from pathlib import Path

import torch
from msgspec.structs import replace

from penstock.kernels import Needs, select_kernels
from penstock.runtime.loading import gpu
from penstock.runtime.loading.identity import identify
from tests.runtime.loading.test_load import config
from tests.runtime.mirror_device import PLAIN


def test_pages_of_another_type_or_layout_are_not_exchanged(tiny_checkpoint: Callable[..., Path]) -> None:
    """The weights are the same ones."""
    folder = tiny_checkpoint("qwen3")
    base = config(folder)
    variants = [
        base,
        replace(base, kv_cache_dtype="int8"),
        replace(base, kv_cache_dtype="fp8"),
        replace(base, block_size=2 * base.block_size),
    ]
    spec, kernels = gpu.load_spec(folder), select_kernels(PLAIN, Needs(torch.float32))
    found = [identify(spec, None, each, PLAIN, kernels).numerics for each in variants]
    assert len(set(found)) == len(found)
    assert found[0] == identify(spec, None, base, PLAIN, kernels).numerics
