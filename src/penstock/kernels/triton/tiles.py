"""The shapes of tiles of products, by how many rows there are. Chosen here once: nothing is tuned while serving."""

from typing import NamedTuple


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


def select_tile(rows: int) -> Tile:
    """The least tile that holds all rows, or the largest."""
    return next((tile for most, tile in TILES.items() if rows <= most), TILES[128])
