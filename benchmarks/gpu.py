"""Measures all figures of a GPU and writes one JSON, with the roofline and the target of each figure.

    python benchmarks/gpu.py --json benchmarks/results/gpu.json

Each group of figures runs in its own process with its own time limit. A group that fails does not affect the others,
and keeps the figures that it had. Models have random weights, made on the device.
`scripts/gpu_check.sh` runs this after the tests.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_figures.checkpoint import roomiest
from gpu_figures.roofline import H200
from results import parser, write

# Time limits of the groups.
SECONDS = {"ops": 90, "llama-bf16": 95, "llama-fp8": 95, "qwen3": 40, "ready": 60}


@dataclass(frozen=True)
class Sizes:
    """The sizes of everything that is measured. The tiny ones only show that all of it runs."""

    llama: dict[str, Any]
    qwen3: dict[str, Any]
    decode: str  # cases, as NxIN/OUT
    host: str
    saturated_bf16: str
    saturated_fp8: str
    prompt: int
    tiny: bool = False


def sizes(tiny: bool) -> Sizes:
    from make_model import LLAMA, SHAPES

    if tiny:
        shape = SHAPES["tiny"] | {"vocab_size": 512, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
        return Sizes(shape, shape, "1x5/24", "2x5/24", "3x5/24", "3x5/24", 20, tiny=True)
    llama = LLAMA | {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 5e5,
        "tie_word_embeddings": False,
    }
    return Sizes(llama, SHAPES["qwen3-0.6b"], "1x128/256", "64x128/128", "256x128/2048", "512x128/2048", 2048)


# -- groups: each yields figures as soon as it has them ------------------------------------------------------------


def ops(chosen: Sizes, device: Any) -> Iterator[dict[str, Any]]:
    from gpu_figures import ops as gpu_ops
    from gpu_figures.peaks import measure

    peaks = measure(device, 256, 1 << 24) if chosen.tiny else measure(device)
    yield {"name": "peaks", "bandwidth_tb_s": peaks.bandwidth / 1e12, "bf16_tflop_s": peaks.bf16_flops / 1e12} | {
        "fp8_tflop_s": peaks.fp8_flops / 1e12
    }
    own = gpu_ops.SMALL if chosen.tiny else gpu_ops.Sizes()
    for row in gpu_ops.measure(own, H200, device):
        figure = {"name": f"op: {row['op']}, {row['shape']}", **row}
        if row["op"] == "attention decode bf16" and row["shape"] == "32x8192":
            figure |= {"share": row["share_of_roofline"], "target": 0.8}
        yield figure


def llama_bf16(chosen: Sizes, device: Any) -> Iterator[dict[str, Any]]:
    yield from _llama(chosen, device, chosen.saturated_bf16, "bf16", 0.75)


def llama_fp8(chosen: Sizes, device: Any) -> Iterator[dict[str, Any]]:
    yield from _llama(chosen, device, chosen.saturated_fp8, "fp8", 0.70)


def _llama(chosen: Sizes, device: Any, saturated: str, kind: str, decode_target: float) -> Iterator[dict[str, Any]]:
    from gpu_figures.engine import Engine

    from penstock.bench.workload import Case, parse_cases

    one, many, full = (parse_cases(text)[0] for text in (chosen.decode, chosen.host, saturated))
    prompt = Case(1, chosen.prompt, 1)
    length = max(case.prompt_len + case.output_len for case in (one, many, full, prompt))
    began = time.perf_counter()
    quantized: dict[str, Any] = {} if kind == "bf16" else _fp8(device)
    engine = Engine(chosen.llama, device, sequences=full.count, length=length, **quantized)
    for case in (one, prompt, Case(full.count, full.prompt_len, 2)):  # compiles what no graph has, and warms up
        engine.run(case)
    yield {"name": f"engine {kind} made, captured and warm", "seconds": time.perf_counter() - began}
    yield from attempt(f"decode {kind} {one}", lambda: _decode(engine, kind, one, decode_target))
    yield from attempt(f"decode {kind} {many}", lambda: _decode(engine, kind, many))
    yield from attempt(f"prefill {kind} {chosen.prompt}", lambda: _prefill(engine, kind, prompt))
    yield from attempt(f"saturated {kind} {full}", lambda: _saturated(engine, full))
    engine.close()


def attempt(name: str, measure: Callable[[], Iterator[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yields the figures with this name, or the error if they cannot be measured, so that later figures still run."""
    try:
        for figure in measure():
            yield {"name": name, **figure}
    except (RuntimeError, ValueError) as error:  # CUDA's and torch's are RuntimeErrors
        yield {"name": name, "error": str(error)[-1000:]}


def _decode(engine: Any, kind: str, case: Any, target: float = 0.0) -> Iterator[dict[str, Any]]:
    from gpu_figures.engine import mean_context

    between, on_device = engine.run(case).decoding()
    least = engine.decode_seconds(H200, case.count, mean_context(case))
    figure = {
        "output_tok_s": case.count / between,
        "ms_a_step": between * 1e3,
        "roofline_ms": least * 1e3,
        "share": least / between,
    }
    yield figure | ({"target": target} if target else {})
    host = (between - on_device) * 1e6
    yield {"name": f"exposed host time {kind} {case}", "us_a_step": host, "target_us": 100}


def _prefill(engine: Any, kind: str, case: Any) -> Iterator[dict[str, Any]]:
    seconds = sorted(engine.run(case).seconds for _ in range(3))[1]
    rate = engine.prefill_flops(case.prompt_len) / seconds
    share = rate / (H200.bf16_flops if kind == "bf16" else H200.fp8_flops)
    yield {"seconds": seconds, "tflop_s": rate / 1e12, "share": share, "target": 0.5}


def _saturated(engine: Any, case: Any) -> Iterator[dict[str, Any]]:
    seconds, least = engine.run(case).seconds, engine.case_seconds(H200, case)
    rate = case.count * case.output_len / seconds
    yield {"output_tok_s": rate, "seconds": seconds, "roofline_s": least, "share": least / seconds, "target": 0.65}


def _fp8(device: Any) -> dict[str, Any]:
    """Settings of an fp8 engine. Without a GPU: the nearest ones."""
    if device.type == "cuda":
        return {"quantization": "fp8", "kv_cache_dtype": "fp8"}
    return {"quantization": "int8"}


def qwen3(chosen: Sizes, device: Any) -> Iterator[dict[str, Any]]:
    """Decoding at batch 1 and with many sequences, with and without --deterministic."""
    from gpu_figures.engine import Engine, mean_context

    from penstock.bench.workload import parse_cases

    one, many = (parse_cases(text)[0] for text in (chosen.decode, chosen.host))
    length = max(case.prompt_len + case.output_len for case in (one, many))
    for deterministic in (False, True):
        engine = Engine(chosen.qwen3, device, sequences=many.count, length=length, deterministic=deterministic)
        engine.run(one)
        for case in (one, many):
            between, _ = engine.run(case).decoding()
            figure = {
                "name": f"qwen3-0.6b {'deterministic ' if deterministic else ''}{case}",
                "output_tok_s": case.count / between,
                "share": engine.decode_seconds(H200, case.count, mean_context(case)) / between,
            }
            yield figure | ({"target_tok_s": 900} if case is one and not deterministic else {})
        engine.close()


def ready(chosen: Sizes, device: Any) -> Iterator[dict[str, Any]]:
    """Time from the start of a process to an engine that has read a checkpoint and captured its graphs.

    The checkpoint is in the page cache or in memory.
    """
    from gpu_figures.checkpoint import write_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        size = write_checkpoint(Path(folder), chosen.llama, device)
        command = [sys.executable, str(Path(__file__).parent / "gpu_figures" / "checkpoint.py"), folder, device.type]
        began = time.perf_counter()
        subprocess.run(command, check=True)
        seconds = time.perf_counter() - began
    yield {"name": "ready", "seconds": seconds, "target_s": 25, "checkpoint_gb": size / 1e9}


GROUPS: dict[str, Callable[[Sizes, Any], Iterator[dict[str, Any]]]] = {
    "ops": ops,
    "llama-bf16": llama_bf16,
    "llama-fp8": llama_fp8,
    "qwen3": qwen3,
    "ready": ready,
}


# -- the processes ---------------------------------------------------------------------------------------------------


def run_group(name: str, device: str, tiny: bool) -> None:
    """Runs one group in this process. Prints a line of JSON for each figure."""
    import torch

    for figure in GROUPS[name](sizes(tiny), torch.device(device)):
        print(json.dumps(figure), flush=True)


def measure_group(name: str, device: str, tiny: bool, seconds: float) -> tuple[list[dict[str, Any]], str]:
    """Runs a group in its own process. Returns (its figures, the reason why some are missing or "")."""
    command = [sys.executable, __file__, "--group", name, "--device", device, *(["--tiny"] if tiny else [])]
    # If the group is killed, its files are removed with the folder.
    with tempfile.TemporaryDirectory(dir=roomiest()) as scratch, tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env={**os.environ, "TMPDIR": scratch},
            start_new_session=True,
        )
        killer = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))  # and its children
        killer.start()
        assert process.stdout is not None
        lines = [line for line in process.stdout if line.startswith("{")]
        code = process.wait()
        killer.cancel()
        said.seek(0)
        why = said.read()[-2000:]
    figures = [json.loads(line) for line in lines]
    if code == 0:
        return figures, ""
    return figures, f"stopped after {seconds:.0f} s" if code == -9 else f"ended with {code}: {why}"


def rounded(figure: dict[str, Any]) -> dict[str, Any]:
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in figure.items()}


def machine(device: str) -> dict[str, str]:
    """The GPU's name and memory, from the driver."""
    from penstock.config.machine.gpu import detect_gpu

    gpu = detect_gpu() if device == "cuda" else None
    return {} if gpu is None else {"gpu": gpu.name, "memory_gb": f"{gpu.memory / 1e9:.0f}"}


def options() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--seconds", type=float, default=480.0, help="time limit of all groups together; default: 480")
    made.add_argument("--tiny", action="store_true", help="tiny sizes: shows that everything runs, measures nothing")
    usual = ",".join(GROUPS)
    made.add_argument("--only", metavar="GROUPS", default=usual, help=f"some of {usual}; default: all")
    made.add_argument("--group", choices=GROUPS, help=argparse.SUPPRESS)
    return made.parse_args()


def main() -> None:
    args = options()
    if args.group:
        run_group(args.group, args.device, args.tiny)
        return
    figures: list[dict[str, Any]] = []
    failures: dict[str, str] = {}  # by group, or by figure
    end = time.monotonic() + args.seconds
    for name in args.only.split(","):
        left = max(min(SECONDS[name], end - time.monotonic()), 0.0)
        found, why = measure_group(name, args.device, args.tiny, left)
        figures += [rounded(figure) for figure in found]
        if why:
            failures[name] = why
        failures |= {figure["name"]: figure["error"] for figure in found if "error" in figure}
        for figure in found:
            if not figure["name"].startswith("op:"):
                print(json.dumps(rounded(figure)), file=sys.stderr, flush=True)
    peaks = {"bandwidth_tb_s": H200.bandwidth / 1e12, "bf16_pflop_s": H200.bf16_flops / 1e15}
    roofline = rounded({**peaks, "fp8_pflop_s": H200.fp8_flops / 1e15})
    result = {"benchmark": "gpu", **machine(args.device), "roofline": roofline}
    write({**result, "failures": failures, "figures": figures}, args.json)
    if failures:
        raise SystemExit(f"figures are missing: {', '.join(failures)}")


if __name__ == "__main__":
    main()
