"""`benchmarks/step.py` on a tiny model: every op is found and named, parts add up, and the picture shows them."""

import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from op_timing.flame import BAR, GROUP_HEIGHT, PART_HEIGHT, flame
from op_timing.step_timer import HOST, WHOLE, StepBreakdown, StepPart, StepTimer, longest_sequence

from penstock.bench.roofline import MachineRates
from penstock.config import EngineConfig
from penstock.runtime.loading.load import load_runner
from penstock.runtime.runner import ModelRunner

MACHINE = MachineRates(bandwidth=20e9, flops=1e11)
SVG = "{http://www.w3.org/2000/svg}"
LAYER = {"qkv", "cache", "attention", "output", "gate_up", "down"}
MIXTURE = (LAYER - {"gate_up", "down"}) | {"router", "route", "experts"}
SHARED = {*MIXTURE, "shared.gate_up", "shared.down", "shared.gate"}


def runner(folder: Path, **settings: int) -> ModelRunner:
    config = {"max_model_len": 128, "max_num_seqs": 4, "threads": 1, "kv_cache_bytes": 8 << 20, **settings}
    return load_runner(EngineConfig(model=str(folder), name="tiny", **config), progress=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("variant", "layer"), [("qwen3", LAYER), ("gemma3", LAYER), ("mixtral", MIXTURE), ("qwen2_moe_normed", SHARED)]
)
def test_every_op_of_every_layer_is_timed(tiny_checkpoint: Callable[..., Path], variant: str, layer: set[str]) -> None:
    steps = StepTimer(runner(tiny_checkpoint(variant)), context=40, rows=[1, 3], steps=3)
    for found, rows in zip(steps.measure(MACHINE), (1, 3), strict=True):
        assert (found.rows, found.steps) == (rows, 3)
        lines = {line.name: line for line in found.lines}
        around = {"fill", "rotation", "embedding", "norm", "head", "sample", "advance"}
        assert {WHOLE, *around, *layer, *HOST} == set(lines)
        layers = {lines[name].calls for name in layer}
        assert len(layers) == 1 and lines["head"].calls == 1
        parts = [line for line in found.lines if line.name != WHOLE]
        assert sum(line.us for line in parts) == pytest.approx(found.us, abs=1.0)
        assert sum(line.share for line in parts) == pytest.approx(1.0, abs=0.01)
        assert all(line.gb_s is not None and line.roofline_fraction is not None for line in parts[: -len(HOST)])
        assert found.host_us == pytest.approx(sum(line.us for line in parts[-len(HOST) :]))


def test_products_around_latents_are_told_apart(tiny_checkpoint: Callable[..., Path]) -> None:
    """Of three layers, the first of which is dense."""
    small = runner(tiny_checkpoint("deepseek_v3"))
    (found,) = StepTimer(small, context=40, rows=[2], steps=2).measure(MACHINE)
    calls = {line.name: line.calls for line in found.lines}
    products = ("query_down", "query", "query_rope", "latents", "key_rope", "key_up", "value_up", "output")
    counts = dict.fromkeys(("latent", "attention", *products), 3) | {"experts": 2, "router": 2}
    counts |= {"gate_up": 1, "down": 1, "shared.gate_up": 2, "shared.down": 2, "head": 1}
    assert counts.items() <= calls.items()


def multiplied(steps: StepTimer, rows: int, name: str) -> list[float]:
    """Floating-point operations of each of one step's ops of that name."""
    return [done.flops for label, _, done in steps._step(rows).ops if label == name]


@pytest.mark.parametrize("context", [0, 20])
def test_a_prompts_ops_are_timed_with_all_their_tokens(tiny_checkpoint: Callable[..., Path], context: int) -> None:
    small = runner(tiny_checkpoint("qwen3"))
    found = StepTimer(small, context=context, rows=[1, 3], steps=2, prompt=24).measure(MACHINE)
    assert [(each.rows, each.context, each.prompt, each.steps) for each in found] == [
        (1, context, 24, 2),
        (3, context, 24, 2),
    ]


def test_a_prompts_step_is_its_tokens_work_but_for_the_head(tiny_checkpoint: Callable[..., Path]) -> None:
    prompts = StepTimer(runner(tiny_checkpoint("qwen3")), context=20, rows=[3], steps=1, prompt=24)
    decoding = StepTimer(runner(tiny_checkpoint("qwen3")), context=20, rows=[3], steps=1)
    for name in ("qkv", "output", "gate_up", "down"):
        *layers, last = multiplied(decoding, 3, name)
        # In the last layer nothing is computed behind attention but what is sampled from.
        of_last = 24 * last if name == "qkv" else last
        assert multiplied(prompts, 3, name) == [24 * each for each in layers] + [of_last], name
    assert multiplied(prompts, 3, "head") == multiplied(decoding, 3, "head")


def test_too_many_sequences_for_the_pool_are_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    small = runner(tiny_checkpoint("qwen3"), max_num_seqs=1)
    with pytest.raises(ValueError, match="--kv-cache-memory"):
        StepTimer(small, context=100, rows=[4], steps=1)


def test_room_is_for_every_step() -> None:
    assert longest_sequence(99, [1, 8], 6) == 128 and longest_sequence(100, [1, 8], 6) == 256
    assert longest_sequence(0, [1, 8], 6, prompt=127) == 128 and longest_sequence(100, [1, 8], 6, prompt=28) == 256


def breakdown(**us: float) -> StepBreakdown:
    total = sum(us.values())
    lines = [StepPart(name, 2, each, each / total, 1.5, 30.0, 0.5) for name, each in us.items()]
    return StepBreakdown(8, 1000, 5, total, (*lines, StepPart(WHOLE, 1, total, 1.0)))


def test_the_picture_is_as_wide_as_the_parts_are_long() -> None:
    step = breakdown(qkv=300.0, attention=100.0, norm=2.0, sampler=98.0, novelty=500.0)
    root = ET.fromstring(flame([step, step], "a < b & c"))
    boxes = [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    widths = {box.findtext(f"{SVG}title", "").split(":")[0]: float(box.get("width", 0)) for box in boxes}
    assert widths["qkv"] == pytest.approx(0.3 * BAR, abs=0.01)
    assert widths["novelty"] == widths["other"] == pytest.approx(0.5 * BAR, abs=0.01)
    for height in (GROUP_HEIGHT, PART_HEIGHT):
        level = [float(box.get("width", 0)) for box in boxes if box.get("height") == str(height)]
        assert sum(level) == pytest.approx(2 * BAR, abs=0.1)
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert words[0] == "a < b & c"
    assert "narrow: norm 0.2%" in words
    assert words.count("8 sequences, 1,000 tokens of context: 1,000 µs a step") == 2
