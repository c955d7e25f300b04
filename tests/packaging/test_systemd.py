"""The systemd unit, read by systemd."""

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.config.server import ServerConfig

UNIT = Path(__file__).parents[2] / "packaging/systemd/penstock.service"
PROGRAM = "/opt/penstock/bin/penstock"


def option(name: str) -> str:
    """An option of the unit that is set once."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return parser["Service"][name]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace(PROGRAM, "/bin/true"))  # systemd checks that it exists
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_its_exposure_is_low() -> None:
    command = ["systemd-analyze", "security", "--offline=yes", "--no-pager", "--threshold=20", str(UNIT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-200:]  # 20 is an exposure of 2.0 of 10


def test_it_gives_requests_the_time_to_finish() -> None:
    assert option("KillMode") == "mixed"
    assert int(option("TimeoutStopSec")) > ServerConfig().drain_timeout + 10
    assert option("ExecStart") == f"{PROGRAM} serve"
