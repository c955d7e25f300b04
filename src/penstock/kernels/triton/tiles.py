"""How products are divided among programs: by tiles, and along k. Nothing is tuned while serving."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton

MULTIPROCESSORS = 132  # of an H100 or H200
MOST_PARTS = 8
LEAST_K = 512  # of a part


class Tile(NamedTuple):
    rows: int
    columns: int
    warps: int
    stages: int  # of loads in flight
    waves: int = 2  # of programs: k is divided until each multiprocessor has so many


TILES = {
    16: Tile(16, 64, 4, 5),  # few rows: bound by the weights' bytes, so many programs load them
    32: Tile(32, 64, 4, 4),
    64: Tile(64, 128, 4, 4),
    128: Tile(128, 128, 8, 3),
}
FIXED = TILES[64]  # for any number of rows when bits must not depend on it; still bound by the weights' bytes


def precision(dtype: torch.dtype) -> str:
    """The precision of tl.dot for a dtype. fp32 is computed by three products on tensor cores, which loses the last bit
    or two. Without tensor cores, a tile's operands would need several times the registers."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


class ProductTiling(NamedTuple):
    """How a product is divided among programs."""

    tile: Tile
    tiles: tuple[int, int]  # along rows and columns
    parts: int  # of k

    def span(self, length: int, unit: int) -> int:
        """The length of a part, a multiple of `unit`, when `length` is divided into the parts."""
        span: int = triton.cdiv(triton.cdiv(length, unit), self.parts) * unit
        return span


def select_tile(rows: int, choices: Mapping[int, Tile] = TILES) -> Tile:
    """The smallest tile that holds all rows, or the largest tile."""
    return next((tile for most, tile in choices.items() if rows <= most), choices[128])


def tile_product(
    rows: int, n: int, k: int, choices: Mapping[int, Tile] = TILES, *, fixed: bool = False
) -> ProductTiling:
    """The tiling of [rows, k] times [k, n] by the smallest of the tiles that holds all rows, or the largest. A fixed
    one is the same for all rows."""
    tile = FIXED if fixed else select_tile(rows, choices)
    tiles = triton.cdiv(rows, tile.rows), triton.cdiv(n, tile.columns)
    return ProductTiling(tile, tiles, parts_of(tiles[1] * (1 if fixed else tiles[0]), k, tile.waves))


def parts_of(programs: int, k: int, waves: int) -> int:
    """The number of parts of k, when `programs` would cover the tiles. A power of two, so that few kernels are
    compiled."""
    wanted = min(MULTIPROCESSORS * waves // max(programs, 1), k // LEAST_K, MOST_PARTS)
    return 1 << (max(wanted, 1).bit_length() - 1)
