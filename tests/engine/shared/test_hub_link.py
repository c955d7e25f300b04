"""A shared engine that an API process waits for."""

import asyncio
import socket

import pytest

from penstock.engine.inprocess import start_thread
from penstock.engine.link.mux import Mux
from penstock.engine.shared.hub import Hub
from penstock.engine.shared.hub_link import HubLink
from penstock.messages import EngineError
from tests.engine.simulated import BACKEND, config
from tests.patience import PATIENCE

VERSION = 1


async def test_to_close_one_that_no_process_waits_for_any_more_leaves_the_hub() -> None:
    client = await start_thread(config(), BACKEND)
    one, other = socket.socketpair()
    ends, hub = (Mux(one), Mux(other)), Hub(client, VERSION)
    link = HubLink(ends[1], VERSION)
    waiting = asyncio.create_task(link.client())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    hub.connect(ends[0], client.control)
    await link.close()
    async with asyncio.timeout(PATIENCE):
        await hub.left()
    hub.close()
    for end in ends:
        end.close()
    await client.close()


async def test_one_whose_supervisor_ends_before_it_is_ready_can_be_closed() -> None:
    one, other = socket.socketpair()
    mux = Mux(one)
    link = HubLink(mux, VERSION)
    other.close()
    with pytest.raises(EngineError, match="ended"):
        await link.client()
    await link.close()
    mux.close()
