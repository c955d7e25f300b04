"""Implements `penstock bench quality --against`: how far the next tokens of a model are from those of another."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from penstock.cli.models.quantize import show_comparison
from penstock.cli.output import write_json
from penstock.families import model_facts
from penstock.kernels import Needs, detect_platform, select_kernels, select_packing
from penstock.observe.progress import work_progress
from penstock.prepare.model import FoundModel, PreparedModel
from penstock.quantize.agreement import by_class, compare_windows
from penstock.quantize.stream import BLOCK, LayerStream, Windows, cannot_stream
from penstock.text import Tokenizer

_SAMPLE = "def f(x): return 2 * x  # The quick brown fox, 1234.5 größer als 42?\n"


def check_pair(found: FoundModel, other: FoundModel) -> None:
    """Raises ValueError unless the two models can be compared: the same tokens, and layers that run one by one."""
    for each in (found, other):
        if (reason := cannot_stream(each.spec)) is not None:
            raise ValueError(f"--against cannot execute {each.path.name} layer by layer, because {reason}")
        for name, value in (
            ("--kv-cache-dtype", each.given.settings.kv_cache_dtype),
            ("--device", each.given.settings.device),
        ):
            if value not in (None, "auto", "cpu"):
                raise ValueError(
                    f"{name} {value} has no effect with --against, which compares weights on a CPU: leave it out"
                )
    sizes = [model_facts(each.spec).vocab_size for each in (found, other)]
    ids = [Tokenizer.load(each.path).encode(_SAMPLE) for each in (found, other)]
    if sizes[0] != sizes[1] or ids[0] != ids[1]:
        raise ValueError(
            f"{found.path.name} and {other.path.name} have different tokens ({sizes[0]:,} and {sizes[1]:,} of them): "
            "--against compares models of one vocabulary"
        )


def compare(
    prepared: PreparedModel, other: PreparedModel, windows: Mapping[str, Windows], json_file: str | None
) -> None:
    """Scores the windows of each class with both models, as their engines compute, and shows the table."""
    names = [each.resolved.engine.name for each in (prepared, other)]
    flat = [window for each in windows.values() for window in each]
    streams = [_engine_stream(each) for each in (prepared, other)]
    steps = sum(len(stream.spec.layers) for stream in streams) + len(flat)
    with torch.inference_mode(), work_progress(f"comparing {names[0]} with {names[1]}", steps) as advance:
        hidden = [_last_hidden(stream, flat, advance) for stream in streams]
        heads = [stream.head() for stream in streams]
        scores = compare_windows(hidden[0], heads[0], hidden[1], heads[1], flat, streams[0].workers, advance)
    found, first = {}, 0
    for name, each in windows.items():
        found[name] = scores[first : first + len(each)]
        first += len(each)
    rows = by_class({name: each for name, each in found.items() if each})
    show_comparison(f"{names[0]} against {names[1]}", rows)
    write_json(json_file, {"model": names[0], "against": names[1], "results": rows})


def _engine_stream(prepared: PreparedModel) -> LayerStream:
    """Returns the layers with the weights and the kernels that the engine would use."""
    engine, spec = prepared.resolved.engine, prepared.spec
    dtype = getattr(torch, engine.dtype)
    platform, needs = detect_platform("cpu"), Needs(dtype, BLOCK, spec.head_dims)
    packing = select_packing(platform, needs, engine.quantization, engine.quantization_group)
    return LayerStream(Path(engine.model), spec, select_kernels(platform, needs), dtype, packing)


def _last_hidden(stream: LayerStream, windows: Windows, advance: Callable[[int], None]) -> Tensor:
    hidden = stream.embed(windows)
    for index in range(len(stream.spec.layers)):
        stream.layer(index).forward(hidden, windows)
        advance(1)
    return hidden
