"""Two servers behind nginx and HAProxy, as docs/operations.md configures these, are restarted one after the other while
clients stream over SSE, WebSockets and gRPC: no request fails."""

import contextlib
import json
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from tests.e2e.certificates import Authority
from tests.e2e.server import Server, serving
from tests.packaging.test_proxies import PROXIES, configured
from tests.patience import PATIENCE, wait_for
from tests.ports import free_port

grpc = pytest.importorskip("grpc", reason="pip install 'penstock[grpc]'")

from penstock.frontend.kserve.grpc.messages import INFERENCE, MESSAGES  # noqa: E402

pytestmark = pytest.mark.rare
FLAGS = ("--shutdown-delay", "3", "--kv-cache-memory", "64MiB", "--state-dir", "none", "--served-model-name", "m")
KINDS = {"SSE", "WebSocket", "gRPC"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 24, "stream": True}
RETRIES = {  # as the page says: nginx cannot see that a gRPC call was refused
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.05s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}


class Proxy:
    """A proxy's address, and its authority."""

    def __init__(self, port: int, authority: Authority) -> None:
        self.port, self.authority = port, authority

    def stream(self, client: httpx.Client) -> None:
        """A chat as a stream of events."""
        with client.stream("POST", f"https://127.0.0.1:{self.port}/v1/chat/completions", json=CHAT) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert answer.status_code == 200, (answer.status_code, lines)
        assert lines[-1] == "data: [DONE]" and not any('"error"' in line for line in lines)

    def talk(self) -> None:
        """A chat on a WebSocket. A server that stops refuses it or closes the socket: then it is opened again."""
        url = f"wss://127.0.0.1:{self.port}/v1/chat/ws"
        for _ in range(5):
            with contextlib.suppress(ConnectionClosed), connect(url, ssl=self.authority.context) as socket:
                socket.send(json.dumps({"id": "a", "body": CHAT}))
                while (event := json.loads(socket.recv(PATIENCE)))["type"] == "chunk":
                    pass
                if event["type"] == "done":
                    return
                assert event["status"] == 503, event
        raise AssertionError("five sockets were closed")

    def infer(self, channel: Any) -> None:
        """A completion over gRPC."""
        request = MESSAGES["InferRequest"](model_name="m")
        text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        text.contents.bytes_contents.append(b"hello")
        call = channel.unary_unary(
            f"/{INFERENCE}/ModelInfer", type(request).SerializeToString, MESSAGES["InferAnswer"].FromString
        )
        assert call(request, timeout=PATIENCE).raw_output_contents


@contextlib.contextmanager
def running(name: str, folder: Path, ports: list[int], grpc_ports: list[int]) -> Iterator[Proxy]:
    """A proxy with its recipe before two servers."""
    authority, port = Authority(folder), free_port()
    command = configured(name, folder, authority, port, ports, grpc_ports)
    with (folder / "proxy.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        proxy = Proxy(port, authority)

        def ready() -> bool:
            assert process.poll() is None, (folder / "proxy.log").read_text()
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"https://127.0.0.1:{port}/readyz", verify=authority.context).status_code == 200
            return False

        wait_for(ready, "the proxy to reach a server")
        yield proxy
    finally:
        process.terminate()
        process.wait(PATIENCE)


class Load:
    """Clients that send request after request, until the block ends."""

    def __init__(self) -> None:
        self.sent = Counter[str]()
        self.failures: list[str] = []
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def add(self, name: str, send: Callable[[], None]) -> None:
        def repeat() -> None:
            while not self._ended.is_set():
                try:
                    send()
                except (AssertionError, httpx.HTTPError, grpc.RpcError, OSError, InvalidStatus) as error:
                    self.failures.append(f"{name}: {error!r}")
                self.sent[name] += 1
                time.sleep(0.02)

        self._threads.append(threading.Thread(target=repeat))

    def go_on(self) -> None:
        """Blocks until every client has sent three more requests."""
        before = self.sent.copy()
        wait_for(lambda: all(self.sent[kind] > before[kind] + 2 for kind in KINDS), "three requests of each")

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(PATIENCE)


@pytest.mark.parametrize("name", PROXIES)
def test_a_rolling_restart(name: str, tmp_path: Path) -> None:
    ports, grpc_ports = [free_port(), free_port()], [free_port(), free_port()]

    def server(stack: contextlib.ExitStack, at: int, log: str) -> Server:
        flags = (*FLAGS, "--grpc-port", str(grpc_ports[at]))
        return stack.enter_context(serving(tmp_path / log, *flags, port=ports[at]))

    with contextlib.ExitStack() as stack:
        servers = [server(stack, at, f"first {at}") for at in range(2)]
        proxy = stack.enter_context(running(name, tmp_path, ports, grpc_ports))
        client = stack.enter_context(httpx.Client(verify=proxy.authority.context, timeout=PATIENCE))
        credentials = grpc.ssl_channel_credentials(proxy.authority.file.read_bytes())
        options = [("grpc.service_config", json.dumps(RETRIES))]
        channel = stack.enter_context(grpc.secure_channel(f"127.0.0.1:{proxy.port}", credentials, options))
        load = Load()
        load.add("SSE", lambda: proxy.stream(client))
        load.add("WebSocket", proxy.talk)
        load.add("gRPC", lambda: proxy.infer(channel))
        with load:
            for at, old in enumerate(servers):
                load.go_on()
                old.process.send_signal(signal.SIGTERM)
                assert old.process.wait(PATIENCE) == 0
                server(stack, at, f"second {at}")
            load.go_on()
    print(name, dict(load.sent))
    assert load.failures == []
