"""A stream starts before its first token, and shows signs of life that the clients of its wire skip."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from penstock.frontend.http import streamed
from penstock.frontend.http.sse import HEARTBEAT, sse_data
from penstock.messages import DeadlineExceeded, EngineError, GenerateRequest, QueueFull, TokenDelta
from tests.frontend.conftest import NAME, Site, live

USER = [{"role": "user", "content": "hello"}]
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
# path: (body, what begins the answer, heartbeat)
WIRES: dict[str, tuple[dict[str, Any], bytes, bytes]] = {
    "/v1/chat/completions": ({"messages": USER, "stream": True}, b'data: {"id":"chatcmpl-', HEARTBEAT),
    "/v1/completions": ({"prompt": "hello", "stream": True}, HEARTBEAT, HEARTBEAT),
    "/v1/responses": ({"input": "hello", "stream": True}, b"event: response.created\n", HEARTBEAT),
    "/v1/messages": ({"messages": USER, "max_tokens": 9, "stream": True}, b"event: message_start\n", PING),
    "/api/chat": ({"messages": USER}, b" ", b" "),
    "/api/generate": ({"prompt": "hello"}, b" ", b" "),
    "/generate_stream": ({"inputs": "hello"}, HEARTBEAT, HEARTBEAT),
    f"/v2/models/{NAME}/generate_stream": ({"text_input": "hello"}, HEARTBEAT, HEARTBEAT),
}


@pytest.fixture
def slow(make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Site]:
    """slow(seconds, error=): a site whose first token, or error, comes so late."""
    monkeypatch.setattr(streamed, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(streamed, "HEARTBEAT_SECONDS", 0.05)

    def make(seconds: float, error: Exception | None = None) -> Site:
        site = make_site()
        site.says("hello world")
        generate = site.engine.generate

        async def late(request: GenerateRequest, gather: int = 1) -> AsyncGenerator[TokenDelta, None]:
            await asyncio.sleep(seconds)
            if error is not None:
                raise error
            async for delta in generate(request, gather):
                yield delta

        site.engine.generate = late  # type: ignore[method-assign]
        return site

    return make


async def answer(site: Site, path: str) -> httpx.Response:
    body = WIRES[path][0]
    named = {} if path.startswith(("/generate", "/v2")) else {"model": NAME}
    return await site.http.post(path, json={**named, **body})


@pytest.mark.parametrize("path", WIRES)
async def test_a_stream_that_is_silent_starts(slow: Callable[..., Site], path: str) -> None:
    _, begin, heartbeat = WIRES[path]
    fast = await answer(slow(0), path)
    response = await answer(slow(0.4), path)
    assert response.status_code == 200 and response.content.startswith(begin)
    assert response.content.count(heartbeat) >= 2 and response.content.count(heartbeat) > fast.content.count(heartbeat)
    assert sorted(map(shape, events(response.content))) == sorted(map(shape, events(fast.content)))


def events(content: bytes) -> list[Any]:
    """The data of a stream as its clients read it: events but pings, or lines."""
    if content.lstrip().startswith(b"{"):
        return [json.loads(line) for line in content.split(b"\n")[:-1]]
    found = [data for data in sse_data(content.replace(PING, b"")) if data != b"[DONE]"]
    return [json.loads(data) for data in found]


def shape(event: dict[str, Any]) -> tuple[str, ...]:
    return (str(event.get("type", "")), *sorted(event))


@pytest.mark.parametrize("path", WIRES)
async def test_an_error_before_the_start_keeps_its_status(slow: Callable[..., Site], path: str) -> None:
    response = await answer(slow(0, QueueFull("full", 3)), path)
    assert response.status_code in (429, 529)


@pytest.mark.parametrize("error", [EngineError("the engine has died"), DeadlineExceeded("too late")])
@pytest.mark.parametrize("path", WIRES)
async def test_an_error_after_the_start_is_the_wires_event(
    slow: Callable[..., Site], path: str, error: Exception
) -> None:
    response = await answer(slow(0.3, error), path)
    assert response.status_code == 200
    last = response.content.removesuffix(b"data: [DONE]\n\n").split(b"\n\n")[-2 if b"\n\n" in response.content else 0]
    assert str(error).encode() in last and b"error" in last


async def test_a_pause_between_tokens_has_heartbeats(slow: Callable[..., Site]) -> None:
    site = slow(0)
    site.engine.gate = asyncio.Event()
    asyncio.get_running_loop().call_later(0.5, site.engine.gate.set)
    content = (await answer(site, "/v1/completions")).content
    assert content.startswith(b"data: ") and content.count(HEARTBEAT) >= 2
    assert content.endswith(b"data: [DONE]\n\n")


async def test_public_clients_skip_heartbeats(slow: Callable[..., Site]) -> None:
    async with live(slow(0.3)) as port:
        openai = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-")
        stream = await openai.chat.completions.create(model=NAME, messages=USER, stream=True)  # type: ignore
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "hello world"
        anthropic = AsyncAnthropic(base_url=f"http://127.0.0.1:{port}", api_key="-")
        async with anthropic.messages.stream(model=NAME, max_tokens=20, messages=USER) as said:  # type: ignore
            assert await said.get_final_text() == "hello world"


async def test_a_client_that_goes_before_the_start_ends_its_request(slow: Callable[..., Site]) -> None:
    site = slow(60)
    async with live(site) as port:
        with pytest.raises(httpx.ReadTimeout):
            async with httpx.AsyncClient(timeout=httpx.Timeout(5, read=0.05)) as client:
                await client.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "a", "stream": True})
    assert not [task for task in asyncio.all_tasks() if "_beat" in repr(task.get_coro())]
