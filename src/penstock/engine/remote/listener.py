"""The engine's end: accepts fronts, and connects each to the hub."""

import asyncio
import logging
import socket
import ssl

from penstock.engine.link.mux import Mux
from penstock.engine.remote.handshake import admit
from penstock.engine.remote.tcp import TcpConnection
from penstock.engine.shared.hub import Hub, Operate
from penstock.messages import EngineError

UNUSED = 0  # a channel without frames
MOST_FRONTS = 64  # connections, those that have not proved their key included

log = logging.getLogger(__name__)


class Listener:
    """Accepts fronts on a listening socket."""

    def __init__(self, hub: Hub, operate: Operate, key: str) -> None:
        """`operate` executes the control messages of fronts."""
        self._hub, self._operate, self._key = hub, operate, key
        self._server: asyncio.Server | None = None
        self._open: dict[TcpConnection, asyncio.Task[None]] = {}

    async def start(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Accept connections until `close`."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: TcpConnection(made=self._accept), sock=sock, ssl=tls)

    async def close(self) -> None:
        """Accept nothing more, and close all connections: the hub aborts what is unfinished."""
        if self._server is not None:
            self._server.close()
        for connection, task in list(self._open.items()):
            task.cancel()
            connection.close("the engine ends")
        await asyncio.gather(*self._open.values(), return_exceptions=True)

    def _accept(self, connection: TcpConnection) -> None:
        self._open[connection] = asyncio.create_task(self._serve(connection))

    async def _serve(self, connection: TcpConnection) -> None:
        front, lost = "", asyncio.Event()
        try:
            if len(self._open) > MOST_FRONTS:
                raise EngineError(f"{MOST_FRONTS} fronts are connected, the limit")
            front = await admit(connection, self._key)
            mux = Mux(connection, TcpConnection.attach)
            mux.open(UNUSED, lambda frame: None, lost.set)  # only to see that the connection is lost
            self._hub.connect(mux, self._operate)
            log.info("front %s is connected", front)
            await lost.wait()
            log.info("front %s has left: %s", front, connection.lost)
        except (EngineError, TimeoutError) as error:
            # A connection that only looks whether the engine listens is no trouble.
            level = logging.DEBUG if connection.lost else logging.WARNING
            log.log(level, "a front was refused: %s", error or "it did not answer in time")
        finally:
            connection.close()
            del self._open[connection]
