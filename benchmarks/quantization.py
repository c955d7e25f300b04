"""Quantises a checkpoint with Penstock, llmcompressor and llama.cpp, and compares what they made with the original.

    python benchmarks/quantization.py MODEL_DIR --llmcompressor-python ../llmcompressor/bin/python --work DIR
    python benchmarks/quantization.py MODEL_DIR --gguf MODEL.gguf --llama-python ../llama/bin/python --work DIR

All tools calibrate with the same windows of token ids, and all results are scored on the same others. Folders are
executed by transformers with compressed-tensors, in the environment of llmcompressor; GGUF files by Penstock in fp32
(`bench quality --against`). llama.cpp's importance matrix is what its own tool would compute: the mean squares of the
inputs of each product of the original. What is in --work is not made again.
"""

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from results import JSON, run_command, save

from penstock.cli.models.quantize import CHECKED, QuantizeOptions, calibration_windows, class_windows, window_length
from penstock.cli.output import show_table
from penstock.families import load_spec
from penstock.quantize.job import torch_kernels
from penstock.quantize.moments import Moments
from penstock.quantize.recorder import WeightPlaces
from penstock.quantize.stream import LayerStream, batches
from penstock.text import Tokenizer
from penstock.weights.checkpoint import stored_tensors

PEERS = Path(__file__).parent / "peers"
COLUMNS = (
    ("type", "name"),
    ("MiB", "mib"),
    ("seconds", "seconds"),
    ("perplexity", "perplexity"),
    ("change %", "change_percent"),
    ("±", "change_margin"),
    ("mean KL", "kl"),
    ("±", "kl_margin"),
    ("same greedy token", "agreement"),
)


def importance(gguf: Path, windows: Sequence[Sequence[int]]) -> dict[str, list[float]]:
    """The mean square of each column of the inputs of a GGUF model's products, by its tensors' names."""
    spec = load_spec(gguf)
    kernels, names = torch_kernels(spec), stored_tensors(gguf, spec)
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
                    moments.setdefault(place[0], Moments(x.shape[1])).add(x, held_out=False)

            recorder.watch = watch
            for rows, batch in batches(windows):
                hidden[rows] = layer.run(hidden[rows], batch)
            recorder.watch = None
            for parameter in layer.spec.parameters:
                for source in parameter.sources if parameter.name in moments else ():
                    found[names[source.name].name] = moments[parameter.name].importance.tolist()
    return found


def ours(model: Path, out: Path, flags: Sequence[str]) -> float | None:
    """Makes `out` with `penstock quantize` unless it is there. Returns the seconds that it took."""
    if out.exists():
        return None
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "penstock", "quantize", str(model), str(out), "--no-table", *flags], check=True
    )
    return round(time.perf_counter() - began, 1)


def theirs(python: str, model: Path, out: Path, windows: Path, flags: Sequence[str]) -> float | None:
    """Makes `out` with llmcompressor unless it is there. Returns the seconds of its own work."""
    if (out / "config.json").exists():
        return None
    script = str(PEERS / "llmcompressor_quantize.py")
    done = subprocess.run(
        [python, script, str(model), str(out), str(windows), *flags], check=True, stdout=subprocess.PIPE, text=True
    )
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def folder_rows(python: str, original: Path, folders: Sequence[Path], windows: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of transformers_quality.py by folder."""
    script = str(PEERS / "transformers_quality.py")
    command = [python, script, str(windows), str(original), *map(str, folders)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, list[dict[str, Any]]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            found.setdefault(row["model"], []).append(row)
    return found


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures over all windows, which have equal lengths, with 95% intervals."""
    nats, base, kl, agreement = (
        [value for row in rows for value in row[key]] for key in ("nats", "base_nats", "kl", "agreement")
    )

    def margin(values: Sequence[float]) -> float:
        return 1.96 * statistics.stdev(values) / math.sqrt(len(values))

    change = 100 * math.expm1(statistics.fmean(nats) - statistics.fmean(base))
    return {
        "perplexity": round(math.exp(statistics.fmean(nats)), 4),
        "base_perplexity": round(math.exp(statistics.fmean(base)), 4),
        "change_percent": round(change, 3),
        "change_margin": round((100 + change) * margin([a - b for a, b in zip(nats, base, strict=True)]), 3),
        "kl": round(statistics.fmean(kl), 5),
        "kl_margin": round(margin(kl), 5),
        "agreement": round(statistics.fmean(agreement), 4),
    }


def quantization(
    *,
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A checkpoint in safetensors.")],
    work: Annotated[Path, typer.Option(metavar="DIR", help="Keep the models here.")],
    llmcompressor_python: Annotated[str | None, typer.Option(metavar="PATH", help="A Python that has it.")] = None,
    llama_python: Annotated[
        str | None, typer.Option(metavar="PATH", help="A Python that has llama-cpp-python.")
    ] = None,
    gguf: Annotated[Path | None, typer.Option(metavar="FILE", help="The same model in GGUF, in floats.")] = None,
    cases: Annotated[str, typer.Option(help="BITS/GROUP of folders; z after the group: with zero points.")] = (
        "4/32,4/32z,4/64"
    ),
    types: Annotated[str, typer.Option(help="Types of GGUF files.")] = "Q4_0,Q4_K_M",
    methods: Annotated[str, typer.Option(help="Methods of penstock quantize.")] = "auto,gptq,awq,mse,rtn",
    windows: Annotated[int, typer.Option(min=1, help="Windows of 512 tokens to calibrate with.")] = 64,
    json_file: Annotated[str | None, JSON] = None,
) -> None:
    """Compares Penstock's quantisation with other tools'."""
    work.mkdir(parents=True, exist_ok=True)
    spec, tokenizer = load_spec(model), Tokenizer.load(model)
    options = QuantizeOptions("int4", None, False, None, "auto", "builtin", windows, None, False, None)
    calibration = calibration_windows(tokenizer, spec, options)
    check = class_windows(tokenizer, window_length(spec), CHECKED)
    (work / "calibration.json").write_text(json.dumps(calibration))
    (work / "check.json").write_text(json.dumps(check))
    rows: list[dict[str, Any]] = []
    common = ("--windows", str(windows))
    if llmcompressor_python is not None:
        rows += _folders(llmcompressor_python, model, work, cases.split(","), methods.split(","), common)
    if gguf is not None and llama_python is not None:
        rows += _files(llama_python, gguf, work, types.split(","), methods.split(","), calibration, common)
    show_table(f"{model.name}: {CHECKED} windows of 512 tokens of each class", COLUMNS, rows)
    save({"benchmark": "quantization", "model": model.name, "calibration_windows": windows, "rows": rows}, json_file)


def _folders(
    python: str, model: Path, work: Path, cases: Sequence[str], methods: Sequence[str], common: Sequence[str]
) -> list[dict[str, Any]]:
    made: dict[Path, tuple[str, float | None]] = {}
    for case in cases:
        bits, _, group = case.partition("/")
        size, zeros = group.removesuffix("z"), ("--zero-points",) if group.endswith("z") else ()
        for method in methods:
            out = work / f"penstock-{method}-{bits}-{group}"
            form = () if bits in ("4", "8") else ("--format", "gptq")
            flags = ("--scheme", f"int{bits}", "--group", size, *zeros, "--method", method, *form, *common)
            made[out] = f"Penstock {method}, {case}", ours(model, out, flags)
        for method in ("gptq", "awq") if bits in ("4", "8") else ():
            out = work / f"llmcompressor-{method}-{bits}-{group}"
            flags = ("--method", method, "--bits", bits, "--group", size, *zeros)
            made[out] = f"llmcompressor {method}, {case}", theirs(python, model, out, work / "calibration.json", flags)
    scored = folder_rows(python, model, list(made), work / "check.json")
    return [
        {"name": name, "mib": _mib(out), "seconds": seconds, **summary(scored[str(out)])}
        for out, (name, seconds) in made.items()
    ]


def _files(
    python: str,
    gguf: Path,
    work: Path,
    types: Sequence[str],
    methods: Sequence[str],
    calibration: Sequence[Sequence[int]],
    common: Sequence[str],
) -> list[dict[str, Any]]:
    matrix = work / "imatrix.json"
    if not matrix.exists():
        matrix.write_text(json.dumps(importance(gguf, calibration)))
    made: dict[Path, tuple[str, float | None]] = {}
    for kind in types:
        for method in methods:
            out = work / f"penstock-{method}.{kind}.gguf"
            flags = ("--scheme", f"gguf:{kind}", "--method", method, *common)
            made[out] = f"Penstock {method}, {kind}", ours(gguf, out, flags)
    for name, flags in (("llama.cpp", ()), ("llama.cpp imatrix", ("--imatrix", str(matrix)))):
        script, out = str(PEERS / "llama_cpp_quantize.py"), work / name.replace(" ", "-")
        began = time.perf_counter()
        done = subprocess.run(
            [python, script, str(gguf), str(out), "--types", ",".join(types), *flags],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        seconds = round((time.perf_counter() - began) / len(types), 1)
        for kind, line in zip(types, done.stdout.splitlines(), strict=True):
            made[Path(line)] = f"{name}, {kind}", seconds
    rows = []
    for out, (name, seconds) in made.items():
        figures = work / f"{out.parent.name}-{out.name}.json"
        command = ("bench", "quality", str(out), "--against", str(gguf), "--dtype", "float32", "--json", str(figures))
        subprocess.run([sys.executable, "-m", "penstock", *command], check=True, stdout=subprocess.DEVNULL)
        [*_, row] = json.loads(figures.read_text())["results"]
        rows.append({"name": name, "mib": _mib(out), "seconds": seconds, **row})
    return rows


def _mib(path: Path) -> float:
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return round(sum(file.stat().st_size for file in files) / (1 << 20), 1)


if __name__ == "__main__":
    run_command(quantization)
