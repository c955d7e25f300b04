"""Measures the simulator: its speed, and how exact it is.

    python benchmarks/simulator.py speed mooncake_conversation.jsonl --json FILE
    python benchmarks/simulator.py dynamo PYTHON mooncake_conversation.jsonl --json FILE
    python benchmarks/simulator.py accuracy FOLDER --seconds 280 --json FILE
    python benchmarks/simulator.py gpu --json FILE
    python benchmarks/simulator.py aiconfigurator PYTHON --json FILE

`speed`: a trace on eight replicas, beside the time that the schedulers alone take for the same steps, in turn.
`dynamo`: a trace on eight replicas at several speeds, with round robin and each one's router: Dynamo's replay (PYTHON
can import ai-dynamo) beside ours with the step times that Dynamo's has by default.
`accuracy`: real servers of SmolLM2-135M and their simulation, at 50, 80 and 95% of their capacity. The cost of steps
is fitted to another workload. FOLDER keeps the rounds: each call runs as many of those it lacks as --seconds suffice
for, and compares all so far. `gpu`: the cost model beside results/gpu.json. `aiconfigurator`: the cost model beside
the measured tables of aiconfigurator-core, which PYTHON can import.
"""

from pathlib import Path
from typing import Annotated

import typer
from results import JSON, write
from simulator_figures.accuracy import accuracy_figures
from simulator_figures.dynamo import dynamo_figures
from simulator_figures.gpu import gpu_figures, table_figures
from simulator_figures.speed import speed_figures

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def speed(
    trace: Path,
    router: list[str] = ["round_robin", "cluster"],  # noqa: B006
    rounds: int = 1,
    json: Annotated[Path | None, JSON] = None,
) -> None:
    write({"benchmark": "simulator speed", **speed_figures(trace, router, rounds)}, json)


@app.command()
def dynamo(
    python: Path,
    trace: Path,
    speed: list[float] = [1.0, 2.0, 4.0],  # noqa: B006
    json: Annotated[Path | None, JSON] = None,
) -> None:
    write({"benchmark": "simulator dynamo", "trace": trace.name, **dynamo_figures(python, trace, speed)}, json)


@app.command()
def accuracy(
    folder: Path,
    runs: int = 5,
    requests: int = 50,
    seconds: float = 280.0,
    json: Annotated[Path | None, JSON] = None,
) -> None:
    write({"benchmark": "simulator accuracy", **accuracy_figures(folder, runs, requests, seconds)}, json)


@app.command()
def gpu(json: Annotated[Path | None, JSON] = None) -> None:
    write({"benchmark": "simulator gpu", **gpu_figures()}, json)


@app.command()
def aiconfigurator(python: Path, json: Annotated[Path | None, JSON] = None) -> None:
    write({"benchmark": "simulator aiconfigurator", **table_figures(python)}, json)


if __name__ == "__main__":
    app()
