"""What a runner found it can hold."""

from collections.abc import Sequence

from penstock.config import EngineConfig
from penstock.families import ModelSpec
from penstock.messages import Capacity, KVGroup, MemoryRow
from penstock.models import Decoder
from penstock.runtime.pages import KVPages


def measured_capacity(
    spec: ModelSpec,
    config: EngineConfig,
    num_blocks: Sequence[int],
    model: Decoder,
    pages: KVPages,
    *,
    cache_root: str,
    memory: Sequence[MemoryRow],
) -> Capacity:
    """With the memory table as it was planned, but the weights as they were in fact packed."""
    groups = tuple(KVGroup(count, window) for count, window in zip(num_blocks, spec.windows, strict=True))
    measured = {"weights": model.nbytes, "KV cache": pages.bytes}
    rows = tuple(MemoryRow(row.name, measured.get(row.name, row.bytes), row.note) for row in memory)
    return Capacity(config.block_size, groups, config.depth, cache_root, spec.vocabulary, rows)
