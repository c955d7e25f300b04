"""The cost model of GPUs beside measured steps: ours on an H200, and the tables of aiconfigurator-core."""

import json
import subprocess
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from penstock.simulate.build import size_group
from penstock.simulate.costs.work import StepCostModel, StepLoad
from penstock.simulate.prices import load_prices
from penstock.simulate.scenario import ReplicaSpec

MEASURED = Path(__file__).parents[1] / "results" / "gpu.json"
SCRIPT = Path(__file__).with_name("aiconfigurator_steps.py")


def decode(rows: int, context: int) -> StepLoad:
    """A step in which `rows` sequences decode after `context` tokens."""
    return StepLoad(rows, rows * (context + 1), 0, 0, 0, rows)


def prefill(rows: int, tokens: int) -> StepLoad:
    """A step with `rows` whole prompts."""
    return StepLoad(0, 0, rows * tokens, rows * tokens * (tokens + 1) // 2, rows * tokens, rows)


def predicted(model: str, device: str, quantization: str, load: StepLoad, tensor: int = 1) -> float:
    """The cost model's seconds."""
    return cost_of(model, device, quantization, tensor).seconds(load)


@cache
def cost_of(model: str, device: str, quantization: str, tensor: int) -> StepCostModel:
    """The cost model of a replica."""
    spec = ReplicaSpec(
        model=model,
        device=device,
        quantization=quantization,  # type: ignore[arg-type]
        kv_cache="fp8" if quantization == "fp8" else "auto",
        tensor=tensor,
        kv_tokens=16,
    )
    return size_group(spec, load_prices(), Path()).cost


def gpu_figures() -> dict[str, Any]:
    """Returns the error of each case of results/gpu.json that is a step of a whole model, on an H200."""
    found = {each["name"]: each for each in json.loads(MEASURED.read_text())["figures"]}
    cases: list[tuple[str, float, str, str, StepLoad | list[StepLoad]]] = []
    for kind in ("bf16", "fp8"):
        quantization, model = ("none" if kind == "bf16" else kind), "llama-3.1-8b"
        for name, rows, context in ((f"decode {kind} 1x128/256", 1, 256), (f"decode {kind} 64x128/128", 64, 192)):
            cases.append((name, found[name]["ms_a_step"] / 1e3, model, quantization, decode(rows, context)))
        name = f"prefill {kind} 2048"
        cases.append((name, found[name]["seconds"], model, quantization, prefill(1, 2048)))
        rows = 256 if kind == "bf16" else 512
        name = f"saturated {kind} {rows}x128/2048"
        steps = [prefill(64, 128)] * (rows // 64) + [decode(rows, 128 + i) for i in range(2048)]
        cases.append((name, found[name]["seconds"], model, quantization, steps))
    for rows, context in ((1, 256), (64, 192)):
        name = f"qwen3-0.6b {rows}x128/{256 if rows == 1 else 128}"
        cases.append((name, rows / found[name]["output_tok_s"], "qwen3-0.6b", "none", decode(rows, context)))
    rows_out = []
    for name, seconds, model, quantization, load in cases:
        loads = load if isinstance(load, list) else [load]
        ours = sum(predicted(model, "H200", quantization, each) for each in loads)
        rows_out.append(_row(name, seconds, ours))
    return {"cases": rows_out, "median_error": _median(rows_out)}


def table_figures(python: Path) -> dict[str, Any]:
    """Returns the error of each step that the other program's tables cover, and the median by GPU and by model."""
    done = subprocess.run([str(python), str(SCRIPT)], capture_output=True, text=True, check=True)
    rows = []
    for each in json.loads(done.stdout.splitlines()[-1]):
        load = decode(each["rows"], each["tokens"]) if each["decode"] else prefill(each["rows"], each["tokens"])
        ours = predicted(each["model"], each["device"], each["quantization"], load, each["tensor"])
        kind = "decode" if each["decode"] else "prefill"
        name = f"{each['model']} {each['quantization']} {each['device']} TP={each['tensor']} {kind} "
        rows.append({**each, **_row(name + f"{each['rows']}x{each['tokens']}", each["seconds"], ours)})
    groups = {key: sorted({row[key] for row in rows}) for key in ("device", "model", "decode", "quantization")}
    return {
        "median_error": _median(rows),
        **{f"by {key}": {str(v): _median([r for r in rows if r[key] == v]) for v in vs} for key, vs in groups.items()},
        "steps": len(rows),
        "worst": sorted(rows, key=lambda row: -abs(row["error"]))[:20],
    }


def _row(name: str, measured: float, ours: float) -> dict[str, Any]:
    return {"case": name, "measured_ms": 1e3 * measured, "ours_ms": 1e3 * ours, "error": round(ours / measured - 1, 3)}


def _median(rows: list[dict[str, Any]]) -> float:
    return round(median(abs(row["error"]) for row in rows), 3)
