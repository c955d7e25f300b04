"""Measures the simulator: its speed, and how exact it is.

    python benchmarks/simulator.py speed mooncake_conversation.jsonl --json FILE
    python benchmarks/simulator.py accuracy --json FILE
    python benchmarks/simulator.py gpu --json FILE
    python benchmarks/simulator.py aiconfigurator PYTHON --json FILE

`speed`: a trace on eight replicas, beside the time that the schedulers alone take for the same steps, in turn.
`accuracy`: real servers of SmolLM2-135M and their simulation, at 50, 80 and 95% of their capacity. The cost of steps
is fitted to another workload. `gpu`: the cost model beside results/gpu.json. `aiconfigurator`: the cost model beside
the measured tables of aiconfigurator-core, which PYTHON can import.
"""

from pathlib import Path
from typing import Annotated

import typer
from results import JSON, write
from simulator_figures.accuracy import accuracy_figures
from simulator_figures.gpu import gpu_figures, table_figures
from simulator_figures.speed import speed_figures

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def speed(trace: Path, rounds: int = 3, json: Annotated[Path | None, JSON] = None) -> None:
    write({"benchmark": "simulator speed", **speed_figures(trace, rounds)}, json)


@app.command()
def accuracy(runs: int = 5, requests: int = 60, json: Annotated[Path | None, JSON] = None) -> None:
    write({"benchmark": "simulator accuracy", **accuracy_figures(runs, requests)}, json)


@app.command()
def gpu(json: Annotated[Path | None, JSON] = None) -> None:
    write({"benchmark": "simulator gpu", **gpu_figures()}, json)


@app.command()
def aiconfigurator(python: Path, json: Annotated[Path | None, JSON] = None) -> None:
    write({"benchmark": "simulator aiconfigurator", **table_figures(python)}, json)


if __name__ == "__main__":
    app()
