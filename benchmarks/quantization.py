"""Quantises a model with Penstock, llmcompressor, AutoRound and llama.cpp, and compares the results with the original.

    python benchmarks/quantization.py MODEL_DIR --work DIR --cases 4/32,4/128,3/32 \\
        --tool llmcompressor=../llmcompressor/bin/python --tool auto-round=../llmcompressor/bin/python
    python benchmarks/quantization.py MODEL_DIR --work DIR --gguf MODEL.gguf --types Q4_K_M,Q3_K_M \\
        --tool llama.cpp=../llama/bin/python

All tools calibrate with the same windows of token ids, and all results are scored on the same others: in fp32, with the
exact values of their codes, by the layers that Penstock executes (tests compare these with transformers). llama.cpp's
importance matrix is what its own tool would compute: the mean squares of the inputs of each product of the original.
What is in --work is not made again.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from results import JSON, run_command, save

from penstock.cli.models.quantize import QuantizeOptions, calibration_windows, class_windows, window_length
from penstock.cli.output import show_table
from penstock.families import load_spec
from penstock.quantize.agreement import Logits, compare_windows, figures
from penstock.quantize.formats.gguf_mix import MOST
from penstock.quantize.job import calibration_kernels, torch_kernels
from penstock.quantize.moments import Moments
from penstock.quantize.recorder import WeightPlaces
from penstock.quantize.stream import LayerStream, Windows
from penstock.quantize.workers import Workers
from penstock.text import Tokenizer
from penstock.weights.checkpoint import stored_tensors

PEERS = Path(__file__).parent / "peers"
OF_LLMCOMPRESSOR = ("gptq", "awq")
TOOLS = ("llmcompressor", "auto-round", "llama.cpp")
Cost = dict[str, int]  # seconds, CPU seconds and peak MiB of what was made now
Made = dict[Path, tuple[str, Cost]]  # what each model is called, and its cost
COLUMNS = (
    ("made by", "name"),
    ("MiB", "mib"),
    ("seconds", "seconds"),
    ("CPU seconds", "cpu_seconds"),
    ("peak MiB", "peak_mib"),
    ("perplexity", "perplexity"),
    ("change %", "change_percent"),
    ("±", "change_margin"),
    ("mean KL", "kl"),
    ("±", "kl_margin"),
    ("same greedy token", "agreement"),
)


def importance(gguf: Path, windows: Windows) -> dict[str, list[float]]:
    """The mean square of each column of the inputs of a GGUF model's products, by its tensors' names."""
    spec = load_spec(gguf)
    kernels, names = calibration_kernels(spec), stored_tensors(gguf, spec)
    stream, found = LayerStream(gguf, spec, kernels, torch.float32), dict[str, list[float]]()
    recorder: Any = kernels.linear
    with torch.inference_mode():
        hidden = stream.embed(windows)
        for index in range(len(spec.layers)):
            layer = stream.layer(index)
            places, moments = WeightPlaces(layer.parameters), dict[str, Moments]()

            def watch(
                address: int, x: torch.Tensor, places: WeightPlaces = places, moments: dict[str, Moments] = moments
            ) -> None:
                if place := places.find(address):
                    moments.setdefault(place[0], Moments(x.shape[1])).add(x, held_out=False, workers=stream.workers)

            with recorder.watched_by(watch):
                layer.forward(hidden, windows)
            for parameter in layer.spec.parameters:
                for source in parameter.sources if parameter.name in moments else ():
                    found[names[source.name].name] = moments[parameter.name].importance.tolist()
    return found


class Judge:
    """Compares models with the original, whose hidden states are computed once."""

    def __init__(self, original: Path, windows: Windows) -> None:
        self._windows = windows
        self._base = self._states(original)

    def figures(self, model: Path) -> dict[str, Any]:
        with torch.inference_mode():
            return figures(compare_windows(*self._states(model), *self._base, self._windows, Workers()))

    def _states(self, model: Path) -> tuple[torch.Tensor, Logits]:
        """The last hidden states [tokens, hidden], and the head."""
        with torch.inference_mode():
            spec = load_spec(model)
            stream = LayerStream(model, spec, torch_kernels(spec), torch.float32)
            hidden = stream.embed(self._windows).float()
            for index in range(len(spec.layers)):
                stream.layer(index).forward(hidden, self._windows)
            return hidden, stream.head()


def timed(command: Sequence[str]) -> Cost:
    """Runs a command. Raises ValueError if it fails."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise ValueError(f"{' '.join(command)} ended with status {os.waitstatus_to_exitcode(status)}")
    return {
        "seconds": round(time.perf_counter() - began),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime),
        "peak_mib": usage.ru_maxrss >> 10,
    }


def ours(model: Path, out: Path, flags: Sequence[str]) -> Cost:
    """Makes `out` with `penstock quantize` unless it is there."""
    command = (sys.executable, "-m", "penstock", "quantize", str(model), str(out), "--no-table", *flags)
    return {} if out.exists() else timed(command)


def theirs(python: str, script: str, model: Path, out: Path, windows: Path, flags: Sequence[str]) -> Cost:
    """Makes the folder `out` with another tool unless it is there."""
    command = (python, str(PEERS / script), str(model), str(out), str(windows), *flags)
    return {} if (out / "config.json").exists() else timed(command)


def quantization(
    *,
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A checkpoint in safetensors.")],
    work: Annotated[Path, typer.Option(metavar="DIR", help="Keep the models here.")],
    tool: Annotated[list[str], typer.Option(metavar="TOOL=PATH", help=f"A Python that has {', '.join(TOOLS)}.")] = [],  # noqa: B006
    gguf: Annotated[Path | None, typer.Option(metavar="FILE", help="The same model in GGUF, in floats.")] = None,
    cases: Annotated[str, typer.Option(help="BITS/GROUP of folders; z after the group: with zero points.")] = "",
    types: Annotated[str, typer.Option(help="Types of GGUF files.")] = "",
    methods: Annotated[str, typer.Option(help="Methods of penstock quantize.")] = "auto,gptq,awq,mse,rtn",
    windows: Annotated[int, typer.Option(min=1, help="Windows of 512 tokens to calibrate with.")] = 64,
    checked: Annotated[int, typer.Option(min=2, help="Windows of each class of text to compare.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Steps of AutoRound for each layer.")] = 200,
    json_file: Annotated[str | None, JSON] = None,
) -> None:
    """Compares Penstock's quantisation with other tools'."""
    work.mkdir(parents=True, exist_ok=True)
    spec, tokenizer, tools = load_spec(model), Tokenizer.load(model), dict(text.split("=", 1) for text in tool)
    options = QuantizeOptions("int4", None, False, None, "auto", "builtin", windows, None, False, None)
    calibration = calibration_windows(tokenizer, spec, options)
    (work / "calibration.json").write_text(json.dumps(calibration))
    check = [window for each in class_windows(tokenizer, window_length(spec), checked).values() for window in each]
    made: Made = {}
    for case in filter(None, cases.split(",")):
        made |= _folders(tools, model, work, case, methods.split(","), windows, steps)
    if gguf is not None and types:
        made |= _files(tools, gguf, work, types.split(","), methods.split(","), calibration)
    judge, rows = Judge(model, check), []
    for out, (name, cost) in made.items():
        rows.append({"name": name, "mib": _mib(out), **cost, **judge.figures(out)})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    base = f"the original's perplexity is {rows[0]['base_perplexity']}" if rows else "nothing was made"
    show_table(f"{model.name}: {len(check)} windows of four classes of text; {base}", COLUMNS, rows)
    save({"benchmark": "quantization", "model": model.name, "calibration_windows": windows, "rows": rows}, json_file)


def _folders(
    tools: Mapping[str, str], model: Path, work: Path, case: str, methods: Sequence[str], windows: int, steps: int
) -> Made:
    """Makes the folders of a case by all tools."""
    made: Made = {}
    bits, _, group = case.partition("/")
    size, zeros = group.removesuffix("z"), ("--zero-points",) if group.endswith("z") else ()
    form = () if bits in ("4", "8") else ("--format", "gptq")
    for method in methods:
        out = work / f"penstock-{method}-{bits}-{group}"
        flags = ("--scheme", f"int{bits}", "--group", size, *zeros, "--method", method, *form)
        made[out] = f"Penstock {method}, {case}", ours(model, out, (*flags, "--windows", str(windows)))
    ids, flags = work / "calibration.json", ("--bits", bits, "--group", size, *zeros)
    if python := tools.get("llmcompressor"):
        for method in OF_LLMCOMPRESSOR:
            out, script = work / f"llmcompressor-{method}-{bits}-{group}", "llmcompressor_quantize.py"
            cost = theirs(python, script, model, out, ids, ("--method", method, *flags))
            made[out] = f"llmcompressor {method}, {case}", cost
    if python := tools.get("auto-round"):
        out = work / f"auto-round-{bits}-{group}"
        cost = theirs(python, "auto_round_quantize.py", model, out, ids, (*flags, "--steps", str(steps)))
        made[out] = f"AutoRound, {case}", cost
    return made


def _files(
    tools: Mapping[str, str], gguf: Path, work: Path, types: Sequence[str], methods: Sequence[str], windows: Windows
) -> Made:
    """Makes GGUF files by Penstock, which does not write all types, and by llama.cpp."""
    made: Made = {}
    for kind in (kind for kind in types if kind in MOST):
        for method in methods:
            out = work / f"penstock-{method}.{kind}.gguf"
            flags = ("--scheme", f"gguf:{kind}", "--method", method, "--windows", str(len(windows)))
            made[out] = f"Penstock {method}, {kind}", ours(gguf, out, flags)
    if (python := tools.get("llama.cpp")) is None:
        return made
    matrix = work / "imatrix.json"
    if not matrix.exists():
        matrix.write_text(json.dumps(importance(gguf, windows)))
    for name, flags in (("llama.cpp", ()), ("llama.cpp imatrix", ("--imatrix", str(matrix)))):
        for kind in types:
            folder = work / name.replace(" ", "-")
            command = (python, str(PEERS / "llama_cpp_quantize.py"), str(gguf), str(folder), "--types", kind, *flags)
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            made[Path(done.stdout.strip())] = f"{name}, {kind}", {}
    return made


def _mib(path: Path) -> float:
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return round(sum(file.stat().st_size for file in files) / (1 << 20), 1)


if __name__ == "__main__":
    run_command(quantization)
