"""The server's address: a socket that is bound before anything is loaded, and the process that has the port."""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

BACKLOG = 2048  # connections that the kernel holds until the server accepts them
LISTENING = "0A"  # a socket's state in /proc/net/tcp


class AddressInUse(OSError):
    """The server cannot listen on the address. The message says why and what to change."""

    def __str__(self) -> str:
        return str(self.strerror)


def bind(host: str, port: int, flag: str = "--port") -> socket.socket:
    """Returns a socket with this address, which refuses connections until `listen`. Port 0 takes a free port.

    Raises AddressInUse, which names `flag`.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a host name"
        raise AddressInUse(errno.EADDRNOTAVAIL, f"cannot listen on {host}: {why}; choose another --host") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _refused(host, port, error, flag) from error
    return sock


def listen(sock: socket.socket) -> None:
    """Lets clients connect to a socket of `bind`. Raises AddressInUse if another process listens there since."""
    host, port = sock.getsockname()[:2]
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise _refused(host, port, error) from error
    sock.setblocking(False)


def url_of(sock: socket.socket, *, tls: bool = False) -> str:
    """The URL of a listening socket."""
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if sock.family == socket.AF_INET6 else host
    return f"{'https' if tls else 'http'}://{shown}:{port}"


def _refused(host: str, port: int, error: OSError, flag: str = "--port") -> AddressInUse:
    if error.errno == errno.EADDRINUSE:
        message = f"port {port} of {host} is in use by {_owner(port)}; stop it, or choose another {flag}"
    elif error.errno == errno.EACCES:
        message = f"cannot listen on port {port} of {host}: {error.strerror}; choose a {flag} from 1024 on"
    else:
        message = f"cannot listen on port {port} of {host}: {error.strerror}; choose another --host or {flag}"
    return AddressInUse(error.errno, message)


def _owner(port: int) -> str:
    """The process that listens on a port, as far as /proc shows it: other users' processes hide their sockets.

    Its name is shown and not its command line, which may hold an API key.
    """
    links = {f"socket:[{inode}]" for inode in _listening(port)}
    for pid in sorted(int(folder.name) for folder in Path("/proc").glob("[0-9]*")):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            with os.scandir(f"/proc/{pid}/fd") as entries:
                held = any(os.readlink(entry.path) in links for entry in entries)
            if held:
                name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
                return f"process {pid} ({name if name.isprintable() else ascii(name)})"
    return "another process"


def _listening(port: int) -> Iterator[str]:
    """The inodes of the sockets that listen on a port, on any address."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as lines:
            next(lines)  # the heading
            for line in lines:
                _, local, _, state, *_, inode = line.split(maxsplit=10)[:10]
                if state == LISTENING and int(local.rpartition(":")[2], 16) == port:
                    yield inode


def grpc_address(sock: socket.socket) -> tuple[str, int]:
    """The host and port of a socket, as gRPC writes them."""
    host, port = sock.getsockname()[:2]
    return f"[{host}]" if sock.family == socket.AF_INET6 else host, port


def freed(sock: socket.socket | None) -> tuple[str, int] | None:
    """The address of a socket that kept the port for gRPC, which makes its own: this one is closed."""
    if sock is None:
        return None
    with sock:
        return grpc_address(sock)
