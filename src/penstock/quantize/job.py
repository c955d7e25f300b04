"""The whole of `penstock quantize`: layer after layer, with a state on disk from which an interrupted run goes on."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.families import ModelSpec, load_spec
from penstock.families.spec import Parameter, TensorSource
from penstock.kernels import Kernels, Needs, Platform, select_kernels
from penstock.kernels.linear import TorchLinear
from penstock.kernels.moe import TorchExperts
from penstock.kernels.native.loader import instruction_sets
from penstock.quantize.agreement import by_class, compare_windows
from penstock.quantize.formats.destination import Destination
from penstock.quantize.layer import LayerQuantizer, is_whole_rows
from penstock.quantize.recorder import RecordingLinear, RoundingLinear
from penstock.quantize.rounding import Method, rounded
from penstock.quantize.stream import LayerStream, Windows
from penstock.quantize.workers import Workers
from penstock.weights.files import file_states

MethodName = Literal["auto", "rtn", "mse", "awq", "gptq"]
METHODS: Mapping[str, tuple[Sequence[Method], bool]] = {  # what is tried for each matrix, and whether AWQ's factors are
    "auto": (("gptq", "gptq-ordered", "mse"), True),
    "rtn": (("rtn",), False),
    "mse": (("mse",), False),
    "awq": (("mse",), True),
    "gptq": (("gptq",), False),
}
CALIBRATED = ("auto", "awq", "gptq")
STATE, SETTINGS = "state.safetensors", "settings.json"
SAVED_AFTER = 10  # a state is saved when so many times the seconds of the last save have passed
OUTER_ROWS = 8192  # of the embedding or the head that are in memory as fp32
# Windows that go through layers: the first two through quantised ones, the others through the original's.
STREAMS = ("calibration", "check", "original", "base")


class OtherRun(ValueError):
    """The output has parts of a run with other options."""


@dataclass(frozen=True)
class Job:
    """What is to be made. `calibration` are windows of token ids; `check` are others, by class of text, on which the
    result is compared with the original: none, if it is not."""

    model: Path
    spec: ModelSpec
    out: Path
    method: MethodName
    calibration: Windows
    check: Mapping[str, Windows]
    settings: Mapping[str, Any]  # all options, by which an interrupted run is recognised
    workers: Workers

    @property
    def partial(self) -> Path:
        """The folder that the output is made in."""
        return self.out.with_name(f"{self.out.name}.partial")

    def identity(self) -> str:
        """Returns the options and the model as text: equal for runs that make the same bytes."""
        windows = json.dumps([self.calibration, {name: list(each) for name, each in self.check.items()}])
        return json.dumps(
            {
                **self.settings,
                "windows": hashlib.sha256(windows.encode()).hexdigest(),
                "files": [list(state) for state in file_states(self.model)],
                "torch": torch.__version__,
                "bf16": _rounds(),
            },
            indent=1,
        )


@dataclass
class RunState:
    """How far a run is: the hidden states before layer `layer`, and what was chosen for the layers before it."""

    layer: int = 0
    hidden: dict[str, Tensor] = field(default_factory=dict)  # by STREAMS; [tokens, hidden]
    choices: list[dict[str, object]] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        """Replaces the state on disk. All earlier layers must have been written."""
        metadata = {"layer": str(self.layer), "choices": json.dumps(self.choices)}
        tensors = {**self.hidden, "layer": torch.tensor([self.layer])}
        save_file(tensors, folder / f"{STATE}.new", metadata)
        os.replace(folder / f"{STATE}.new", folder / STATE)

    @classmethod
    def load(cls, folder: Path) -> "RunState | None":
        path = folder / STATE
        if not path.is_file():
            return None
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            hidden = {name: file.get_tensor(name) for name in file.keys() if name != "layer"}  # noqa: SIM118
        return cls(int(metadata["layer"]), hidden, json.loads(metadata["choices"]))


def torch_kernels(spec: ModelSpec) -> Kernels:
    """Returns kernels of plain torch, in fp32."""
    return select_kernels(Platform("cpu", ""), Needs(torch.float32, head_dims=spec.head_dims))


def calibration_kernels(spec: ModelSpec) -> Kernels:
    """Returns kernels of torch whose products can be recorded. Where the processor multiplies bf16, their products are
    rounded to it: that is 2 to 3 times as fast, and far less than what the codes change."""
    linear = RecordingLinear(RoundingLinear() if _rounds() else TorchLinear())
    return replace(torch_kernels(spec), linear=linear, experts=TorchExperts(linear))


def _rounds() -> bool:
    return "avx512_bf16" in instruction_sets()  # AMX includes it


def matrices_of(spec: ModelSpec, kinds: Sequence[str] = ("matrix", "gated")) -> dict[str, TensorSource]:
    """Returns the tensors of a model that can be quantised, by name: those that are rows of matrices of its layers."""
    sources = [s for p in spec.parameters if p.kind in kinds for s in p.sources]
    turned = {source.name for source in sources if not is_whole_rows(source)}
    return {source.name: source for source in sources if source.name not in turned}


def steps_of(job: Job) -> int:
    """Returns the steps of a job: the products of all layers, and the windows that are compared at the end."""
    return sum(p.kind in ("matrix", "gated") for p in job.spec.parameters) + sum(map(len, job.check.values()))


def run(job: Job, destination: Destination, advance: Callable[[int], None]) -> dict[str, Any]:
    """Makes the output, or goes on with an interrupted run. Calls `advance` with the number of steps done since its
    last call.

    Returns "choices", one for each product, and "table", the rows of `agreement.by_class`. Raises OtherRun, ValueError
    for weights that are not finite, CheckpointError and OSError.
    """
    folder, identity = job.partial, job.identity()
    progress = _begin(folder, identity)
    base = LayerStream(job.model, job.spec, torch_kernels(job.spec), torch.float32, workers=job.workers)
    windows = {name: each for name, each in _windows(job).items() if each}
    with torch.inference_mode():
        destination.open(folder, copies=progress is None)
        if progress is None:
            _quantize_outer(base, destination)
            progress = RunState(hidden=_embed(base, destination, windows))
            (folder / SETTINGS).write_text(identity)
            progress.save(folder)
        _quantize_layers(job, destination, base, windows, progress, advance)
        table = _table(job, base, destination, windows, progress, advance) if job.check else []
    destination.finish(folder)
    for name in (SETTINGS, STATE):
        (folder / name).unlink()
    destination.move(folder, job.out)
    return {"choices": progress.choices, "table": table}


def _begin(folder: Path, identity: str) -> RunState | None:
    """Makes the folder, or returns how far an earlier run in it came. Raises OtherRun."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / SETTINGS
    if not settings.is_file():
        return None
    if settings.read_text() != identity:
        raise OtherRun(
            f"{folder} has parts of a run with other options, or of another version of the model: remove it to "
            "begin anew, or give the options of that run"
        )
    return RunState.load(folder)


def _windows(job: Job) -> dict[str, Windows]:
    """Returns the windows of each stream."""
    check = [window for each in job.check.values() for window in each]
    calibration = job.calibration if job.method in CALIBRATED else ()
    return dict(zip(STREAMS, (calibration, check, calibration, check), strict=True))


def _embed(base: LayerStream, destination: Destination, windows: Mapping[str, Windows]) -> dict[str, Tensor]:
    made = _made(base, destination)
    return {name: (made if name in STREAMS[:2] else base).embed(each).float() for name, each in windows.items()}


def _made(base: LayerStream, destination: Destination) -> LayerStream:
    """Returns the model whose embedding and head are those of what is made."""
    path = destination.outer
    return base if path is None else replace(base, model=path, spec=load_spec(path))


def _quantize_layers(
    job: Job,
    destination: Destination,
    base: LayerStream,
    windows: Mapping[str, Windows],
    progress: RunState,
    advance: Callable[[int], None],
) -> None:
    methods, scales = METHODS[job.method]
    quantizer = LayerQuantizer(destination, methods, scales, progress.choices)
    calibration, saved, cost = windows.get("calibration", ()), time.monotonic(), 0.0
    count, kernels = len(job.spec.layers), calibration_kernels(job.spec)
    advance(sum(p.kind in ("matrix", "gated") and _layer_of(p) < progress.layer for p in job.spec.parameters))
    for index in range(progress.layer, count):
        layer = base.layer(index)
        calibrated = layer.executed_by(kernels)
        if "base" in windows:
            layer.forward(progress.hidden["base"], windows["base"])
        for _ in quantizer.run(
            index, calibrated, progress.hidden.get("calibration"), progress.hidden.get("original"), calibration
        ):
            advance(1)
        if "check" in windows:
            layer.forward(progress.hidden["check"], windows["check"])
        progress.layer = index + 1
        if (now := time.monotonic()) - saved >= SAVED_AFTER * cost or progress.layer == count:
            progress.save(job.partial)
            saved = time.monotonic()
            cost = saved - now


def _layer_of(parameter: Parameter) -> int:
    parts = parameter.name.split(".")
    return int(parts[1]) if parts[0] == "layers" else -1


def _quantize_outer(base: LayerStream, destination: Destination) -> None:
    """Quantises the embedding and the head where the format says so, some rows at a time."""
    for parameter in base.spec.parameters:
        if parameter.kind != "vocabulary":
            continue
        (source,) = parameter.sources
        fmt = destination.format_of(source.name)
        if fmt is None:
            continue
        for first in range(0, source.rows, OUTER_ROWS):
            part = replace(source, first_row=first, rows=min(OUTER_ROWS, source.rows - first))
            weights = base.read_rows(parameter, part)
            destination.put_rows(source.name, rounded(weights, fmt, None, search=True), first)


def _table(
    job: Job,
    base: LayerStream,
    destination: Destination,
    windows: Mapping[str, Windows],
    progress: RunState,
    advance: Callable[[int], None],
) -> list[dict[str, Any]]:
    base_head = base.head()
    made = _made(base, destination)
    head = base_head if made is base else made.head()
    hidden, base_hidden = progress.hidden["check"], progress.hidden["base"]
    scores = compare_windows(hidden, head, base_hidden, base_head, windows["check"], job.workers, advance)
    ends = [0, *accumulate(len(each) for each in job.check.values())]
    return by_class({name: scores[a:b] for name, a, b in zip(job.check, ends, ends[1:], strict=False)})
