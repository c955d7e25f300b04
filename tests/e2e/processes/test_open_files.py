"""The limit of open files, which is also that of connections."""

import sys
from pathlib import Path

from tests.e2e.server import serving

COMMAND = (sys.executable, "-m", "penstock", "serve")


def test_the_server_takes_the_hard_limit(tmp_path: Path) -> None:
    low = ("/bin/sh", "-c", 'ulimit -Sn 200; ulimit -Hn 3000; exec "$0" "$@"')
    with serving(tmp_path / "log", "--state-dir", "none", command=(*low, *COMMAND)) as server:
        limits = Path(f"/proc/{server.process.pid}/limits").read_text()
    (line,) = (line for line in limits.splitlines() if line.startswith("Max open files"))
    assert line.split()[3:5] == ["3000", "3000"]
