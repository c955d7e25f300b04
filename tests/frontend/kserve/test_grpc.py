"""KServe's gRPC service over a scripted engine, with grpcio: limits, keys, TLS, what the engine sees, and the end."""

import asyncio
import contextlib
import itertools
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.frontend import RequestLimits, serve
from penstock.frontend.http.tls import TLS
from penstock.messages import EndsEngines
from tests.e2e.certificates import Authority
from tests.frontend.conftest import NAME, Site, listening
from tests.patience import PATIENCE, until
from tests.ports import free_port

grpc = pytest.importorskip("grpc", reason="pip install 'penstock[grpc]'")
pytest.importorskip("grpc.aio")

from penstock.frontend.kserve.grpc import GRPCServer  # noqa: E402
from penstock.frontend.kserve.grpc.messages import MESSAGES  # noqa: E402

Request, Answer, StreamAnswer = MESSAGES["InferRequest"], MESSAGES["InferAnswer"], MESSAGES["StreamAnswer"]


@contextlib.asynccontextmanager
async def serving(site: Site, tls: TLS | None = None, trust: bytes | None = None, **options: int) -> AsyncIterator[Any]:
    """A channel with these options to the service, which stops with the block."""
    sock, stop, port = listening(), asyncio.Event(), free_port()
    beside = GRPCServer(site.app, "127.0.0.1", port, tls)
    running = asyncio.create_task(serve(site.app, sock, stop=stop, beside=beside))
    credentials = None if tls is None else grpc.ssl_channel_credentials(trust)
    make = grpc.aio.insecure_channel if tls is None else grpc.aio.secure_channel
    channel = make(f"127.0.0.1:{port}", *([] if credentials is None else [credentials]), options=[*options.items()])
    try:
        async with channel:
            await asyncio.wait_for(channel.channel_ready(), PATIENCE)
            yield channel, stop
    finally:
        stop.set()
        await asyncio.wait_for(running, PATIENCE)


def request(text: str = "hello", *, id: str = "", stream: bool = False, **parameters: Any) -> Any:
    made = Request(model_name=NAME, id=id)
    made.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text.encode())
    made.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(stream)
    for name, value in parameters.items():
        pair = made.parameters.add(key=name)
        setattr(pair.value, {bool: "bool", int: "int64", str: "string", float: "double"}[type(value)] + "_param", value)
    return made


def infer(channel: Any, asked: Any, **options: Any) -> Any:
    path = "/inference.GRPCInferenceService/ModelInfer"
    return channel.unary_unary(path, Request.SerializeToString, Answer.FromString)(asked, **options)


def stream(channel: Any, **options: Any) -> Any:
    path = "/inference.GRPCInferenceService/ModelStreamInfer"
    return channel.stream_stream(path, Request.SerializeToString, StreamAnswer.FromString)(**options)


def text(answer: Any) -> str:
    (raw,) = answer.raw_output_contents
    assert struct.unpack("<I", raw[:4])[0] == len(raw) - 4
    return raw[4:].decode()


async def fails(call: Any) -> tuple[Any, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code(), error.value.details()


async def test_answers_and_streams(site: Site) -> None:
    ids = site.says("hello world", cuts=(2,))
    async with serving(site) as (channel, _):
        answer = await infer(channel, request(id="a", max_tokens=40))
        assert (answer.id, answer.model_name, answer.model_version) == ("a", NAME, "1")
        assert text(answer) == site.tokenizer.decode(ids)
        call = stream(channel)
        for id in "xyz":
            await call.write(request(id=id, stream=True, max_tokens=40, triton_enable_empty_final_response=True))
        await call.done_writing()
        got: dict[str, list[Any]] = {id: [] for id in "xyz"}
        async for event in call:
            assert event.error_message == ""
            got[event.infer_response.id].append(event.infer_response)
    for answers in got.values():
        assert "".join(text(answer) for answer in answers[:-1]) == site.tokenizer.decode(ids)
        finals = [answer.parameters[0].value.bool_param for answer in answers]
        assert finals == [False] * (len(answers) - 1) + [True] and not answers[-1].outputs
    assert site.app.lifecycle.requests == 0


@pytest.mark.parametrize("said", ["hello world", ""])
async def test_the_last_answer_of_a_stream_says_so(site: Site, said: str) -> None:
    site.says(said, cuts=(2,))
    async with serving(site) as (channel, _):
        call = stream(channel)
        await call.write(request(id="a", stream=True, max_tokens=40))
        await call.done_writing()
        answers = [event.infer_response async for event in call]
    assert "".join(map(text, answers)) == said
    assert [answer.parameters[0].value.bool_param for answer in answers] == [False] * (len(answers) - 1) + [True]


async def test_a_version_that_is_not_served_is_not_ready(site: Site) -> None:
    async with serving(site) as (channel, _):
        path = "/inference.GRPCInferenceService/ModelReady"
        name, ready = MESSAGES["ModelName"], MESSAGES["Ready"]
        ask = channel.unary_unary(path, name.SerializeToString, ready.FromString)
        versions = ("", "1", "2")
        assert [(await ask(name(name=NAME, version=one))).ready for one in versions] == [True, True, False]


async def test_a_cancelled_call_ends_in_the_engine(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.says("hello world", ends=False)
    site.engine.gate = asyncio.Event()
    async with serving(site) as (channel, _):
        whole = infer(channel, request(max_tokens=9))
        opened = stream(channel)
        for id in "ab":
            await opened.write(request(id=id, stream=True, max_tokens=9))
        assert (await opened.read()).infer_response.id in "ab"
        await until(lambda: site.engine.running == 3)
        whole.cancel()
        opened.cancel()
        await until(lambda: site.engine.running == 0 and site.app.lifecycle.requests == 0)
        assert len(site.engine.aborted) == 3
        codes = {(code, route) for _, route, code in site.metrics._requests}
        assert ("499", "/v2/models/{model}/infer") in codes and ("499", "/v2/models/{model}/infer_stream") in codes


async def test_a_prompt_that_ends_engines_must_not_be_sent_again(site: Site) -> None:
    site.engine.refusal = EndsEngines("do not send it again")
    async with serving(site) as (channel, _):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await infer(channel, request(max_tokens=9))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert ("x-should-retry", "false") in list(error.value.trailing_metadata())


async def test_a_calls_deadline_reaches_the_engine(site: Site) -> None:
    site.engine.gate = asyncio.Event()
    async with serving(site) as (channel, _):
        code, _ = await fails(infer(channel, request(max_tokens=9), timeout=2.0))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        (asked,) = site.engine.requests
        assert asked.deadline is not None
        await until(lambda: site.engine.running == 0)


async def test_limits(make_site: Callable[..., Site]) -> None:
    site = make_site(limits=RequestLimits(max_body_bytes=10_000, max_in_flight=1, max_socket_requests=1))
    site.engine.gate = asyncio.Event()
    async with serving(site) as (channel, _):
        code, says = await fails(infer(channel, request("x" * 20_000)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in says
        made = request()
        made.inputs[0].ClearField("contents")
        made.raw_input_contents.extend([bytes(4 * 2400), b"\1"])  # 2,400 empty texts
        assert "BYTES and one text" in (await fails(infer(channel, made)))[1]
        many = request()
        for _ in range(65):
            many.parameters.add(key="seed").value.int64_param = 1
        assert "more than 64 entries" in (await fails(infer(channel, many)))[1]
        opened = stream(channel)
        for id in "abc":
            await opened.write(request(id=id, stream=True, max_tokens=4))
        await until(lambda: site.engine.running == 1)
        code, says = await fails(infer(channel, request()))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "--max-in-flight" in says
        assert len(site.engine.requests) == 1  # the others of the stream wait
        site.engine.gate.set()
        await opened.done_writing()
        events = [event async for event in opened]
        assert not any(event.error_message for event in events)
        assert [id for id, _ in itertools.groupby(event.infer_response.id for event in events)] == [*"abc"]


async def test_an_error_after_the_start_of_a_stream(site: Site) -> None:
    site.engine.row_error_after = 2
    async with serving(site) as (channel, _):
        opened = stream(channel)
        await opened.write(request(id="a", stream=True, max_tokens=9, triton_enable_empty_final_response=True))
        await opened.write(request(id="b", stream=True, max_token=9))
        await opened.done_writing()
        errors = {e.infer_response.id: e.error_message async for e in opened if e.error_message}
    assert "NaN" in errors["a"] and "'parameters.max_token'" in errors["b"]


async def test_keys_and_tls(make_site: Callable[..., Site], tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.sign(7)
    (tmp_path / "cert.pem").write_bytes(certificate)
    (tmp_path / "key.pem").write_bytes(key)
    site = make_site(api_key="secret")
    tls = TLS(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))
    async with serving(site, tls, authority.file.read_bytes()) as (channel, _):
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            code, says = await fails(infer(channel, request(), metadata=metadata))
            assert code is grpc.StatusCode.UNAUTHENTICATED and "API key" in says
        assert not site.engine.requests
        assert text(await infer(channel, request(max_tokens=2), metadata=(("authorization", "Bearer secret"),)))
        health = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            MESSAGES["HealthRequest"].SerializeToString,
            MESSAGES["HealthAnswer"].FromString,
        )
        assert (await health(MESSAGES["HealthRequest"]())).status == 1


async def test_a_stopping_server_finishes_calls_and_refuses_new_ones(site: Site) -> None:
    site.engine.gate = asyncio.Event()
    async with serving(site) as (channel, stop):
        whole = infer(channel, request(max_tokens=5))
        idle = stream(channel)
        await idle.write(request(id="a", max_tokens=1, stream=True))
        assert (await idle.read()).infer_response.id == "a"
        await until(lambda: site.engine.running >= 1)
        stop.set()
        await until(lambda: site.app.lifecycle.draining)
        code, says = await fails(infer(channel, request()))
        assert code is grpc.StatusCode.UNAVAILABLE and "shutting down" in says
        site.engine.gate.set()
        assert text(await whole)
        assert await asyncio.wait_for(idle.code(), PATIENCE) in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
