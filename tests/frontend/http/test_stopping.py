"""A real server that stops: by signals, after a delay, and with its engine."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from penstock.frontend import serve
from penstock.frontend.http import server
from penstock.messages import EngineError
from tests.frontend.conftest import Site, listening, parse_events
from tests.frontend.http.raw import event_loop_policy
from tests.patience import PATIENCE, until

__all__ = ["event_loop_policy"]

PROMPT = {"prompt": "hello", "max_tokens": 60}


@contextlib.asynccontextmanager
async def stream_in_flight(
    site: Site,
) -> AsyncIterator[tuple[httpx.AsyncClient, asyncio.Task[None], asyncio.Task[httpx.Response]]]:
    """A client of a server, the server, and an answer that goes on when `site.engine.gate` is set."""
    site.engine.gate = asyncio.Event()
    sock = listening()
    running = asyncio.create_task(serve(site.app, sock))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}") as http:
        stream = asyncio.create_task(http.post("/v1/completions", json={**PROMPT, "stream": True}))
        await until(lambda: site.engine.running == 1)
        yield http, running, stream


async def test_stopping_lets_streams_finish(site: Site) -> None:
    site.says("hello world")
    async with stream_in_flight(site) as (http, running, stream):
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: site.app.lifecycle.draining)
        assert (await http.post("/v1/completions", json=PROMPT)).status_code == 503
        assert (await http.get("/readyz")).status_code == 503
        assert not site.engine.closed
        site.engine.gate.set()
        events = parse_events((await stream).content)
        assert "".join(event["choices"][0]["text"] for event in events) == "hello world"
        await asyncio.wait_for(running, PATIENCE)
    assert site.engine.closed
    with pytest.raises(ConnectionError):
        await asyncio.open_connection("127.0.0.1", http.base_url.port)


async def test_before_it_drains_a_server_answers_and_is_not_ready(site: Site) -> None:
    """For `delay` seconds, of which the second signal takes the rest away."""
    sock = listening()
    running = asyncio.create_task(serve(site.app, sock, delay=60))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}") as http:
        assert (await http.get("/readyz")).status_code == 200
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: site.app.lifecycle.stopping)
        assert (await http.get("/readyz")).json() == {"status": "stopping"}
        assert (await http.get("/livez")).status_code == 200
        assert (await http.post("/v1/completions", json=PROMPT)).status_code == 200
        assert not site.app.lifecycle.draining and not running.done()
        await asyncio.sleep(server.ONE_STOP_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(running, PATIENCE)
    assert site.app.lifecycle.draining and site.engine.closed


async def test_a_delay_ends_by_itself_and_with_the_engine(make_site: Callable[..., Site]) -> None:
    for ends in (False, True):
        site, stop = make_site(), asyncio.Event()
        running = asyncio.create_task(serve(site.app, listening(), stop=stop, delay=60 if ends else 0.2))
        stop.set()
        await until(lambda site=site: site.app.lifecycle.stopping)  # type: ignore[misc]
        if not ends:
            await asyncio.wait_for(running, PATIENCE)
            continue
        site.engine.status = "ended"
        with pytest.raises(EngineError, match="the engine ended before"):
            await asyncio.wait_for(running, PATIENCE)


async def test_whoever_is_told_that_it_is_ready_may_stop_it(site: Site) -> None:
    sock = listening()
    await asyncio.wait_for(serve(site.app, sock, ready=lambda: os.kill(os.getpid(), signal.SIGTERM)), timeout=20)
    assert site.app.lifecycle.draining and site.engine.closed


@pytest.mark.parametrize("how", ["timeout", "second signal"])
async def test_stopping_ends_streams_that_take_too_long(
    make_site: Callable[..., Site], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ONE_STOP_SECONDS", 0.0)
    site = make_site(drain_timeout=0.2 if how == "timeout" else 60)
    async with stream_in_flight(site) as (_, running, stream):
        os.kill(os.getpid(), signal.SIGINT)
        await until(lambda: site.app.lifecycle.draining)
        if how == "second signal":
            os.kill(os.getpid(), signal.SIGINT)
        *_, last = parse_events((await stream).content)
        assert last["error"]["code"] == "engine_unavailable"
        await asyncio.wait_for(running, PATIENCE)
    assert site.engine.running == 0


async def test_signals_at_once_are_one_and_a_hangup_is_none(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` and `make` send SIGTERM to their group and once more to the server."""
    monkeypatch.setattr(server, "ONE_STOP_SECONDS", 60.0)  # this process may stand still between two signals
    site.says("hello world")
    async with stream_in_flight(site) as (_, running, stream):
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)
        assert not site.app.lifecycle.draining
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.02)
        assert site.app.lifecycle.draining and not site.engine.closed
        site.engine.gate.set()
        events = parse_events((await stream).content)
        assert "".join(event["choices"][0]["text"] for event in events) == "hello world"
        await asyncio.wait_for(running, PATIENCE)


async def test_a_server_ends_with_its_engine(site: Site) -> None:
    sock = listening()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    running = asyncio.create_task(serve(site.app, sock, stop=asyncio.Event()))
    async with httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/readyz")).status_code == 200
        site.engine.status = "restarting"
        assert (await http.get("/readyz")).json() == {"status": "the engine is started again"}
        assert (await http.get("/livez")).status_code == 200
        site.engine.status = "ended"
        assert (await http.get("/livez")).status_code == 503
        with pytest.raises(EngineError, match="the engine ended before the server was stopped"):
            await asyncio.wait_for(running, PATIENCE)
    assert site.engine.closed
