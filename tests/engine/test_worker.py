"""What a rank's process keeps for others, and what it is told by its sockets."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.engine.rank_socket import RankSocket
from penstock.engine.worker import hold_port


def test_a_port_that_is_held_is_given_to_nobody_but_who_asks_for_it() -> None:
    with hold_port() as held:
        port = held.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        for address in ("127.0.0.1", ""):
            with socket.create_server((address, port)) as listening:
                socket.create_connection(("127.0.0.1", port)).close()
                assert listening.getsockname()[1] == port


def test_the_end_of_a_process_is_news_once(tmp_path: Path) -> None:
    """It stays readable: who waits for last words would else spin."""
    ranks = RankSocket(1, f"ipc://{tmp_path}/s")
    process = subprocess.Popen([sys.executable, "-S", "-c", "pass"])
    descriptor = os.pidfd_open(process.pid)
    try:
        ranks.watch(descriptor)
        began = time.monotonic()
        assert ranks.receive(30) == []
        assert time.monotonic() - began < 20
        spent = time.process_time()
        began = time.monotonic()
        assert ranks.receive(0.2) == []
        assert time.monotonic() - began >= 0.2
        assert time.process_time() - spent < 0.1
    finally:
        process.wait()
        os.close(descriptor)
        ranks.close()
