"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

STREAM_TYPE = b"text/event-stream; charset=utf-8"
HEARTBEAT = b": keep-alive\n\n"  # a comment, which clients skip


def sse_event(data: bytes, name: bytes = b"") -> bytes:
    """An event whose data is one line."""
    return (b"event: " + name + b"\n" if name else b"") + b"data: " + data + b"\n\n"


def sse_data(events: bytes) -> list[bytes]:
    """The data of events that `sse_event` made. Comments have none."""
    return [event.partition(b"data: ")[2] for event in events.split(b"\n\n") if event and not event.startswith(b":")]
