"""The memory that keys and values live in."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.families import ModelSpec
from penstock.messages import BlockCopy
from penstock.models import LayerCache

SCALE_BYTES = 4  # a float for each token and head
SCALED = (torch.int8, torch.float8_e4m3fn)  # dtypes of pages with scales
NULL_BLOCK = 0  # always zero; padding reads it, and nobody writes it


class KVPages:
    """One tensor per KV group: [num_blocks, layers of the group, 2, kv_heads, block_size, head_dim].

    A page, one entry of the first dimension, is a contiguous piece that holds a block's tokens for all layers of its
    group; how they lie in it is the attention's. In int8 and fp8 a head's part of a block has the tokens' scales behind
    it, which widens the last dimension. On a CPU the kernel commits memory when it is first written. A stage of a
    pipeline may have no layer of a group, whose pages are empty there.

    What a page held before it is given to a sequence cannot matter: where attention multiplies even masked values (by
    0, and 0 * NaN is NaN) `clear` zeroes it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """`num_blocks` per KV group, the null block included."""
        self.block_size = block_size
        self.groups: list[Tensor] = []
        layers: dict[int, LayerCache] = {}
        for group, count in enumerate(num_blocks):
            indices = spec.group_layers(group)
            if not indices:
                self.groups.append(torch.empty(count, 0, dtype=dtype, device=device))
                continue
            shape = spec.layers[indices[0]]
            width = shape.head_dim + (SCALE_BYTES if dtype in SCALED else 0)
            size = (count, len(indices), 2, shape.num_kv_heads, block_size, width)
            pages = _memory(math.prod(size) * dtype.itemsize, torch.device(device)).view(dtype).view(size)
            pages[NULL_BLOCK] = 0
            self.groups.append(pages)
            for place, index in enumerate(indices):
                layers[index] = LayerCache(pages[:, place, 0], pages[:, place, 1])
        self.layers = tuple(layers[i] for i in range(len(spec.layers)))

    @property
    def bytes(self) -> int:
        return sum(pages.nbytes for pages in self.groups)

    def group_keys(self, group: int) -> Tensor | None:
        """Keys of the first layer of a group: all its layers have their shape and strides. None without a layer."""
        pages = self.groups[group]
        return pages[:, 0, 0] if pages.shape[1] else None

    def clear(self, group: int, blocks: Iterable[int]) -> None:
        """Zero blocks that were given to a sequence."""
        pages = self.groups[group]
        for block in blocks:
            pages[block].zero_()

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        for copy in copies:
            pages = self.groups[copy.group]
            pages[copy.target] = pages[copy.source]


def _memory(size: int, device: torch.device) -> Tensor:
    """uint8 [size]. On a CPU from NumPy, which asks for huge pages: a block's first use is then one page fault, not
    hundreds."""
    if device.type == "cpu":
        return torch.from_numpy(np.empty(size, np.uint8))
    return torch.empty(size, dtype=torch.uint8, device=device)
