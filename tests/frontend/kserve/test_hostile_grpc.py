"""What a hostile client of KServe's gRPC service may do: send messages that cost more than their bytes, send none, send
none of its keys, and read nothing."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from penstock.frontend import RequestLimits
from tests.frontend.conftest import NAME, Site
from tests.frontend.kserve.test_grpc import fails, request, serving, stream
from tests.frontend.loop_time import assert_loop_stays_free
from tests.patience import PATIENCE, until

grpc = pytest.importorskip("grpc", reason="pip install 'penstock[grpc]'")

MIB4 = 4 << 20
SERVICE = "/inference.GRPCInferenceService/"
WATCH = "/grpc.health.v1.Health/Watch"
KEY = (("authorization", "Bearer secret"),)


def nested(field: int, inner: bytes) -> bytes:
    """A message with one field, which holds `inner`."""
    size, length = len(inner), b""
    while size > 127:
        size, length = size >> 7, length + bytes([size & 127 | 128])
    return bytes([field << 3 | 2]) + length + bytes([size]) + inner


TENSOR = nested(1, b"text_input") + nested(2, b"BYTES")
BOMBS = {
    "inputs": b"\x2a\0" * (MIB4 // 2),
    "raw contents": b"\x3a\0" * (MIB4 // 2),
    "parameters": b"\x22\x02\x12\0" * (MIB4 // 4),
    "shape": nested(5, TENSOR + nested(3, bytes(MIB4 - 100))),
    "shape, not packed": nested(5, TENSOR + b"\x18\0" * (MIB4 // 2 - 100)),
    "contents": nested(5, TENSOR + nested(5, b"\x42\0" * (MIB4 // 2 - 100))),
    "merged contents": nested(5, TENSOR + nested(5, b"") * (MIB4 // 2 - 100)),
    "flags": nested(5, TENSOR + nested(5, nested(1, bytes(MIB4 - 100)))),
    "parameters of an input": nested(5, TENSOR + b"\x22\x02\x12\0" * (MIB4 // 4 - 100)),
    "a group": b"\x2b" * MIB4,
    "a number without end": b"\x08" + b"\xff" * 100,
    "cut off": nested(5, TENSOR)[:-3],
}


def raw(channel: Any, method: str, **options: Any) -> Any:
    """A call whose messages are bytes, and that sends none by itself."""
    return channel.stream_stream(method if method[1:].count("/") else SERVICE + method)(**options)


async def test_a_message_costs_no_more_than_its_bytes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(site) as (channel, _):

        async def send() -> None:
            for name, bomb in BOMBS.items():
                call = raw(channel, "ModelInfer")
                await call.write(bomb)
                await call.done_writing()
                code, says = await fails(call.read())
                assert code is grpc.StatusCode.INVALID_ARGUMENT, (name, code, says)

        await assert_loop_stays_free(monkeypatch, send)
        opened = raw(channel, "ModelStreamInfer")
        await opened.write(BOMBS["inputs"])
        assert b"more than 1024 fields" in await opened.read()
        await opened.write(request(id="next", max_tokens=1).SerializeToString())
        assert b"next" in await opened.read()  # a request that is refused does not end the stream


async def test_a_long_name_costs_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "é" * (MIB4 // 4)
    async with serving(site) as (channel, _):

        async def send() -> None:
            for method, message in (
                ("ModelReady", nested(1, long.encode())),
                ("ModelMetadata", nested(1, NAME.encode()) + nested(2, long.encode())),
                ("RepositoryModelLoad", nested(2, long.encode())),
                ("ModelInfer", nested(1, long.encode())),
            ):
                call = raw(channel, method)
                await call.write(message)
                code, says = await fails(call.read())
                assert code is grpc.StatusCode.INVALID_ARGUMENT and "characters; the limit is" in says

        await assert_loop_stays_free(monkeypatch, send)


async def test_nothing_is_received_without_a_key(make_site: Callable[..., Site]) -> None:
    site = make_site(api_key="secret")
    async with serving(site) as (channel, _):
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            for method in ("ModelInfer", "ModelStreamInfer", "ModelMetadata", "RepositoryModelLoad"):
                code, says = await fails(asyncio.wait_for(raw(channel, method, metadata=metadata).read(), PATIENCE))
                assert code is grpc.StatusCode.UNAUTHENTICATED and "API key" in says
        assert site.app.sockets == 0
        codes = {code for _, _, code in site.metrics._requests}
        assert codes == {"401"}


async def test_a_message_that_does_not_come(make_site: Callable[..., Site]) -> None:
    site = make_site(limits=RequestLimits(body_timeout=0.2))
    async with serving(site) as (channel, _):
        for method in ("ModelInfer", "ServerLive", WATCH):
            code, says = await fails(asyncio.wait_for(raw(channel, method).read(), PATIENCE))
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED and "within 0.2 s" in says


async def test_streams_and_watches_are_counted(make_site: Callable[..., Site]) -> None:
    site = make_site(limits=RequestLimits(max_sockets=2), api_key="secret")
    async with serving(site) as (channel, _):
        opened = [stream(channel, metadata=KEY) for _ in range(2)]
        await until(lambda: site.app.sockets == 2)
        code, says = await fails(stream(channel, metadata=KEY).read())
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "2 WebSockets and gRPC streams" in says
        for call in opened:
            call.cancel()
        await until(lambda: site.app.sockets == 0)
        watches = []
        for _ in range(64):
            watches.append(raw(channel, WATCH))
            await watches[-1].write(b"")
        assert all([await call.read() for call in watches])
        code, says = await fails(raw(channel, WATCH).read())
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "64 clients watch" in says
        for call in watches:
            call.cancel()


async def test_a_stream_that_is_not_read_ends(make_site: Callable[..., Site]) -> None:
    site = make_site(limits=RequestLimits(write_timeout=1.5), max_model_len=1_000_000)
    site.says("hello world", ends=False)
    async with serving(site, **{"grpc.http2.bdp_probe": 0}) as (channel, _):  # a window that does not grow
        opened = stream(channel)
        for id in range(20):
            await opened.write(request(id=str(id), stream=True, max_tokens=900_000))
        await until(lambda: site.engine.running == 20)
        await until(lambda: site.engine.running == 0 and site.app.sockets == 0)
        assert len(site.engine.aborted) == 20
        opened.cancel()


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
async def test_a_whole_answer_counts_until_it_is_read(make_site: Callable[..., Site], method: str) -> None:
    site = make_site(max_model_len=1_000_000)
    site.says("hello world", ends=False)
    options = {"grpc.http2.bdp_probe": 0, "grpc.max_receive_message_length": -1}
    async with serving(site, **options) as (channel, _):
        call = raw(channel, method)
        await call.write(request(max_tokens=200_000).SerializeToString())
        await call.done_writing()
        await until(lambda: site.app.lifecycle.requests == 1)
        await until(lambda: site.app.lifecycle.requests == 0)
        await asyncio.sleep(0.2)
        assert site.app.unread.used > 100_000
        assert len(await call.read()) > 200_000
        await until(lambda: site.app.unread.used == 0)


@pytest.mark.parametrize("shape", [[2], [0], [-1], [1, 7], [1] * 9 + [3]])
async def test_a_shape_that_is_not_the_datas(make_site: Callable[..., Site], shape: list[int]) -> None:
    site = make_site()
    async with serving(site) as (channel, _):
        for tensor in (0, 1):
            asked = request()
            asked.inputs[tensor].shape[:] = shape
            call = channel.unary_unary(SERVICE + "ModelInfer", type(asked).SerializeToString)
            code, says = await fails(call(asked))
            assert code is grpc.StatusCode.INVALID_ARGUMENT and "but one element" in says

    site = make_site()
    inputs = [{"name": "text_input", "datatype": "BYTES", "shape": shape, "data": ["a"]}]
    answer = await site.http.post(f"/v2/models/{NAME}/infer", json={"inputs": inputs})
    assert answer.status_code == 400 and "but one element" in answer.text
