"""What the keys of the prefix cache depend on besides tokens."""

from collections.abc import Callable
from pathlib import Path

import torch
from msgspec.structs import replace

from penstock.kernels import Needs, select_kernels
from penstock.runtime.loading import gpu
from penstock.runtime.loading.cache_root import cache_root
from tests.runtime.loading.test_load import config
from tests.runtime.mirror_device import PLAIN


def test_pages_of_another_type_or_layout_have_other_keys(tiny_checkpoint: Callable[..., Path]) -> None:
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
    roots = [cache_root(spec, {"norm": torch.ones(4)}, each, PLAIN, kernels) for each in variants]
    assert len(set(roots)) == len(roots)
    assert roots[0] == cache_root(spec, {"norm": torch.ones(4)}, base, PLAIN, kernels)
