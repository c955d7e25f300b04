"""The health check of a container: python -m penstock.cli.operate.health [PID]

Its exit status is 0 if the server with this process id, by default 1, is ready. It asks the sockets on which that
process listens, so it needs no settings: neither the port nor whether the server speaks TLS.
"""

import contextlib
import http.client
import os
import socket
import ssl
import sys
from collections.abc import Iterator

LISTENING = "0A"  # a socket's state in /proc/net/tcp
SECONDS = 2.0  # for an answer
ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def listening(pid: int) -> Iterator[tuple[str, int]]:
    """The addresses on which a process listens, each once. Raises OSError if it does not exist or is another user's."""
    held = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            held.add(os.readlink(entry.path))
    found = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/net/{table}") as lines:
            next(lines)  # the heading
            for line in lines:
                _, local, _, state, *_, inode = line.split(maxsplit=10)[:10]
                if state == LISTENING and f"socket:[{inode}]" in held:
                    found.add(_address(family, local))
    yield from sorted(found)


def _address(family: socket.AddressFamily, local: str) -> tuple[str, int]:
    """The host and port of an entry: each four bytes of the address are a number of this machine's byte order."""
    address, _, port = local.partition(":")
    words = [int(address[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(address), 8)]
    host = socket.inet_ntop(family, b"".join(words))
    return ANY.get(host, host), int(port, 16)


def is_ready(host: str, port: int) -> bool:
    """True if a server of HTTP or HTTPS answers there that it is ready. HTTP comes first: a server of HTTP would log
    the beginning of TLS as a wrong request."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the certificate has other names
    for connection in (
        http.client.HTTPConnection(host, port, timeout=SECONDS),
        http.client.HTTPSConnection(host, port, timeout=SECONDS, context=context),
    ):
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
    return False


def main() -> None:
    pid = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    try:
        addresses = list(listening(pid))
    except OSError as error:
        sys.exit(f"process {pid} cannot be read: {error.strerror}")
    if not any(is_ready(*address) for address in addresses):
        sys.exit(f"process {pid} is not ready on {addresses or 'any port'}")


if __name__ == "__main__":
    main()
