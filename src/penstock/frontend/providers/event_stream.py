"""Reads server-sent events from a stream of bytes, however it is cut."""

from penstock.frontend.providers.wires.parts import stream_broken

MOST_BYTES = 1 << 20  # of one event


class EventStream:
    """Collects bytes until events are complete. Source: the HTML standard, 9.2.6."""

    def __init__(self) -> None:
        self._rest = b""  # the begin of a line
        self._data: list[bytes] = []  # the lines of the event that is not complete
        self._size = 0

    def push(self, chunk: bytes) -> list[bytes]:
        """Returns the data of the events that are complete now. Raises ProviderFailed for one that is too large."""
        text, found = self._rest + chunk, []
        if not self._data and b"data:" not in text:  # blank lines and comments: a flood of them costs little
            text = text[text.rfind(b"\n") + 1 :]
        *lines, self._rest = text.split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._add(line[5:].removeprefix(b" "))
            elif not line and self._data:
                found.append(b"\n".join(self._data))
                self._data, self._size = [], 0
        if self._size + len(self._rest) > MOST_BYTES:
            raise stream_broken(f"has an event of more than {MOST_BYTES} bytes")
        return found

    def _add(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MOST_BYTES:
            raise stream_broken(f"has an event of more than {MOST_BYTES} bytes")
        self._data.append(data)
