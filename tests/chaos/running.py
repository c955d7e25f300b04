"""Runs tests of the suite and benchmarks as experiments."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.chaos.place import require

PATIENCE = 60.0  # seconds for a command that was interrupted to end its servers
ROOT = Path(__file__).resolve().parents[2]


async def run_tests(names: Sequence[str], variables: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Runs tests, rare ones too, with new random examples. Returns how many passed, and the largest of each figure that
    they recorded (`record_property`). A name is a file, or the beginning of a test's."""
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report.xml"
    files = sorted({name.partition("::")[0] for name in names})
    wanted = " or ".join(
        f"({Path(name.partition('::')[0]).name} and {name.partition('::')[2]})" if "::" in name else Path(name).name
        for name in names
    )
    options = ["-m", "", "--hypothesis-profile=new", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *options, "-k", wanted, *files]
    output = await _run(command, folder / "output", dict(variables))
    require(report.exists(), f"pytest did not run: {output[-2000:]}")
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    count = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    bad = count["failures"] + count["errors"]
    require(not bad and count["tests"], f"{bad} of {count['tests']} tests failed:\n{output[-3000:]}")
    skipped = {"skipped": count["skipped"]} if count["skipped"] else {}
    return {"tests_passed": count["tests"] - count["skipped"], **skipped, **_largest(suite)}


def _largest(suite: ElementTree.Element) -> dict[str, float]:
    """The largest value of each property that tests recorded. Hypothesis records its own for the whole suite."""
    found: dict[str, float] = {}
    for each in suite.iterfind("testcase/properties/property"):
        name, value = each.get("name", ""), float(each.get("value", "0"))
        found[name] = max(found.get(name, value), value)
    return found


async def run_benchmark(
    script: str, flags: Sequence[str], part: str, holds: Callable[[dict[str, Any]], bool], folder: Path
) -> dict[str, Any]:
    """Runs a script of benchmarks/, and returns a part of its figures. Raises Failed if they do not hold."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = folder / "figures.json"
    output = await _run(
        [sys.executable, str(ROOT / "benchmarks" / script), "--json", str(figures), *flags], folder / "output", {}
    )
    require(figures.exists(), f"{script} did not finish: {output[-2000:]}")
    found: dict[str, Any] = json.loads(figures.read_text())[part]
    require(holds(found), f"{found}\n{output[-2000:]}")
    return found


async def _run(command: list[str], output: Path, variables: Mapping[str, str]) -> str:
    """Runs a command to its end. It ends with this one. Returns what it has written."""
    with output.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stdout=sink, stderr=sink, env={**os.environ, **variables}
        )
        try:
            await process.wait()
        except asyncio.CancelledError:
            for number in (signal.SIGINT, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, TimeoutError):
                    process.send_signal(number)
                    await asyncio.wait_for(process.wait(), PATIENCE)
            raise
    return output.read_text(errors="replace")
