"""Facts of models whose sizes are known, for the tests of sizing."""

from msgspec.structs import replace

from penstock.config import Hardware, ModelFacts
from penstock.config.facts import GroupFacts, MatrixFacts, PageShape
from penstock.messages import Window

GIB = 1 << 30

# Qwen3-0.6B: 28 layers, 8 KV heads of 128.
FULL = ModelFacts(
    family="qwen3",
    num_parameters=596_049_920,
    matrices=(
        MatrixFacts(rows=151_936, columns=1024, vocabulary=True),
        MatrixFacts(rows=4096, columns=1024, count=28),
        MatrixFacts(rows=1024, columns=2048, count=28),
        MatrixFacts(rows=6144, columns=1024, count=28, gated=True),
        MatrixFacts(rows=1024, columns=3072, count=28),
    ),
    vector_elements=28 * (2 * 1024 + 24 * 128) + 1024,
    num_layers=28,
    vocab_size=151_936,
    hidden_size=1024,
    widest_mlp=3072,
    widest_attention=3 * 2048 + 4 * 1024,
    widest_gathered=2 * 1024,
    groups=(GroupFacts(Window(), 28, PageShape(2, 8, 128)),),
    max_position=40_960,
    checkpoint_dtype="bfloat16",
)
# Gemma-3-1B's proportions: 22 layers with a window of 512, 4 without.
MIXED = replace(
    FULL,
    groups=(GroupFacts(Window(), 4, PageShape(2, 1, 256)), GroupFacts(Window(512), 22, PageShape(2, 1, 256))),
    max_position=32_768,
)
WINDOWED = replace(FULL, groups=(GroupFacts(Window(4096), 28, PageShape(2, 8, 128)),), max_position=32_768)
SMALL = replace(
    FULL,
    num_parameters=10_048_000,
    matrices=(MatrixFacts(rows=8000, columns=256, vocabulary=True), MatrixFacts(rows=5200, columns=256, count=6)),
    vector_elements=12_800,
    vocab_size=8000,
    groups=(GroupFacts(Window(), 6, PageShape(2, 2, 64)),),
    max_position=2048,
)


def machine(gib: float = 16, cores: int = 4) -> Hardware:
    return Hardware(cores=cores, memory_total=int(gib * GIB), memory_available=int(gib * GIB))
