"""Ports of loopback for servers that a test starts."""

import itertools
import os
import socket
from pathlib import Path

FIRST = 10_000
_NUMBERS = itertools.count(os.getpid() * 7919)  # workers have neighbouring pids, and begin far from each other


def free_port() -> int:
    """A port that stays free until a server takes it: below those that the system gives to connections and to sockets
    without a port, of which other tests make thousands while a server starts."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    end = given if given > FIRST + 5_000 else 32_768
    for number in _NUMBERS:
        port = FIRST + number % (end - FIRST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:  # in use
                continue
        return port
    raise AssertionError("unreachable")
