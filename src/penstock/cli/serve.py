"""`penstock serve`: an engine in a process of its own, and an HTTP server in front of it."""

import gc
import socket
import sys
import time
from typing import TYPE_CHECKING

from penstock.cli.options import Flags
from penstock.engine.link.engine_child import EngineChild

if TYPE_CHECKING:
    from penstock.cli.prepare import Prepared


def serve(model: str | None, flags: Flags, engine: EngineChild | None = None) -> None:
    """In an `engine` that was started already, before its settings were known; it loads while this process imports what
    serving takes: so nothing is imported above."""
    started = time.monotonic()
    gc.disable()  # until it is ready: there is much to import, and none of it is garbage
    try:
        engine = engine or EngineChild()
    except OSError as error:
        sys.exit(f"penstock: the engine process could not be started: {error}")
    with engine as spawned:
        from penstock.cli.prepare import memory_table, prepare
        from penstock.messages import EngineError

        prepared = prepare(model, flags)
        spawned.send_config(prepared.resolved.engine)

        import uvloop
        from rich.console import Console

        from penstock.frontend import listen

        Console(stderr=True).print(memory_table(prepared.resolved, f"Memory for {prepared.resolved.engine.name}"))
        server = prepared.resolved.server
        try:
            sock = listen(server.host, server.port)  # before anybody waits for the engine: a clash is all that is told
            uvloop.run(_main(prepared, spawned, sock, started))
        except (EngineError, OSError) as error:
            print(f"penstock: {error}", file=sys.stderr)
            sys.exit(1)


async def _main(prepared: "Prepared", spawned: EngineChild, sock: socket.socket, started: float) -> None:
    import asyncio
    import logging
    import os

    from penstock.engine.link.ipc import connect
    from penstock.engine.processors import keep_off

    server = prepared.resolved.server
    connecting = asyncio.create_task(connect(prepared.resolved.engine, spawned))
    await asyncio.sleep(0)  # it listens before this loop is busy with imports
    try:
        from prometheus_client import CollectorRegistry

        from penstock.families import load_generation_defaults
        from penstock.frontend import ServedModel, create_app, url_of
        from penstock.frontend import serve as serve_http
        from penstock.observe.logs import configure_logging
        from penstock.observe.metrics import Metrics
        from penstock.text import Tokenizer

        configure_logging()
        # Texts are tokenised one at a time: a pool of threads would only take processors from the kernels.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        tokenizer = Tokenizer.load(prepared.folder)
        defaults = load_generation_defaults(prepared.folder)
    except BaseException:
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        raise
    client = await connecting
    served = ServedModel(
        name=server.served_model_name,
        aliases=server.aliases,
        client=client,
        tokenizer=tokenizer,
        created=int(time.time()),
        defaults=defaults,
    )
    app = create_app(served, server, Metrics(CollectorRegistry()))

    def ready() -> None:
        gc.freeze()
        gc.enable()
        seconds = time.monotonic() - started
        logging.getLogger("penstock.serve").info(
            "serving %s on %s, ready after %.1f s", served.name, url_of(sock), seconds
        )

    with keep_off(client.info.cpu):
        await serve_http(app, sock, client, ready=ready)
