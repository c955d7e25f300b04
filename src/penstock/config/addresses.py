"""Addresses of engines: HOST:PORT."""


def split_address(address: str, flag: str = "--engines") -> tuple[str, int]:
    """Return host and port of "HOST:PORT" or "[IPV6]:PORT". Raises ValueError, which names `flag`."""
    host, colon, port = address.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isdecimal() and int(port) < 65536):
        raise ValueError(f"{flag}: {address!r} is no address; write HOST:PORT, such as 10.0.0.7:9000")
    return host, int(port)
