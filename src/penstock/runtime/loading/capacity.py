"""Computes the capacity that a runner reports to the engine."""

from collections.abc import Sequence

from penstock.config import EngineConfig
from penstock.families import ModelSpec
from penstock.messages import Capacity, Identity, Kept, KVGroup, MemoryRow
from penstock.models import LanguageModel
from penstock.runtime.pages import KVPages


def measured_capacity(
    spec: ModelSpec,
    config: EngineConfig,
    model: LanguageModel,
    pages: KVPages,
    *,
    identity: Identity,
    memory: Sequence[MemoryRow],
    exact_drafts: bool,
) -> Capacity:
    """The capacity of a runner. Its memory table is the planned one with real sizes of weights and KV cache."""
    groups = tuple(KVGroup(count, window) for count, window in zip(map(len, pages.groups), spec.windows, strict=True))
    measured = {"weights": model.nbytes, "KV cache": pages.bytes, "states": pages.states.nbytes}
    rows = tuple(MemoryRow(row.name, measured.get(row.name, row.bytes), row.note) for row in memory)
    return Capacity(
        config.block_size,
        groups,
        config.depth,
        identity,
        spec.vocabulary,
        rows,
        exact_drafts=exact_drafts,
        output="tokens" if spec.pooling is None else "vectors",
        keeps=_kept(spec),
        resizable=pages.groups != [] and pages.groups[0].device.type == "cpu",
    )


def _kept(spec: ModelSpec) -> Kept:
    if spec.pooling is not None and spec.pooling.whole_prompts:
        return "nothing"
    return "states" if spec.state_layers else "blocks"
