"""The memory of the KV cache and of states."""

import ctypes
import math
import mmap
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.families import ModelSpec
from penstock.messages import BlockCopy
from penstock.models import LayerCache

LINE = 64  # bytes, of a processor's caches
HUGE_PAGE, SMALL_PAGE = 2 << 20, mmap.PAGESIZE
NULL_BLOCK = 0  # always zero; padding reads it, and nothing writes to it

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


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
        rows: int = 0,
    ) -> None:
        """`num_blocks` per KV group, the null block included. `rows` of the batch have states."""
        self.block_size = block_size
        self.groups: list[Tensor] = []
        caches: dict[int, LayerCache] = {}
        for group, count in enumerate(num_blocks):
            layers, page = spec.group_layers(group), spec.group_page(group)
            pages = _allocate((count, len(layers), *page.size(block_size, dtype.itemsize)), dtype, device)
            pages[NULL_BLOCK] = 0
            self.groups.append(pages)
            for place, layer in enumerate(layers):
                caches[layer] = LayerCache(pages[:, place].unbind(1))
        self.states = _allocate((rows, len(spec.state_layers), spec.state_width), torch.float32, device)
        for place, layer in enumerate(spec.state_layers):
            caches[layer] = LayerCache((self.states[:, place],))
        self.layers = tuple(caches[spec.kv_layer(layer)] for layer in range(len(spec.layers)))

    @property
    def bytes(self) -> int:
        return sum(pages.nbytes for pages in self.groups)

    def group_keys(self, group: int) -> Tensor | None:
        """The first plane of the first layer of a group, which has the keys. All its layers have the same shape and
        strides. None without a layer."""
        pages = self.groups[group]
        return pages[:, 0, 0] if pages.shape[1] else None

    def trim(self, limits: Sequence[int]) -> None:
        """Give the memory of pages from these ids on back to the system, in whole huge pages, and read zeros from them
        until they are written. On the CPU only."""
        for pages, limit in zip(self.groups, limits, strict=True):
            page = pages.stride(0) * pages.itemsize
            first = pages.data_ptr() + limit * page
            begin, end = -(-first // HUGE_PAGE) * HUGE_PAGE, pages.data_ptr() + len(pages) * page
            size = (end - begin) // SMALL_PAGE * SMALL_PAGE
            if size > 0:
                _libc.madvise(begin, size, mmap.MADV_DONTNEED)

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        for copy in copies:
            pages = self.groups[copy.group]
            pages[copy.target] = pages[copy.source]


def _allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """An uninitialised tensor. On a CPU it is from NumPy, which requests huge pages: a block's first use is then one
    page fault instead of hundreds. It begins with a cache line: vectors across two are slower. The kernel commits a
    page of the memory when it is first written."""
    if torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + LINE, np.uint8)
    first = -memory.ctypes.data % LINE
    return torch.from_numpy(memory[first : first + size]).view(dtype).view(shape)
