"""The hub's end of the connections to API processes."""

import socket

from penstock.engine.inprocess import start_thread
from penstock.engine.link.frames import Frames
from penstock.engine.link.mux import Mux
from penstock.engine.link.wire import Abort, Step, decode_event, encode
from penstock.engine.shared.hub import Hub
from tests.engine.simulated import BACKEND, config
from tests.patience import until

VERSION = 1
PREFIX = VERSION.to_bytes(4, "little")


async def test_a_step_that_waits_for_room_is_not_overtaken() -> None:
    """Another channel's frame may empty the buffer before the event loop does: what waits then still comes first."""
    client = await start_thread(config(), BACKEND)
    ours, theirs = socket.socketpair()
    mux, process = Mux(ours), Frames(theirs)
    hub = Hub(client, VERSION)
    connection = hub.connect(mux, client.control)
    orders = mux.open(0, lambda frame: None)
    orders.send(bytes(4 << 20))
    assert mux.behind
    process.send(PREFIX + encode(Abort("first")))
    await until(lambda: connection._late, "a step that waits")
    received: list[bytes] = []
    while mux.behind:  # without a turn of the event loop
        received += process.receive(1000)
        orders.send(b"")
    connection.post(client.stats(), always=True)

    def steps() -> list[Step]:
        received.extend(process.receive(1000))
        events = [decode_event(frame[4:]) for frame in received if frame.startswith(PREFIX)]
        return [event for event in events if isinstance(event, Step)]

    await until(lambda: any(step.aborted for step in steps()), "the step that waited")
    assert steps()[0].aborted == ["first"]
    hub.close()
    mux.close()
    process.close()
    await client.close()
