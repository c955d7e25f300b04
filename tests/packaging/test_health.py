"""The health check of a container, asked about servers of this machine."""

import http.server
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.certificates import Authority

COMMAND = [sys.executable, "-m", "penstock.cli.operate.health"]


class Probe(http.server.BaseHTTPRequestHandler):
    """Answers /readyz with the status of its server."""

    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/readyz" else 404)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Nothing is logged."""


@contextmanager
def serving(status: int, host: str = "127.0.0.1", certificate: Path | None = None) -> Iterator[None]:
    """A server of this process, on a port that nobody is told."""
    handler = type("Handler", (Probe,), {"status": status})
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = type("Server", (http.server.HTTPServer,), {"address_family": family})((host, 0), handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def check(pid: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, str(pid)], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1"])
def test_the_port_is_found(host: str) -> None:
    with serving(200, host):
        assert check(os.getpid()).returncode == 0


def test_tls_is_found(tmp_path: Path) -> None:
    (tmp_path / "both.pem").write_bytes(b"".join(Authority(tmp_path).sign(1)))
    with serving(200, certificate=tmp_path / "both.pem"):
        assert check(os.getpid()).returncode == 0
    with serving(503, certificate=tmp_path / "both.pem"):
        assert check(os.getpid()).returncode == 1


def test_another_protocol_beside_is_not_the_server() -> None:
    with socket.create_server(("127.0.0.1", 0)), serving(200):  # the first one never answers, as gRPC does not to HTTP
        assert check(os.getpid()).returncode == 0


def test_one_that_is_not_ready_or_does_not_listen_is_unhealthy() -> None:
    with serving(503):
        done = check(os.getpid())
        assert done.returncode == 1 and "is not ready on" in done.stderr
    done = check(os.getpid())
    assert done.returncode == 1 and "any port" in done.stderr
    done = check(2**22 + 1)
    assert done.returncode == 1 and "cannot be read: No such file" in done.stderr
