"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

STREAM_TYPE = b"text/event-stream; charset=utf-8"


def sse_event(data: bytes) -> bytes:
    """An event whose data is one line."""
    return b"data: " + data + b"\n\n"
