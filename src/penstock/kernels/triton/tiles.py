"""How products are divided among programs: by tiles, and along k. Nothing is tuned while serving."""

from typing import NamedTuple

import torch
import triton

MULTIPROCESSORS = 132  # of an H100 or H200: what the tiling of k aims to keep busy,
WAVES = 2  # so many times over
MOST_PARTS = 8
LEAST_K = 512  # of a part


class Tile(NamedTuple):
    rows: int
    columns: int
    warps: int
    stages: int  # of loads in flight


TILES = {
    16: Tile(16, 64, 4, 5),  # few rows: the weights' bytes are what counts, and many programs to ask for them
    32: Tile(32, 64, 4, 4),
    64: Tile(64, 128, 4, 4),
    128: Tile(128, 128, 8, 3),
}
FIXED = TILES[64]  # for every number of rows, where bits must not depend on it: tensor cores still wait for the weights


def precision(dtype: torch.dtype) -> str:
    """Of products of tiles of a dtype, as tl.dot names it. Of fp32 in three products by tensor cores, which lose its
    last bit or two: without them a tile's operands would fill the registers several times over."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


class ProductTiling(NamedTuple):
    """Of a product."""

    tile: Tile
    tiles: tuple[int, int]  # along rows and columns
    parts: int  # that k is divided into

    def span(self, length: int, unit: int) -> int:
        """Of a part of what is so long and divided into them: a multiple of `unit`."""
        span: int = triton.cdiv(triton.cdiv(length, unit), self.parts) * unit
        return span


def select_tile(rows: int) -> Tile:
    """The least tile that holds all rows, or the largest."""
    return next((tile for most, tile in TILES.items() if rows <= most), TILES[128])


def tile_product(rows: int, n: int, k: int, columns: int = 0, *, fixed: bool = False) -> ProductTiling:
    """Of [rows, k] times [k, n], with tiles of so many columns, or the usual. A fixed one is the same for any rows."""
    tile = FIXED if fixed else select_tile(rows)
    if columns:
        tile = tile._replace(columns=columns)
    tiles = triton.cdiv(rows, tile.rows), triton.cdiv(n, tile.columns)
    return ProductTiling(tile, tiles, parts_of(tiles[1] * (1 if fixed else tiles[0]), k))


def parts_of(programs: int, k: int) -> int:
    """Into how many parts k is divided where so many programs would have all of it. A power of two: few to compile."""
    wanted = min(MULTIPROCESSORS * WAVES // max(programs, 1), k // LEAST_K, MOST_PARTS)
    return 1 << (max(wanted, 1).bit_length() - 1)
