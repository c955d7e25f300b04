"""Does to a server what could stop it, and shows what happened: make chaos, or python -m tests.chaos [--only 6,7]"""

import asyncio
import json
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tests.chaos.experiments import EXPERIMENTS, SOAK, Experiment
from tests.chaos.place import Failed


def main(
    only: Annotated[str, typer.Option(metavar="NUMBERS", help="Experiments to run, such as F1,6. Default: all.")] = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures here.")
    ] = None,
    keep: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Keep logs and outputs in this folder.")] = None,
    minutes: Annotated[float, typer.Option(help="Of experiment 32.")] = 120.0,
    plot: Annotated[Path | None, typer.Option(metavar="PNG", help="A plot of experiment 32.")] = None,
) -> None:
    """Run the experiments and show their figures. The exit status is 1 if one fails. Number 32 runs only if named."""
    soak = SOAK._replace(run=partial(SOAK.run, minutes=minutes, plot=plot))
    chosen = _chosen(only, soak)
    with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as scratch:
        rows = [
            _run(experiment, (keep or Path(scratch)) / experiment.number, n, len(chosen))
            for n, experiment in enumerate(chosen, 1)
        ]
    _show(rows)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=2) + "\n")
    failed = [row["experiment"] for row in rows if row["result"] != "passed"]
    if failed:
        print(f"{len(failed)} of {len(rows)} failed: {', '.join(failed)}", file=sys.stderr)
        sys.exit(1)


def _chosen(only: str, soak: Experiment) -> list[Experiment]:
    known = {experiment.number: experiment for experiment in (*EXPERIMENTS, soak)}
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in known]:
        sys.exit(f"--only: there is no experiment {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in wanted] if wanted else list(EXPERIMENTS)


def _run(experiment: Experiment, folder: Path, place: int, count: int) -> dict[str, Any]:
    print(f"[{place}/{count}] {experiment.number}: {experiment.what} ...", flush=True)
    began = time.monotonic()
    figures, error = {}, ""
    try:
        figures = asyncio.run(experiment.run(folder))
    except (Failed, AssertionError) as failure:
        error = str(failure)
    except Exception:
        error = traceback.format_exc()
    seconds = round(time.monotonic() - began, 1)
    print(f"    {'FAILED: ' + error if error else 'passed'} ({seconds} s)", flush=True)
    result = "FAILED" if error else "passed"
    return {"experiment": experiment.number, "what": experiment.what, "result": result, "seconds": seconds} | (
        {"error": error} if error else {"figures": figures}
    )


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Experiments", title_justify="left")
    for heading in ("", "what", "result", "s", "figures"):
        table.add_column(heading, justify="right" if heading == "s" else "left", overflow="fold")
    for row in rows:
        shown = row.get("error", "").strip().splitlines()[:1] or [
            f"{name.replace('_', ' ')} {value}" for name, value in row.get("figures", {}).items()
        ]
        table.add_row(row["experiment"], row["what"], row["result"], str(row["seconds"]), ", ".join(shown))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
