"""The engine's end of the socket: a client that does not read costs neither the engine's time nor its memory."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from penstock.engine.socket_port import EVENTS_IN_FLIGHT, SocketPort
from penstock.engine.wire import Abort, Event, Failed, Step, decode_event, encode
from penstock.messages import EngineStats, TokenDelta

STEPS = 2000


@pytest.fixture
def ends(scratch: Path) -> Iterator[tuple[SocketPort, zmq.Socket[bytes]]]:
    """An engine's port and the socket of a client that reads when the test does."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.rcvhwm = EVENTS_IN_FLIGHT
        client.rcvtimeo = 5000
        client.bind(f"ipc://{scratch}/socket")
        port = SocketPort(f"ipc://{scratch}/socket")
        yield port, client
        port.close()


def step(number: int) -> Step:
    return Step(
        EngineStats(steps=number), [TokenDelta("a", 0, number, (number,)), TokenDelta("b", 1, number, (number,))]
    )


def read_until(client: zmq.Socket[bytes], port: SocketPort, last: int) -> list[Step]:
    steps: list[Step] = []
    while not steps or steps[-1].stats.steps < last:
        event: Event = decode_event(client.recv())
        assert isinstance(event, Step)
        steps.append(event)
        port.receive(wait=0.0)
    return steps


def test_what_the_client_does_not_take_is_merged(ends: tuple[SocketPort, zmq.Socket[bytes]]) -> None:
    port, client = ends
    for number in range(STEPS):
        port.post(step(number))
    steps = read_until(client, port, STEPS - 1)
    assert len(steps) < STEPS / 2
    for choice in (0, 1):
        tokens = [token for one in steps for delta in one.deltas if delta.choice == choice for token in delta.token_ids]
        assert tokens == list(range(STEPS))


def test_the_merged_rest_leaves_while_the_engine_sleeps(ends: tuple[SocketPort, zmq.Socket[bytes]]) -> None:
    port, client = ends
    for number in range(STEPS):
        port.post(step(number))
    commands = []
    sleeper = threading.Thread(target=lambda: commands.extend(port.receive(wait=60.0)))
    sleeper.start()
    events = []
    while not events or events[-1].stats.steps < STEPS - 1:
        events.append(decode_event(client.recv()))
    assert sleeper.is_alive()
    client.send(encode(Abort("a")))
    sleeper.join(5)
    assert commands == [Abort("a")]


def test_garbage_is_skipped_and_stop_comes_first(ends: tuple[SocketPort, zmq.Socket[bytes]]) -> None:
    port, client = ends
    port.announce(Failed("hello"))
    client.recv()
    client.send(b"garbage")
    client.send(encode(Abort("a")))
    commands = []
    while not commands:
        commands = port.receive(wait=60.0)
    assert commands == [Abort("a")]
    port.stop("enough")
    assert [command.reason for command in port.receive(wait=60.0)] == ["enough"]


def test_a_client_that_never_reads_does_not_keep_the_engine_alive(ends: tuple[SocketPort, zmq.Socket[bytes]]) -> None:
    port, _ = ends
    for number in range(STEPS):
        port.post(step(number))
    port.announce(Failed("nobody reads this"))
    assert len(port.receive(wait=0.0)) == 0
