"""Implements `penstock serve`: an HTTP server in this process, and the engine in a process of its own."""

import gc
import socket
import sys
import time
from typing import TYPE_CHECKING

from penstock.cli.options import Flags
from penstock.engine.link.engine_child import EngineChild

if TYPE_CHECKING:
    from penstock.cli.prepare import PreparedModel


def serve(model: str | None, flags: Flags, engine: EngineChild | None = None) -> None:
    """Serves until SIGTERM or SIGINT (Ctrl-C). `engine` is the engine process if the caller has already started one.

    The engine gets its configuration before this process imports the server, so that both work at the same time. That
    is why most imports are inside the functions.
    """
    started = time.monotonic()
    gc.disable()  # until the server is ready: imports create many objects and hardly any garbage
    try:
        engine = engine or EngineChild()
    except OSError as error:
        sys.exit(f"penstock: cannot start the engine process: {error}")
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
            # Binds before it connects to the engine: if the port is in use, that is the only error shown.
            sock = listen(server.host, server.port)
            uvloop.run(_main(prepared, spawned, sock, started))
        except (EngineError, OSError) as error:
            print(f"penstock: {error}", file=sys.stderr)
            sys.exit(1)


async def _main(prepared: "PreparedModel", spawned: EngineChild, sock: socket.socket, started: float) -> None:
    import asyncio
    import logging
    import os

    from penstock.engine.link.ipc import connect
    from penstock.engine.processors import keep_off

    server = prepared.resolved.server
    connecting = asyncio.create_task(connect(prepared.resolved.engine, spawned, resumes=True))
    await asyncio.sleep(0)  # starts the connection before the imports below block this loop
    try:
        from prometheus_client import CollectorRegistry

        from penstock.frontend import ServedModel, create_app, url_of
        from penstock.frontend import serve as serve_http
        from penstock.observe.logs import configure_logging
        from penstock.observe.metrics import Metrics
        from penstock.text import Tokenizer

        configure_logging()
        # Texts are tokenised one at a time, so the library needs no thread pool. Its threads would take processor time
        # from the kernels.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        tokenizer = Tokenizer.load(prepared.path)
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
        tool_format=server.tool_format,
        reasoning_format=server.reasoning_format,
        defaults=prepared.generation,
    )
    app = create_app(served, server, Metrics(CollectorRegistry()))

    def ready() -> None:
        gc.freeze()  # what exists now lives as long as the server: later collections need not scan it
        gc.enable()
        if prepared.generation:
            values = ", ".join(f"{name} {value:g}" for name, value in prepared.generation.items())
            logging.getLogger("penstock.serve").info(
                "sampling of requests that do not set it: %s (from the model; --generation-config none turns it off)",
                values,
            )
        seconds = time.monotonic() - started
        logging.getLogger("penstock.serve").info(
            "serving %s on %s, ready after %.1f s", served.name, url_of(sock), seconds
        )

    with keep_off(client.info.cpu):  # the processor that the engine's loop stays on
        await serve_http(app, sock, client, ready=ready)
