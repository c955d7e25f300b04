"""The memory of the KV cache: an arena owns it, and a model's pages are pieces of it."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.families import ModelSpec
from penstock.messages import BlockCopy
from penstock.models import LayerCache

ALIGNMENT = 512  # bytes, of each piece of an arena
LINE = 64  # bytes, of a processor's caches
NULL_BLOCK = 0  # always zero; padding reads it, and nothing writes to it


class KVArena:
    """Memory on one device, handed out in pieces. The pages of several models can share one arena."""

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        """On a CPU the kernel commits a page of this memory when it is first written."""
        self._memory = allocate(size, torch.device(device))
        self._taken = 0

    @property
    def left(self) -> int:
        """Bytes that have not been handed out."""
        return len(self._memory) - self._taken

    def take(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor that nothing else uses. ValueError if it does not fit."""
        count = math.prod(size) * dtype.itemsize
        if _aligned(count) > self.left:
            raise ValueError(f"the KV arena has {self.left} bytes left, and pages of {count} bytes do not fit")
        piece = self._memory[self._taken : self._taken + count]
        self._taken += _aligned(count)
        return piece.view(dtype).view(*size)


class KVPages:
    """The pages of one model: per KV group a tensor [num_blocks, layers of the group, planes, heads, rows, width]; and
    its `states` [rows of the batch, layers with a state, width].

    A page is one entry of the first dimension: a contiguous piece with a block's tokens for all layers of the group.
    The last four dimensions are PageShape.size; the attention kernels decide how tokens lie in them. A pipeline stage
    may have no layer of a group: its pages are empty there.

    A sequence may get a page or a state with any content: layers read only what their sequence has written.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        arena: KVArena | None = None,
        rows: int = 0,
    ) -> None:
        """`num_blocks` per KV group, the null block included. The memory is taken from `arena`, which decides the
        device; None: from a new arena of the right size. `rows` of the batch have states."""
        self.block_size = block_size
        sizes = page_sizes(spec, num_blocks, block_size, dtype)
        if arena is None:
            arena = KVArena(arena_bytes(spec, num_blocks, block_size, dtype), device)
        self.groups = [arena.take(size, dtype) for size in sizes]
        caches: dict[int, LayerCache] = {}
        for group, pages in enumerate(self.groups):
            pages[NULL_BLOCK] = 0
            for place, layer in enumerate(spec.group_layers(group)):
                caches[layer] = LayerCache(pages[:, place].unbind(1))
        shape = rows, len(spec.state_layers), spec.state_width
        self.states = allocate(math.prod(shape) * 4, torch.device(device)).view(torch.float32).view(shape)
        for place, layer in enumerate(spec.state_layers):
            caches[layer] = LayerCache((self.states[:, place],))
        self.layers = tuple(caches[spec.kv_layer(layer)] for layer in range(len(spec.layers)))

    @property
    def bytes(self) -> int:
        """The bytes of the pages, without states."""
        return sum(pages.nbytes for pages in self.groups)

    def group_keys(self, group: int) -> Tensor | None:
        """The first plane of the first layer of a group, which has the keys. All its layers have the same shape and
        strides. None without a layer."""
        pages = self.groups[group]
        return pages[:, 0, 0] if pages.shape[1] else None

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        for copy in copies:
            pages = self.groups[copy.group]
            pages[copy.target] = pages[copy.source]


def page_sizes(
    spec: ModelSpec, num_blocks: Sequence[int], block_size: int, dtype: torch.dtype
) -> list[tuple[int, ...]]:
    """The size of each KV group's tensor."""
    return [
        (count, len(spec.group_layers(group)), *spec.group_page(group).size(block_size, dtype.itemsize))
        for group, count in enumerate(num_blocks)
    ]


def arena_bytes(spec: ModelSpec, num_blocks: Sequence[int], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that the pages of a model take in an arena."""
    sizes = page_sizes(spec, num_blocks, block_size, dtype)
    return sum(_aligned(math.prod(size) * dtype.itemsize) for size in sizes)


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def allocate(size: int, device: torch.device) -> Tensor:
    """uint8 [size]. On a CPU from NumPy, which requests huge pages: a block's first use is then one page fault instead
    of hundreds. It begins with a cache line: vectors across two are slower."""
    if device.type != "cpu":
        return torch.empty(size, dtype=torch.uint8, device=device)
    memory = np.empty(size + LINE, np.uint8)
    first = -memory.ctypes.data % LINE
    return torch.from_numpy(memory[first : first + size])
