"""A provider on loopback that says what a test wants, and a server whose models are there."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from penstock.config import ServerConfig
from penstock.frontend import ModelRegistry, ServedModel, Serving, create_app
from penstock.frontend.http.access import Access
from penstock.frontend.providers.gateway import open_gateway
from penstock.observe.metrics import Metrics
from penstock.text import Tokenizer
from tests.frontend.conftest import NAME, client_of
from tests.frontend.scripted import ScriptedClient
from tests.patience import PATIENCE

KEY = "sk-test-0123456789"


class Reply:
    """One answer of the provider."""

    def __init__(
        self, body: bytes = b"", *, status: int = 200, cut: bool = False, silent: bool = False, **headers: str
    ) -> None:
        """`cut`: the connection is closed before the answer's end. `silent`: nothing follows the body until the client
        leaves."""
        self.body, self.status, self.cut, self.silent = body, status, cut, silent
        kind = "text/event-stream" if status == 200 else "application/json"
        self.headers = {"content-type": kind, **{name.replace("_", "-"): value for name, value in headers.items()}}


class FakeProvider:
    """Gives `replies` in turn, and the last one again and again. Keeps the requests."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.left = 0  # clients that left before the end
        self.port = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        self.headers.append({name.lower(): value for name, value in request.headers.items()} | {"path": request.path})
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        response = web.StreamResponse(status=reply.status, headers=reply.headers)
        await response.prepare(request)
        await response.write(reply.body)
        if reply.silent:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.left += 1
                raise
        if reply.cut:
            assert request.transport is not None
            request.transport.abort()
        return response


@pytest.fixture
async def provider() -> AsyncIterator[FakeProvider]:
    fake = FakeProvider()
    app = web.Application()
    app.router.add_post("/v1/{path:.*}", fake.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.port = runner.addresses[0][1]
    yield fake
    await runner.cleanup()


class Gateway:
    """A server with a model of its own, and those of the providers."""

    def __init__(self, app: Access, engine: ScriptedClient, tokenizer: Tokenizer, metrics: Metrics) -> None:
        self.app, self.engine, self.tokenizer, self.metrics = app, engine, tokenizer, metrics
        self.http = client_of(app, timeout=60)

    async def ask(self, model: str = "remote", path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}], **fields}
        return await self.http.post(path, json=body)

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


Make = Callable[..., Awaitable[Gateway]]


@pytest.fixture
async def gateway(
    provider: FakeProvider, tokenizers: tuple[Tokenizer, Tokenizer], tmp_path: Path
) -> AsyncIterator[Make]:
    """gateway(kind="openai", fallbacks={}, routes={}, server={}, models={}, local=True, length=64, fields of the
    entry)"""
    made: list[Gateway] = []

    async def make(
        kind: str = "openai",
        fallbacks: dict[str, list[str]] | None = None,
        routes: dict[str, Any] | None = None,
        server: dict[str, Any] | None = None,
        models: dict[str, Any] | None = None,
        local: bool = True,
        length: int = 64,
        **entry: Any,
    ) -> Gateway:
        (tmp_path / "key").write_text(f"{KEY}\n")
        price = {"input": 2.0, "output": 10.0, "cached": 0.5}
        there = {
            "kind": kind,
            "url": f"http://127.0.0.1:{provider.port}/v1",
            "private": True,
            "first_token_timeout": PATIENCE,
            "key_file": str(tmp_path / "key"),
            "models": models or {"remote": {"model": "upstream", "aliases": ["other-name"], **price}},
            **entry,
        }
        file = tmp_path / "providers.yaml"
        file.write_text(
            json.dumps({"providers": {"there": there}, "fallbacks": fallbacks or {}, "routes": routes or {}})
        )
        tokenizer = tokenizers[0]
        eos = tokenizer.encode("<|im_end|>")[0]
        said = tokenizer.encode("hello", add_special_tokens=False)
        engine = ScriptedClient(
            lambda request, choice: [*said, eos], vocab_size=tokenizer.vocab_size, eos=eos, max_model_len=length
        )
        here = ServedModel(name=NAME, client=engine, tokenizer=tokenizer, created=1)
        metrics = Metrics(CollectorRegistry())
        registry = ModelRegistry(Serving(here, metrics)) if local else ModelRegistry()
        settings = ServerConfig(served_model_name=NAME, **{"state_dir": "none", **(server or {})})
        chosen = open_gateway(str(file), registry, metrics)
        app = create_app(registry, settings, metrics, fallbacks=chosen)
        made.append(Gateway(app, engine, tokenizer, metrics))
        return made[-1]

    yield make
    for each in made:
        await each.app.models.close()
