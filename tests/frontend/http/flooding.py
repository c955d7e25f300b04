"""A client that begins requests and gives them up at once, without pause: python -m tests.frontend.http.flooding KIND
PORT. It runs until standard input ends."""

import contextlib
import json
import socket
import sys
import threading
from collections.abc import Callable

CONNECTIONS = 64
TEXT = 1
CHAT = json.dumps({"messages": [{"role": "user", "content": "hello world " * 20}], "stream": True}).encode()
POST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(CHAT), CHAT)
)
HANDSHAKE = (
    b"GET /v1/chat/ws HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
)


def frame(data: bytes) -> bytes:
    """A text frame of a client. Its mask is 0."""
    size = bytes((0x80 | len(data),)) if len(data) < 126 else b"\xfe" + len(data).to_bytes(2)
    return bytes((0x80 | TEXT,)) + size + bytes(4) + data


def begin(number: int) -> bytes:
    return frame(b'{"id":"%d","body":%b}' % (number, CHAT))


def cancel(number: int) -> bytes:
    return frame(b'{"id":"%d","cancel":true}' % number)


def begin_and_cancel(port: int) -> None:
    """On one WebSocket."""
    pairs = b"".join(begin(i) + cancel(i) for i in range(50))
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(HANDSHAKE)

    def drain() -> None:
        while client.recv(1 << 16):
            pass

    threading.Thread(target=drain, daemon=True).start()
    while True:
        client.sendall(pairs)


def post_and_close(port: int) -> None:
    """On 64 connections, again and again."""
    while True:
        with contextlib.ExitStack() as opened:
            for _ in range(CONNECTIONS):
                client = opened.enter_context(socket.create_connection(("127.0.0.1", port)))
                client.sendall(POST)


FLOODS: dict[str, Callable[[int], None]] = {"websocket": begin_and_cancel, "http": post_and_close}


def main() -> None:
    threading.Thread(target=FLOODS[sys.argv[1]], args=(int(sys.argv[2]),), daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
