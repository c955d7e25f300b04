"""The address that a server takes, before it loads anything."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cli.address import AddressInUse, bind, listen, url_of


@pytest.mark.parametrize(
    ("family", "name", "url"),
    [
        (socket.AF_INET, ("127.0.0.1", 80), "http://127.0.0.1:80"),
        (socket.AF_INET6, ("::1", 80, 0, 0), "http://[::1]:80"),
    ],
)
def test_where_it_listens_is_told_as_clients_write_it(family: int, name: tuple[Any, ...], url: str) -> None:
    sock: Any = SimpleNamespace(family=family, getsockname=lambda: name)  # a machine may be without IPv6
    assert url_of(sock) == url


@pytest.mark.parametrize("host", ["256.1.1.1", "192.0.2.1", "no.such.host.invalid", "a" * 300, "a..b"])
def test_an_address_that_is_not_ours(host: str) -> None:
    with pytest.raises(AddressInUse, match=r"cannot listen on .*--host"):
        bind(host, 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]"])
def test_loopback_in_both_families(host: str) -> None:
    try:
        with bind(host, 0) as sock:
            assert sock.getsockname()[1] > 0
    except AddressInUse:
        assert ":" in host, "a machine may be without IPv6"


def test_clients_are_refused_until_it_listens() -> None:
    with bind("127.0.0.1", 0) as sock:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(sock.getsockname())
        listen(sock)
        socket.create_connection(sock.getsockname()).close()


def test_of_two_that_start_together_one_is_refused() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port) as second:
            listen(first)
            with pytest.raises(AddressInUse, match=rf"port {port} of 127.0.0.1 is in use by process {os.getpid()} "):
                listen(second)


@pytest.mark.parametrize("any_address", [False, True], ids=["loopback", "any"])
def test_serve_names_the_process_that_has_the_port_and_loads_nothing(tmp_path: Path, any_address: bool) -> None:
    """The model does not exist, and nothing says so: the port comes first."""
    with socket.create_server(("" if any_address else "127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        command = [sys.executable, "-m", "penstock", "serve", str(tmp_path / "no-model"), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    name = Path("/proc/self/comm").read_text().strip()
    assert done.stderr == (
        f"penstock: port {port} of 127.0.0.1 is in use by process {os.getpid()} ({name}); "
        "stop it, or choose another --port\n"
    )
