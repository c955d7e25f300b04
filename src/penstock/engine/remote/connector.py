"""The front's end: connects to an engine."""

import asyncio
import ssl
import time

from penstock.config.addresses import split_address
from penstock.engine.client import StreamingClient
from penstock.engine.link.mux import Mux
from penstock.engine.remote.handshake import SECONDS, WrongKey, introduce
from penstock.engine.remote.tcp import FRAME_BYTES, TcpConnection
from penstock.engine.shared.hub_link import HubLink
from penstock.messages import Clock, EngineError

HUB = 1  # the channel of `penstock engine`'s hub


async def connect_engine(
    address: str, key: str, tls: ssl.SSLContext | None = None, *, front: str = "", clock: Clock = time.monotonic
) -> StreamingClient:
    """Return a client of an engine that runs elsewhere, when the engine is ready.

    Its streams end with EngineError when the connection is lost. Closing it leaves the engine running. Raises WrongKey
    for another key or version, and EngineError if the engine cannot be reached.
    """
    host, port = split_address(address)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(SECONDS):
            _, connection = await loop.create_connection(lambda: TcpConnection(FRAME_BYTES), host, port, ssl=tls)
    except TimeoutError:
        raise EngineError(f"engine {address} did not answer within {SECONDS:g} s") from None
    except ssl.SSLCertVerificationError as error:
        raise WrongKey(f"engine {address} has a certificate that is not trusted: {error.verify_message}") from error
    except OSError as error:
        raise EngineError(f"engine {address} cannot be reached: {error.strerror or error}") from error
    try:
        await introduce(connection, key, front)
    except BaseException as error:
        connection.close()
        if isinstance(error, TimeoutError):
            raise EngineError(f"engine {address} did not answer within {SECONDS:g} s") from None
        if isinstance(error, EngineError):
            raise type(error)(f"engine {address}: {error}") from error
        raise
    mux = Mux(connection, TcpConnection.attach)
    link = HubLink(mux, HUB, clock, gone=lambda: f"engine {address}: {connection.lost}", leave=mux.close)
    try:
        client = await link.client()
        client.round_trip = lambda: connection.round_trip
        return client
    except BaseException:
        mux.close()
        raise
