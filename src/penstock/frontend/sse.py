"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

CONTENT_TYPE = b"text/event-stream; charset=utf-8"


def event(data: bytes) -> bytes:
    """An event whose data is one line."""
    return b"data: " + data + b"\n\n"
