"""Engines over TCP: who may connect, and what happens to streams when an end is lost."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock.engine.client import StreamingClient
from penstock.engine.inprocess import start_thread
from penstock.engine.link import wire
from penstock.engine.remote import handshake, listener, tcp
from penstock.engine.remote.connector import HUB, connect_engine
from penstock.engine.remote.handshake import WrongKey
from penstock.engine.remote.listener import Listener
from penstock.engine.remote.tcp import FIRST_FRAME_BYTES, TcpConnection
from penstock.engine.shared.hub import Hub
from penstock.messages import BlockChanges, EngineError, WatchBlocks
from tests.chaos.proxy import Link, proxied
from tests.e2e.certificates import Authority
from tests.engine.simulated import BACKEND, Scenario, ask, config, expected
from tests.patience import AT_ONCE, PATIENCE, until
from tests.schedule.simulated import request

SLOW = Scenario(step_seconds=0.005)


class Host(NamedTuple):
    """An engine that listens."""

    client: StreamingClient
    hub: Hub
    address: str


Start = Callable[..., Awaitable[Host]]


@pytest.fixture
async def host() -> AsyncIterator[Start]:
    """host(scenario, key=, tls=) starts an engine on a thread that listens on loopback."""
    async with contextlib.AsyncExitStack() as held:

        async def start(scenario: Scenario = SLOW, key: str = "secret", tls: ssl.SSLContext | None = None) -> Host:
            client = await start_thread(config(scenario), BACKEND)
            held.push_async_callback(client.close)
            hub = Hub(client, HUB)
            held.callback(hub.close)
            sock = socket.create_server(("127.0.0.1", 0))
            accepting = Listener(hub, client.control, key)
            await accepting.start(sock, tls)
            held.push_async_callback(accepting.close)
            return Host(client, hub, f"127.0.0.1:{sock.getsockname()[1]}")

        yield start


# -- streams ----------------------------------------------------------------------------------------------------------


async def test_two_fronts_share_an_engine(host: Start) -> None:
    running = await host()
    fronts = [await connect_engine(running.address, "secret", front=name) for name in ("one", "two")]
    asked = [request(f"r{number}", 5, 60, n=2) for number in range(6)]
    answers = await asyncio.gather(*(ask(fronts[number % 2], one) for number, one in enumerate(asked)))
    for one, answer in zip(asked, answers, strict=True):
        assert answer.choices == {choice: expected(one, choice) for choice in (0, 1)}
    assert fronts[0].info == running.client.info
    for front in fronts:
        await front.close()
    await until(lambda: not running.hub.requests, "the fronts to leave")
    assert running.client.state.status == "ready", "the engine is not theirs to end"


async def test_reports_of_blocks_arrive(host: Start) -> None:
    running = await host()
    fronts = [await connect_engine(running.address, "secret") for _ in range(2)]
    reports: list[BlockChanges] = []
    fronts[0].on_blocks(reports.append)
    fronts[1].on_blocks(lambda changes: pytest.fail("it has not asked for them"))
    await fronts[0].control(WatchBlocks())
    await ask(fronts[1], request("a", 40, 30))
    await until(lambda: sum(len(report.stored) for report in reports) >= 17, "the reports")
    assert [report.number for report in reports] == list(range(1, len(reports) + 1))
    for front in fronts:
        await front.close()


async def test_the_requests_of_a_front_that_is_gone_are_aborted(host: Start) -> None:
    running = await host()
    front = await connect_engine(running.address, "secret")
    stream = front.generate(request("a", 5, 500))
    await anext(stream)
    front._link._leave()  # as when its process is killed: nothing is sent
    await until(lambda: not running.hub.requests and not running.client.stats().running, "the request to end")
    await front.close()
    with pytest.raises(EngineError):
        async for _ in stream:
            pass


async def test_streams_end_with_the_reason_when_the_engine_is_gone(host: Start) -> None:
    running = await host()
    front = await connect_engine(running.address, "secret")
    stream = front.generate(request("a", 5, 500))
    await anext(stream)
    await running.client.close()
    with pytest.raises(EngineError, match="closed"):
        async for _ in stream:
            pass
    assert front.state.status == "ended"


async def test_silence_is_noticed_at_both_ends(host: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stops may be the other machine or the network: no byte says so."""
    monkeypatch.setattr(tcp, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(tcp, "SILENCE_SECONDS", 0.2)
    running = await host()
    async with stalling_proxy(running.address) as (address, stall):
        front = await connect_engine(address, "secret")
        stream = front.generate(request("a", 5, 500))
        await anext(stream)
        await asyncio.sleep(0.5)  # nothing is closed while beats arrive
        assert front.state.status == "ready"
        stall.set()
        with pytest.raises(EngineError, match=r"nothing was received for 0\.2 s"):
            async for _ in stream:
                pass
        await until(lambda: not running.hub.requests, "the engine to abort the request")


@contextlib.asynccontextmanager
async def stalling_proxy(target: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Passes bytes on in both directions until the event is set; then it stays open and passes nothing."""
    stall = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if stall.is_set():
                await asyncio.sleep(3600)
            writer.write(data)
            await writer.drain()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*target.split(":"))
        for pair in ((reader, back), (there, writer)):
            tasks.add(asyncio.create_task(copy(*pair)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", stall
    server.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# -- who may connect --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", "other", "secret "])
async def test_another_key_is_refused_with_the_remedy(host: Start, key: str) -> None:
    running = await host()
    with pytest.raises(WrongKey, match=f"engine {running.address}: .*the same PENSTOCK_FLEET_KEY"):
        await connect_engine(running.address, key)
    assert not running.hub._connections


async def test_an_engine_that_does_not_have_the_key_is_refused() -> None:
    """It lets anybody in, to read prompts."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def frame(message: object) -> bytes:
            data = handshake._encode(message)
            return len(data).to_bytes(4, "little") + data

        writer.write(frame(handshake.EngineHello(wire.LINK_VERSION, "1", bytes(32))))
        await reader.read(10)
        writer.write(frame(handshake.Welcome(bytes(32))))
        await writer.drain()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    with pytest.raises(WrongKey, match="has not proved that it has the key"):
        await connect_engine(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", "secret")
    server.close()


async def test_another_version_is_refused_by_name(host: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    running = await host()
    monkeypatch.setattr(handshake, "LINK_VERSION", 7)
    hello = handshake.EngineHello
    monkeypatch.setattr(handshake, "EngineHello", lambda link, *rest: hello(6, *rest))
    monkeypatch.setattr(handshake, "_read", lambda connection, kind, read=handshake._read: read(connection, hello))
    with pytest.raises(WrongKey, match=r"speaks version 6 of the link, this is .* version 7: update the older one"):
        await connect_engine(running.address, "secret")


async def test_nobody_there(host: Start) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    with pytest.raises(EngineError, match=f"engine {address} cannot be reached"):
        await connect_engine(address, "")
    with pytest.raises(ValueError, match="HOST:PORT"):
        await connect_engine("nowhere", "")


async def test_what_speaks_another_protocol_is_refused(host: Start) -> None:
    running = await host()
    host_name, port = running.address.split(":")
    reader, writer = await asyncio.open_connection(host_name, int(port))
    await reader.read(10)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")  # a length of 0x20544547
    assert await reader.read() is not None, "the engine closes the connection"
    writer.close()
    assert (await ask(await connect_engine(running.address, "secret"), request("a", 3, 3))).reasons == {0: "length"}


async def test_one_that_says_nothing_is_let_go(host: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "SECONDS", 0.1)
    running = await host()
    reader, writer = await asyncio.open_connection(*running.address.split(":"))
    async with asyncio.timeout(PATIENCE):
        while await reader.read(1000):
            pass
    writer.close()


async def test_the_number_of_connections_is_bounded(host: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MOST_FRONTS", 2)
    running = await host()
    fronts = [await connect_engine(running.address, "secret") for _ in range(2)]
    with pytest.raises(EngineError):
        await connect_engine(running.address, "secret")
    await fronts[0].close()
    await until(lambda: len(running.hub._connections) == 1, "it to leave")
    await connect_engine(running.address, "secret")


async def test_tls(host: Start, tmp_path: Path) -> None:
    authority, file = Authority(tmp_path), tmp_path / "engine.pem"
    file.write_bytes(b"".join(authority.sign(1)))
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(file)
    running = await host(tls=serving)
    address = running.address
    front = await connect_engine(address, "secret", authority.context)
    asked = request("a", 5, 30)
    assert (await ask(front, asked)).choices[0] == expected(asked)
    await front.close()
    with pytest.raises(WrongKey, match="not trusted"):
        await connect_engine(address, "secret", ssl.create_default_context())
    with pytest.raises(EngineError):
        await connect_engine(address, "secret")


async def test_the_round_trip_is_measured_at_the_front(host: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way becomes longer, and then shorter again. The shortest of the last round trips counts."""
    monkeypatch.setattr(tcp, "BEAT_SECONDS", 0.02)
    running = await host()
    async with proxied(int(running.address.partition(":")[2]), Link(delay=0.03)) as proxy:
        front = await connect_engine(f"127.0.0.1:{proxy.port}", "secret")
        assert 0.03 <= front.round_trip() < AT_ONCE, "the handshake was measured"
        proxy.slow = 0.1
        await until(lambda: front.round_trip() >= 0.13, "the longer way")
        proxy.slow = 0.0
        await until(lambda: 0.03 <= front.round_trip() < 0.13, "the shorter way")
        asked = request("a", 5, 30)
        assert (await ask(front, asked)).choices[0] == expected(asked)
        assert running.client.round_trip() == 0.0, "the engine's end measures nothing"
        await front.close()


async def test_an_end_that_reads_nothing_gets_no_more_echoes() -> None:
    end, wire_ = TcpConnection(), Transport()
    end.connection_made(wire_)
    ping = b"\x01\x00\x00\x00?"
    end.data_received(2 * ping)
    assert wire_.data == b"\x01\x00\x00\x00!" * 2
    end.pause_writing()
    end.data_received(1000 * ping)
    assert len(wire_.data) == 10
    end.close()


async def test_a_ping_without_an_echo_is_sent_again() -> None:
    end, wire_ = TcpConnection(), Transport()
    end.connection_made(wire_)
    end.measure(0.5)
    for ago, pings in ((0.0, 1), (0.0, 1), (tcp.SILENCE_SECONDS, 2)):
        if end._pinged is not None:
            end._pinged -= ago
        end._heard = True
        end._look()
        assert wire_.data.count(b"?") == pings
    end.data_received(b"\x01\x00\x00\x00!")
    assert end._pinged is None and 0.0 <= end.round_trip < 0.5
    end.close()


# -- frames -----------------------------------------------------------------------------------------------------------


class Transport(asyncio.Transport):
    """Takes what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.data = bytearray()
        self.closed = False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.data += data

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.limit = high

    def close(self) -> None:
        self.closed = True

    abort = close


async def test_frames_arrive_whole_however_they_are_cut() -> None:
    sender, receiver, wires = TcpConnection(), TcpConnection(), (Transport(), Transport())
    sender.connection_made(wires[0])
    receiver.connection_made(wires[1])
    frames = [b"one", bytes(3000), b"\x00", b"last"]
    for frame in frames:
        sender.send(frame)
    sender.send(b"")  # a beat
    for byte in bytes(wires[0].data[:20]):
        receiver.data_received(bytes([byte]))
    receiver.data_received(bytes(wires[0].data[20:]))
    taken: list[bytes] = []
    assert await receiver.frame() == frames[0]
    receiver.attach(taken.append, lambda: None, lambda: None)
    receiver.data_received(b"\x02\x00\x00\x00ab")
    await asyncio.sleep(0)
    assert taken == [*frames[1:], b"ab"]
    for end in (sender, receiver):
        end.close()


async def test_a_frame_that_is_too_large_ends_the_connection_before_it_is_read() -> None:
    connection, wire_ = TcpConnection(), Transport()
    connection.connection_made(wire_)
    connection.data_received((FIRST_FRAME_BYTES + 1).to_bytes(4, "little"))
    assert wire_.closed
    with pytest.raises(EngineError, match="4097 bytes is announced, and the limit is 4096"):
        await connection.frame()
