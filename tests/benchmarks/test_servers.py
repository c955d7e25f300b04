"""The servers of a benchmark end with it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.processes import alive
from tests.patience import wait_for

BENCHMARK = """
import sys, time, servers
print(servers.start(["sleep", "600"], start_new_session=True).pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_the_benchmark(number: signal.Signals) -> None:
    command = [sys.executable, "-c", BENCHMARK]
    folder = Path(__file__).parents[2] / "benchmarks"
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        server = int(benchmark.stdout.readline())
        assert alive(server)
        benchmark.send_signal(number)
    wait_for(lambda: not alive(server), "the server to end")
