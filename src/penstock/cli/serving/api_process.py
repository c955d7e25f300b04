"""One of several API processes: python -m penstock.cli.serving.api_process HUB LISTENING LOCK

Started by penstock.cli.serving.supervisor, which passes the file descriptors of a socket to its hub, of a listening
socket and of the storage's lock (-1: nothing is stored), and writes an ApiStart to standard input. Signals to the
process group are blocked; the supervisor's orders come through the hub.
"""

import asyncio
import gc
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop
from prometheus_client import CollectorRegistry

from penstock.cli.prepare import AnswerSettings, served_model
from penstock.cli.serving.answering import Answering
from penstock.config import ConfigError
from penstock.engine.child import die_with_parent
from penstock.engine.shared.client import SharedEngine
from penstock.frontend.served import ServedModel
from penstock.frontend.serving import Start
from penstock.messages import EngineError
from penstock.observe.logs import configure_logging
from penstock.observe.metrics import Metrics
from penstock.observe.model_metrics import ModelMetrics
from penstock.text import Tokenizer


class ApiStart(msgspec.Struct, frozen=True, kw_only=True):
    """What an API process is started with."""

    answers: AnswerSettings
    texts: str  # of `text_digest`
    created: int  # when the server started, in seconds since the epoch
    grpc: tuple[str, int] | None = None  # the address of the gRPC service
    number: int = 0  # of this process among those of the server; 0 runs batches
    fresh: bool = True  # no process of the server has answered requests yet


class Neighbours:
    """A frontend.siblings.Siblings: the supervisor passes on what concerns the others."""

    def __init__(self, engine: SharedEngine, start: ApiStart, lock: int) -> None:
        self._engine = engine
        self.first, self.fresh, self.storage_lock = not start.number, start.fresh, lock

    def run_batches(self) -> None:
        self._engine.notify("run_batches")

    async def metrics(self, accept: str | None) -> tuple[bytes, str]:
        content_type, _, body = (await self._engine.control(f"metrics {accept or ''}")).partition("\n")
        return body.encode(), content_type

    async def load(self) -> bytes:
        return (await self._engine.control("load")).encode()


async def _main(start: ApiStart, hub: socket.socket, sock: socket.socket, lock: int) -> None:
    dropped_lines = configure_logging(style=start.answers.server.log_format, process=f"api-{start.number}")
    drain, hurry = asyncio.Event(), asyncio.Event()
    metrics = Metrics(CollectorRegistry(), dropped_lines)
    orders: dict[str, Callable[[], object]] = {"drain": drain.set, "hurry": hurry.set}
    engine = SharedEngine(hub, lambda name: orders.get(name, _nothing)())
    tokenizer = Tokenizer.load(Path(start.answers.path))
    await engine.ready()
    served = served_model(start.answers, engine, tokenizer, None, start.texts, start.created)
    server = start.answers.server
    answering = Answering(
        Path(start.answers.path), served, server, metrics, _refuse_reload, start.grpc, Neighbours(engine, start, lock)
    )
    background, tls = answering.app.background, answering.tls
    orders["count"] = lambda: engine.send_counts(_counts(metrics, answering.app.serving.version.metrics, engine))
    if background is not None:
        orders["run_batches"] = background.wake
    if tls is not None:
        orders["read_certificate"] = lambda: asyncio.get_running_loop().run_in_executor(None, tls.reload)
    await answering.run(sock, lambda: engine.notify("ready"), stop=drain, hurry=hurry)


def _counts(metrics: Metrics, model: ModelMetrics, engine: SharedEngine) -> bytes:
    queue = {"refused": engine.queue.refused, "late": engine.queue.late}
    return msgspec.json.encode({"server": metrics.counts(), "model": model.counts(), "queue": queue})


async def _refuse_reload(model: ServedModel, beside: bool) -> Start | None:
    raise ConfigError(
        "a server with several API processes (--api-processes) cannot reload its model; stop it and start it again"
    )


def _nothing() -> None:
    """An order that this process does not follow, or not yet."""


def main() -> None:
    """Answers until the supervisor's order, or its end."""
    gc.disable()  # until requests are answered
    die_with_parent()
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=ApiStart)
    hub, listening, lock = descriptors = tuple(map(int, sys.argv[1:4]))
    for descriptor in descriptors:
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
    # Texts are tokenised one at a time, so the library needs no thread pool.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        uvloop.run(_main(start, socket.socket(fileno=hub), socket.socket(fileno=listening), lock))
    except EngineError:  # the supervisor says why
        sys.exit(1)
    except OSError as error:
        sys.exit(f"penstock: {error}")


if __name__ == "__main__":
    main()
