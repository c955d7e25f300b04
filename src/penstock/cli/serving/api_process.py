"""One of several API processes: python -m penstock.cli.serving.api_process HUB LISTENING LOCK

Started by penstock.cli.serving.supervisor, which passes the file descriptors of a socket to its hub, of a listening
socket and of the storage's lock (-1: nothing is stored), and writes an ApiStart to standard input. Signals to the
process group are blocked; the supervisor's orders come through the hub.
"""

import asyncio
import contextlib
import gc
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop
from prometheus_client import CollectorRegistry

from penstock.cli.serving.answering import Answering
from penstock.cli.serving.shared.catalogue import NewVersion
from penstock.config import ServerConfig
from penstock.engine.child import die_with_parent
from penstock.engine.link.mux import Mux
from penstock.engine.link.wire import Offer, Order
from penstock.engine.shared.hub_link import HubLink
from penstock.engine.shared.orders import SupervisorLink
from penstock.frontend.errors import APIError
from penstock.frontend.http.loading import answering_early
from penstock.frontend.registry import ModelRegistry
from penstock.frontend.served import ServedModel
from penstock.frontend.versions.serving import Serving
from penstock.messages import EngineError
from penstock.observe.logs import configure_logging
from penstock.observe.metrics import Metrics
from penstock.prepare.checks import check_tls
from penstock.prepare.model import AnswerSettings
from penstock.prepare.served import load_tokenizer, served_model
from penstock.text import Tokenizer


class ApiStart(msgspec.Struct, frozen=True, kw_only=True):
    server: ServerConfig
    answers: AnswerSettings | None = None  # of the model on the command line, if there is one
    texts: str = ""  # of `text_digest`
    created: int  # when the server started, in seconds since the epoch
    grpc: tuple[str, int] | None = None  # the address of the gRPC service
    number: int = 0  # of this process among those of the server; 0 runs batches
    version: int = 1  # of the model, which is the channel of its engine
    fresh: bool = True  # no process of the server has answered requests yet


class Neighbours:
    """A frontend.siblings.Siblings: the supervisor passes on what concerns the others."""

    def __init__(self, supervisor: SupervisorLink, start: ApiStart, lock: int) -> None:
        self._supervisor = supervisor
        self.first, self.fresh, self.storage_lock = not start.number, start.fresh, lock
        self.starting = start.fresh
        self.number, self.ask, self.notify = start.number, supervisor.ask, supervisor.notify

    def all_answer(self) -> None:
        self.starting = False

    def run_batches(self) -> None:
        self._supervisor.notify("run_batches")

    async def reload(self, *, drain_first: bool = False) -> str:
        reply = await self._supervisor.ask("reload drain_first" if drain_first else "reload")
        return msgspec.json.decode(reply, type=ReloadReply).message()

    async def metrics(self, accept: str | None) -> tuple[bytes, str]:
        content_type, _, body = (await self._supervisor.ask(f"metrics {accept or ''}")).partition("\n")
        return body.encode(), content_type

    async def load(self, model: str) -> bytes:
        return (await self._supervisor.ask(f"load {model}")).encode()


class ReloadReply(msgspec.Struct, frozen=True):
    """The supervisor's answer to `reload`: what was done, or the fields of an APIError."""

    text: str
    status: int = 0
    code: str | None = None

    def message(self) -> str:
        """Raises APIError."""
        if self.status:
            raise APIError(self.status, self.text, code=self.code)
        return self.text


class Follower:
    """Follows the supervisor in a reload."""

    def __init__(self, serving: Serving, mux: Mux, supervisor: SupervisorLink) -> None:
        self._serving, self._mux, self._supervisor = serving, mux, supervisor
        self._loading: asyncio.Task[None] | None = None
        self._holding: asyncio.Task[None] | None = None
        self._next: ServedModel | None = None  # loaded

    def load(self, offer: Offer) -> None:
        """Loads a version, and says that it is there or why it cannot be."""
        link = HubLink(self._mux, offer.version)  # at once: the next frame is for it
        self._loading = asyncio.create_task(self._load(offer, link))

    def withdraw(self) -> None:
        """Forgets the version that was loaded, or is being loaded."""
        if self._loading is not None:
            self._loading.cancel()
        found, self._next = self._next, None
        if found is not None:
            self._loading = asyncio.create_task(_end(found))

    def exchange(self) -> None:
        """Gives new requests the version that was loaded."""
        assert self._next is not None
        model, self._next = self._next, None
        self._serving.exchange(model)

    def hold(self, serial: str) -> None:
        """Holds new requests back, and says when none are answered."""
        self._holding = asyncio.create_task(self._hold(serial))

    def release(self) -> None:
        if self._holding is not None:
            self._holding.cancel()
        self._serving.release()

    async def _hold(self, serial: str) -> None:
        await self._serving.hold()
        self._supervisor.notify(f"reply {serial}")

    async def _load(self, offer: Offer, link: HubLink) -> None:
        error = ""
        try:
            new = msgspec.json.decode(offer.settings, type=NewVersion)
            engine = await link.client()
            tokenizer = await load_tokenizer(new.answers, new.texts, self._serving.model)
            arguments = new.answers, engine, tokenizer, None, new.texts, new.created
            self._next = await asyncio.to_thread(served_model, *arguments)
        except (ValueError, OSError, EngineError) as failure:
            error = f" {failure}"
        finally:
            if self._next is None:
                await link.close()
        self._supervisor.notify(f"reply {offer.serial}{error}")


async def _end(model: ServedModel) -> None:
    await model.client.close()
    model.close()


async def _main(start: ApiStart, end: socket.socket, sock: socket.socket, lock: int) -> None:
    server = start.server
    dropped_lines = configure_logging(server.log_level, server.log_format, process=f"api-{start.number}")
    drain, hurry = asyncio.Event(), asyncio.Event()
    metrics = Metrics(CollectorRegistry(), dropped_lines)
    orders: dict[str, Callable[..., object]] = {
        "drain": drain.set,
        "hurry": hurry.set,
        # Until this process answers requests. The supervisor waits for a reply to each of these.
        "count": lambda: supervisor.send_counts(b"{}"),
        "load": lambda offer: too_early(offer.serial),
        "hold": lambda serial: too_early(serial),
    }

    def follow(order: Order | Offer) -> None:
        if isinstance(order, Offer):
            orders["load"](order)
        else:
            name, *arguments = order.name.split(" ")
            orders.get(name, _nothing)(*arguments)

    def too_early(serial: int | str) -> None:
        supervisor.notify(f"reply {serial} it has only just been started; reload again when it answers")

    mux = Mux(end)
    supervisor = SupervisorLink(mux, follow)
    models = ModelRegistry()
    async with contextlib.AsyncExitStack() as early:
        if start.fresh:  # the engine of one that takes the place of another is ready
            tls = check_tls(server)
            await early.enter_async_context(answering_early(sock, None if tls is None else tls.context))
        if start.answers is not None:
            link = HubLink(mux, start.version)
            tokenizer = Tokenizer.load(Path(start.answers.path))
            served = served_model(start.answers, await link.client(), tokenizer, None, start.texts, start.created)
            serving = Serving(served, metrics, server.drain_timeout)
            models = ModelRegistry(serving)
            follower = Follower(serving, mux, supervisor)
            orders |= {name: getattr(follower, name) for name in ("load", "withdraw", "exchange", "hold", "release")}
        if server.repository:
            from penstock.cli.serving.shared.mirror import RepositoryMirror

            await RepositoryMirror(mux, models, metrics, server.drain_timeout).begin()
    neighbours = Neighbours(supervisor, start, lock)
    orders["all_answer"] = neighbours.all_answer
    answering = Answering(models, server, metrics, start.grpc, neighbours)
    background, tls = answering.app.background, answering.tls
    orders["count"] = lambda: supervisor.send_counts(_counts(metrics))
    orders["read_keys"] = lambda: asyncio.get_running_loop().run_in_executor(None, answering.app.keys.reload)
    if (office := answering.app.office) is not None:
        orders["refuse"] = lambda refuses: office.refuse(refuses == "1")
    if background is not None:
        orders["run_batches"] = background.wake
    if tls is not None:
        orders["read_certificate"] = lambda: asyncio.get_running_loop().run_in_executor(None, tls.reload)
    await answering.run(sock, lambda: supervisor.notify("ready"), stop=drain, hurry=hurry)


def _counts(metrics: Metrics) -> bytes:
    models = {
        name: {
            "model": model.counts(),
            "queue": {"refused": model.engine.queue.refused, "late": model.engine.queue.late},
        }
        for name, model in metrics.models.items()
    }
    return msgspec.json.encode({"server": metrics.counts(), "models": models})


def _nothing(*arguments: str) -> None:
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
