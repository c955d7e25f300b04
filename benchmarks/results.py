"""What every committed figure carries: commit, date and hardware."""

import argparse
import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def provenance() -> dict[str, Any]:
    """The commit (with "+" when the tree was changed), the day and the machine."""
    describe = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    commit = subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip()
    info = Path("/proc/cpuinfo").read_text()
    model = next((line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")), "unknown")
    flags = set(next((line for line in info.splitlines() if line.startswith("flags")), "").split())
    isa = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    cores = len(os.sched_getaffinity(0))
    return {
        "commit": commit or "unknown",
        "date": datetime.date.today().isoformat(),
        "hardware": {
            "cpu": model,
            "cores": cores,
            "isa": isa,
            "python": platform.python_version(),
        },
    }


def write(result: dict[str, Any], path: Path | None) -> None:
    """Prints the figures, and keeps them with their provenance where a path is given."""
    text = json.dumps({**provenance(), **result}, indent=2)
    print(text)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser with the options every benchmark has."""
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    return made
