"""A server whose log nobody reads."""

import http.client
import json
import os
import signal
import subprocess
import sys

from penstock.weights.packaged import EMBEDDED
from tests.e2e.bound import bound
from tests.e2e.server import gauge, status
from tests.patience import PATIENCE, wait_for
from tests.ports import free_port

REQUESTS = 20_000  # lines of more bytes than a pipe and the lines that are kept


def test_a_log_that_nobody_reads_stops_nothing() -> None:
    port = free_port()
    command = [sys.executable, "-m", "penstock", "serve", EMBEDDED, "--port", str(port), "--threads", "1"]
    process = subprocess.Popen(bound(command), stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: status(url + "/readyz") == 200, "the server to be ready")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        path = "/" + "x" * 190  # the log shows 200 bytes of a path

        def ask(method: str, where: str, **more: object) -> bytes:
            connection.request(method, where, **more)  # type: ignore[arg-type]
            return connection.getresponse().read()

        dropped = 0.0
        for _ in range(REQUESTS // 500):
            for _ in range(500):
                ask("GET", path)
            if dropped := gauge(ask("GET", "/metrics").decode(), "penstock_log_lines_dropped_total"):
                break
        assert dropped > 0
        body = json.dumps({"prompt": "def f", "max_tokens": 3})
        answer = json.loads(ask("POST", "/v1/completions", body=body, headers={"content-type": "application/json"}))
        assert answer["usage"]["completion_tokens"] == 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stderr is not None:
            process.stderr.close()
