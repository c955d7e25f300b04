"""Does to a server what could stop it, and shows what happened: make chaos, or python -m tests.chaos [--only 6,7]"""

import asyncio
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
from tests.chaos.report import Report, WrongFile, show


def main(
    only: Annotated[str, typer.Option(metavar="NUMBERS", help="Experiments to run, such as F1,6. Default: all.")] = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures here, beside those it has.")
    ] = None,
    keep: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Keep logs and outputs in this folder.")] = None,
    limit: Annotated[float, typer.Option(metavar="MINUTES", help="An experiment that takes longer has failed.")] = 15.0,
    minutes: Annotated[float, typer.Option(help="Of experiment 32, which has no other limit.")] = 120.0,
    plot: Annotated[Path | None, typer.Option(metavar="PNG", help="A plot of experiment 32.")] = None,
) -> None:
    """Run the experiments and show their figures. The exit status is 1 if one fails. Number 32 runs only if named."""
    soak = SOAK._replace(run=partial(SOAK.run, minutes=minutes, plot=plot))
    chosen = _chosen(only, soak)
    try:
        report = json_file and Report(json_file, [experiment.number for experiment in (*EXPERIMENTS, soak)])
    except WrongFile as error:
        sys.exit(f"--json: {error}")
    rows = []
    with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as scratch:
        for n, experiment in enumerate(chosen, 1):
            most = None if experiment.number == soak.number else limit
            rows.append(run_experiment(experiment, (keep or Path(scratch)) / experiment.number, n, len(chosen), most))
            if report is not None:
                report.add(rows[-1])
    show(rows)
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


async def _limited(experiment: Experiment, folder: Path, limit: float | None) -> dict[str, Any]:
    try:
        async with asyncio.timeout(None if limit is None else 60 * limit) as deadline:
            return await experiment.run(folder)
    except TimeoutError as error:
        if deadline.expired():
            raise Failed(f"no end within {limit:g} minutes (--limit)") from error
        raise


def run_experiment(experiment: Experiment, folder: Path, place: int, count: int, limit: float | None) -> dict[str, Any]:
    """The row of an experiment. `limit` is in minutes."""
    print(f"[{place}/{count}] {experiment.number}: {experiment.what} ...", flush=True)
    began = time.monotonic()
    figures, error = {}, ""
    try:
        figures = asyncio.run(_limited(experiment, folder, limit))
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


if __name__ == "__main__":
    typer.run(main)
