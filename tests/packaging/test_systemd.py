"""The systemd unit, read by systemd."""

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.config import read_settings
from penstock.config.server import ServerConfig
from tests.e2e.server import serving

FOLDER = Path(__file__).parents[2] / "packaging/systemd"
UNIT, TEMPLATE = FOLDER / "penstock.service", FOLDER / "penstock@.service"
PROGRAM = "/opt/penstock/bin/penstock"


def option(name: str) -> str:
    """An option of the unit that is set once."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return parser["Service"][name]


def variables() -> dict[str, str]:
    """The variables that the unit sets."""
    lines = [line for line in UNIT.read_text().splitlines() if line.startswith("Environment=")]
    return dict(each.split("=", 1) for line in lines for each in line.removeprefix("Environment=").split())


def uncommented(text: str, pattern: str) -> str:
    return re.sub(f"^{pattern}$", r"\1", text, flags=re.MULTILINE)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize(("source", "name"), [(UNIT, UNIT.name), (TEMPLATE, "penstock@small.service")])
def test_systemd_finds_nothing_wrong(tmp_path: Path, source: Path, name: str) -> None:
    unit = tmp_path / name
    unit.write_text(source.read_text().replace(PROGRAM, "/bin/true"))  # systemd checks that it exists
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


def test_what_it_stores_outlives_it_and_it_can_write_there() -> None:
    """ProtectSystem=strict makes all else read-only."""
    assert option("StateDirectory") == option("CacheDirectory") == "penstock"
    assert variables() == {
        "PENSTOCK_CONFIG": "/etc/penstock/penstock.yaml",
        "PENSTOCK_STATE_DIR": "%S/penstock",
        "HF_HOME": "%C/penstock/huggingface",
    }


def test_a_wrong_setting_is_not_tried_again() -> None:
    assert (option("Restart"), option("RestartPreventExitStatus")) == ("on-failure", "2")


def test_its_files_of_settings_are_read(tmp_path: Path) -> None:
    """Also with every line in use."""
    for text in (settings := (FOLDER / "penstock.yaml").read_text()), uncommented(settings, r"#([\w-]+:.*)"):
        (tmp_path / "penstock.yaml").write_text(text)
        read_settings({}, {"PENSTOCK_CONFIG": str(tmp_path / "penstock.yaml")})
    names = re.findall(r"^#(\w+)=", (FOLDER / "penstock.env").read_text(), re.MULTILINE)
    assert {name.removeprefix("PENSTOCK_").lower() for name in names} - {"hf_token"} == {"api_key", "admin_key"}


def test_the_template_is_the_unit_with_names_of_its_own() -> None:
    unit, template = (
        [line for line in path.read_text().splitlines() if not line.startswith("#")] for path in (UNIT, TEMPLATE)
    )
    assert len(unit) == len(template)
    changed = {new: old for old, new in zip(unit, template, strict=True) if new != old}
    assert changed == {
        "Description=Penstock, an LLM inference server (%i)": "Description=Penstock, an LLM inference server",
        "Environment=PENSTOCK_CONFIG=/etc/penstock/%i.yaml": "Environment=PENSTOCK_CONFIG=/etc/penstock/penstock.yaml",
        "EnvironmentFile=-/etc/penstock/%i.env": "EnvironmentFile=-/etc/penstock/penstock.env",
        "StateDirectory=penstock-%i": "StateDirectory=penstock",
        "Environment=HF_HOME=%C/penstock/huggingface PENSTOCK_STATE_DIR=%S/penstock-%i": (
            "Environment=HF_HOME=%C/penstock/huggingface PENSTOCK_STATE_DIR=%S/penstock"
        ),
    }


# What the unit's sandbox lets the server see: all is read-only but its own folders and a private /tmp. The checkout,
# which is the first argument, stays where it is: that may be below /tmp.
SANDBOX = """
checkout=$1; shift
mount --make-rprivate / && mount --bind / / && mount -o remount,bind,ro / && exec 3<"$checkout" &&
for folder in /var/lib /var/cache /tmp; do mount -t tmpfs tmpfs $folder || exit 9; done &&
mkdir -p "$checkout" && mount -c --bind /proc/self/fd/3 "$checkout" && exec 3<&- &&
mkdir /var/lib/penstock /var/cache/penstock && cd /var/cache/penstock && ! touch /etc/penstock-was-here 2>/dev/null &&
exec env HOME=/ HF_HOME=/var/cache/penstock/huggingface PENSTOCK_STATE_DIR=/var/lib/penstock "$@"
"""


def may_mount() -> bool:
    tried = ["unshare", "--mount", "sh", "-c", "mount --make-rprivate / && mount -t tmpfs tmpfs /tmp"]
    return shutil.which("unshare") is not None and subprocess.run(tried, capture_output=True).returncode == 0


@pytest.mark.skipif(not may_mount(), reason="this user may not mount file systems: run the test as root")
def test_it_serves_and_stores_in_a_read_only_root(tmp_path: Path) -> None:
    sandbox = ("unshare", "--mount", "sh", "-c", SANDBOX, "sh", str(FOLDER.parents[1]))
    command = (*sandbox, sys.executable, "-m", "penstock", "serve")
    with serving(tmp_path / "log", "--kv-cache-memory", "64MiB", command=command) as server:
        stored = server.post("/v1/responses", {"input": "def add(a, b):", "max_output_tokens": 2}).json()
        assert server.get(f"/v1/responses/{stored['id']}").json()["id"] == stored["id"]
    text = server.log.read_text()
    assert "Read-only" not in text and "WARNING" not in text, text
