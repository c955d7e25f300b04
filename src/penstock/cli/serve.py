"""`penstock serve`: an engine in a process of its own, and an HTTP server in front of it."""

import asyncio
import logging
import sys
import time

import uvloop
from rich.console import Console

from penstock.cli.options import Flags
from penstock.cli.prepare import Prepared, memory_table, prepare
from penstock.engine import launch
from penstock.messages import EngineError

log = logging.getLogger("penstock.serve")


def serve(model: str | None, flags: Flags) -> None:
    prepared = prepare(model, flags)
    Console(stderr=True).print(memory_table(prepared.resolved, f"Memory for {prepared.resolved.engine.name}"))
    try:
        uvloop.run(_main(prepared))
    except (EngineError, OSError) as error:
        print(f"penstock: {error}", file=sys.stderr)
        sys.exit(1)


async def _main(prepared: Prepared) -> None:
    """The engine loads in its own process while this one imports and reads what serving takes."""
    started = time.monotonic()
    server = prepared.resolved.server
    launching = asyncio.create_task(launch(prepared.resolved.engine))
    await asyncio.sleep(0.05)  # the engine's process is under way before this loop is busy with imports
    try:
        from prometheus_client import CollectorRegistry

        from penstock.families import load_generation_defaults
        from penstock.frontend import ServedModel, create_app, listen
        from penstock.frontend import serve as serve_http
        from penstock.observe import Metrics, configure_logging
        from penstock.text import Tokenizer

        configure_logging()
        sock = listen(server.host, server.port)
        tokenizer = Tokenizer.load(prepared.folder)
        defaults = load_generation_defaults(prepared.folder)
    except BaseException:
        launching.cancel()
        await asyncio.gather(launching, return_exceptions=True)
        raise
    client = await launching
    served = ServedModel(
        name=server.served_model_name,
        client=client,
        tokenizer=tokenizer,
        created=int(time.time()),
        defaults=defaults,
    )
    app = create_app(served, server, Metrics(CollectorRegistry()))
    host, port = sock.getsockname()[:2]
    log.info("serving %s on http://%s:%s, ready after %.1f s", served.name, host, port, time.monotonic() - started)
    await serve_http(app, sock, client)
