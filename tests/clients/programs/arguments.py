"""The arguments of a program: the URL and the name of a chat model, those of an embedding model, a file with texts
and the embeddings that transformers gives for them, and "gateway" if the chat model is at a provider of the server."""

import json
import sys
from pathlib import Path
from typing import Any

SERVER, MODEL, EMBEDDER_SERVER, EMBEDDER, _FILE = sys.argv[1:6]
_EXPECTED: dict[str, Any] = json.loads(Path(_FILE).read_text())
GATEWAY = "gateway" in sys.argv[6:]
TEXTS: list[str] = _EXPECTED["texts"]
EMBEDDINGS: list[list[float]] = _EXPECTED["embeddings"]


def far(rows: Any, expected: Any) -> float:
    """The largest difference between numbers of two lists of embeddings."""
    assert len(rows) == len(expected)
    pairs = [pair for row, other in zip(rows, expected, strict=True) for pair in zip(row, other, strict=True)]
    return max(abs(one - other) for one, other in pairs)
