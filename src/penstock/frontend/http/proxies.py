"""The address of a client behind proxies, for the log."""

import ipaddress
from collections.abc import Sequence
from typing import Any

from penstock.frontend.http.asgi import Scope

_MOST_HOPS = 32  # addresses of one request that are read, from the last on


class TrustedProxies:
    """Proxies whose header X-Forwarded-For is believed. Everyone else could write any address there."""

    def __init__(self, networks: Sequence[str]) -> None:
        self._networks = [ipaddress.ip_network(network) for network in networks]

    def client(self, scope: Scope) -> str:
        """The address of the client: the last in X-Forwarded-For that is no trusted proxy, if the connection is from
        one; else the other end of the connection, with its port."""
        peer = scope.get("client")
        if not self._networks or peer is None or not self._trusts(peer[0]):
            return address_of(peer)
        found = address_of(peer)
        values = [value for name, value in scope["headers"] if name == b"x-forwarded-for"]
        hops = b",".join(values).rsplit(b",", _MOST_HOPS)[-_MOST_HOPS:]
        for hop in reversed(hops):
            try:
                found = str(ipaddress.ip_address(hop.strip().decode("latin-1")))
            except ValueError:
                break  # what is before it may be anything
            if not self._trusts(found):
                break
        return found

    def _trusts(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:  # not of TCP
            return False
        if isinstance(address, ipaddress.IPv6Address):  # a socket of IPv6 shows IPv4 so
            address = address.ipv4_mapped or address
        return any(address in network for network in self._networks)


def address_of(client: Sequence[Any] | None) -> str:
    """The address and port of a connection's other end."""
    if client is None:
        return "unknown"
    host, port = client[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
