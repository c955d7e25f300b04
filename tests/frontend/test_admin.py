"""The operator's routes: who may use them, and what a reload and sleep do to requests."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from functools import partial

import httpx
import pytest

from penstock.config import ConfigError
from penstock.frontend.served import ServedModel
from penstock.frontend.versions.reloads import Start
from penstock.frontend.versions.room import EngineRoom
from penstock.messages import EngineError
from penstock.text.prompts import EncodeText
from tests.frontend.conftest import NAME, Site
from tests.frontend.http.test_access import raw
from tests.frontend.scripted import ScriptedClient
from tests.patience import AT_ONCE, until

ASK = {"prompt": "hello", "max_tokens": 4}
ROUTES = (
    ("POST", "/reload"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("POST", "/reset_prefix_cache"),
)
OURS = {"authorization": "Bearer secret"}
OPERATOR = {"authorization": "Bearer operator"}


async def statuses(site: Site, headers: dict[str, str]) -> set[int]:
    return {(await site.http.request(method, path, headers=headers)).status_code for method, path in ROUTES}


async def test_on_loopback_without_keys_they_are_open_to_programs(make_site: Callable[..., Site]) -> None:
    site = make_site()
    assert await statuses(site, {}) == {200}
    assert await statuses(site, {"sec-fetch-site": "cross-site"}) == {403}
    assert await statuses(site, {"origin": "https://evil.example"}) == {403}
    assert await statuses(site, {"host": "evil.example"}) == {403}


async def test_pages_of_allowed_origins_may_not(make_site: Callable[..., Site]) -> None:
    site = make_site(cors_origin=("https://app.example",))
    assert await statuses(site, {"origin": "https://app.example"}) == {403}


@pytest.mark.parametrize("config", [{"api_key": "secret"}, {"host": "0.0.0.0"}])
async def test_without_an_admin_key_they_are_off_elsewhere(
    make_site: Callable[..., Site], config: dict[str, str]
) -> None:
    site = make_site(**config)
    assert await statuses(site, OURS) == await statuses(site, {}) == {403}
    assert site.engine.status != "asleep"


async def test_they_need_the_admin_key_and_it_opens_nothing_else(make_site: Callable[..., Site]) -> None:
    site = make_site(api_key="secret", admin_key="operator")
    assert await statuses(site, OURS) == await statuses(site, {}) == {401}
    assert await statuses(site, OPERATOR) == {200}
    assert (await site.http.get("/v1/models", headers=OPERATOR)).status_code == 401


async def test_another_spelling_of_a_path_does_not_get_around_the_key(make_site: Callable[..., Site]) -> None:
    site = make_site(api_key="secret", admin_key="operator")
    keys = [(b"authorization", b"Bearer secret")]
    assert await raw(site, b"/%73leep", "POST", keys) == 403 and site.engine.status != "asleep"
    assert await raw(site, b"/sleep", "POST", keys) == 401


async def test_allowed_hosts(make_site: Callable[..., Site]) -> None:
    for config in ({"host": "0.0.0.0"}, {"api_key": "secret"}, {}):
        site = make_site(allowed_host=("llm.example",), **config)
        for host in ("llm.example", "LLM.example:8000", "127.0.0.1", "evil.example"):
            answer = await site.http.get("/v1/models", headers={**OURS, "host": host})
            assert answer.status_code == (403 if "evil" in host else 200), (config, host)


async def test_sleep_is_refused_while_a_request_runs(make_site: Callable[..., Site]) -> None:
    site = make_site()
    site.engine.gate = asyncio.Event()
    asking = asyncio.create_task(site.post("/v1/completions", **ASK))
    await until(lambda: site.engine.running == 1)
    refused = await site.http.post("/sleep")
    assert refused.status_code == 409 and refused.json()["error"]["message"].startswith("1 requests are being answered")
    site.engine.gate.set()
    await asking
    assert (await site.http.post("/sleep?level=2")).json() == {"is_sleeping": True}
    assert (await site.http.get("/readyz")).json() == {"status": "asleep"}
    assert (await site.http.post("/wake_up")).json() == {"is_sleeping": False}


async def test_it_sleeps_when_nobody_comes(site: Site) -> None:
    site.engine.gate = asyncio.Event()
    asking = asyncio.create_task(site.post("/v1/completions", **ASK))
    await until(lambda: site.engine.running == 1)
    site.serving.keep_alive = 0.1
    watching = asyncio.create_task(site.serving.sleep_when_unused())
    await asyncio.sleep(0.4)
    assert site.engine.status != "asleep"  # a request may take longer
    site.engine.gate.set()
    await asking
    await until(lambda: site.engine.status == "asleep")
    watching.cancel()


async def test_an_engine_wakes_under_the_name_that_the_room_knows(site: Site) -> None:
    """A model may serve another name than that of its folder. It stays from when it woke."""
    room = EngineRoom(1, 100.0)
    site.serving.room = partial(room.starting, "folder")
    room.add("folder", site.serving)
    await site.serving.sleep()
    assert site.serving.model.name != "folder" and room.wait_seconds() == 0.0
    await site.post("/v1/completions", **ASK)
    assert site.engine.status == "ready" and 90.0 < room.wait_seconds() <= 100.0


async def test_a_clients_keep_alive_holds_until_the_next_request(site: Site) -> None:
    nothing = {"prompt": "", "stream": False}
    assert (await site.post("/api/generate", keep_alive="1m30s", **nothing))["done_reason"] == "load"
    assert site.serving.sleeps_after == 90.0
    await site.post("/api/generate", prompt="x", stream=False, keep_alive=-1, options={"num_predict": 1})
    assert site.serving.sleeps_after == math.inf
    site.serving.keep_alive = 7.0
    await site.post("/v1/completions", **ASK)
    assert site.serving.sleeps_after == 7.0
    wrong = await site.http.post("/api/generate", json={"model": NAME, "keep_alive": "soon", **nothing})
    assert wrong.status_code == 400 and "keep_alive is 'soon'" in wrong.json()["error"]
    assert (await site.post("/api/generate", keep_alive=0, **nothing))["done_reason"] == "unload"
    watching = asyncio.create_task(site.serving.sleep_when_unused())
    await until(lambda: site.engine.status == "asleep")
    watching.cancel()
    assert (await site.http.get("/api/ps")).json() == {"models": []}


class Next:
    """The version that a reload finds."""

    def __init__(self, site: Site, name: str = NAME) -> None:
        info = site.engine.info
        self.engine = ScriptedClient(
            lambda request, choice: [30], vocab_size=info.vocab_size, eos=info.eos_token_ids[0]
        )
        self.model = ServedModel(
            name=name, client=self.engine, tokenizer=site.tokenizer, created=2, fingerprint="fp_next"
        )
        self.found: Start[ServedModel] | None = self.start
        self.error: Exception | None = None
        self.loading = asyncio.Event()
        self.beside: list[bool] = []
        site.serving.reloads.prepare = self.prepare

    async def prepare(self, serving: ServedModel, beside: bool) -> Start[ServedModel] | None:
        self.beside.append(beside)
        if isinstance(self.error, ValueError):
            raise self.error
        return self.found

    async def start(self) -> ServedModel:
        await self.loading.wait()
        if self.error is not None:
            raise self.error
        return self.model


def metric(site: Site, name: str) -> str:
    (line,) = (line for line in site.metrics.render()[0].decode().splitlines() if line.startswith(name))
    return line.rsplit(" ", 1)[1]


def asked(site: Site, path: str) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(site.http.post(path))


async def test_a_request_ends_on_the_version_it_began_with(site: Site) -> None:
    after = Next(site)
    site.engine.gate = asyncio.Event()
    old = asyncio.create_task(site.post("/v1/completions", **ASK))
    await until(lambda: site.engine.running == 1)
    reloading = asked(site, "/reload")
    await until(lambda: after.beside == [True])
    assert (await site.http.post("/reload")).json()["error"]["message"].startswith("a reload is in progress")
    assert len(site.engine.requests) == 1 and not after.engine.requests
    after.loading.set()
    assert "1 requests end on the old one" in (await reloading).json()["message"]

    new = await site.post("/v1/completions", **ASK)
    assert new["system_fingerprint"] == "fp_next" and len(after.engine.requests) == 1
    assert (await site.http.post("/reload")).status_code == 409  # the old one still answers
    assert (await site.http.post("/sleep")).status_code == 409
    assert not site.engine.closed
    site.engine.gate.set()
    assert "system_fingerprint" not in await old  # the first version had none
    await until(lambda: site.engine.closed)
    await until(lambda: site.serving.versions.before is None)
    assert metric(site, 'penstock_reloads_total{result="done"}') == "1.0"
    assert metric(site, 'penstock_reloads_total{result="refused"}') == "2.0"
    assert metric(site, 'penstock_request_success_total{finished_reason="length"') == "2.0"
    assert (await site.http.get("/readyz")).status_code == 200


async def test_the_old_version_leaves_no_process(site: Site) -> None:
    workers = site.serving.model.prompt_workers
    await asyncio.to_thread(workers.encode, EncodeText("hello", add_special_tokens=True))
    (process,) = workers._idle
    after = Next(site)
    after.loading.set()
    assert (await site.http.post("/reload")).status_code == 200
    await until(lambda: not process.runs)


async def test_another_name_has_series_of_its_own(site: Site) -> None:
    after = Next(site, "other")
    after.loading.set()
    assert (await site.http.post("/reload")).status_code == 200
    await until(lambda: site.engine.closed)
    await until(lambda: f'"{NAME}"' not in site.metrics.render()[0].decode())
    assert metric(site, 'penstock_engine_healthy{model_name="other"}') == "1.0"
    assert (await site.http.post("/v1/completions", json={"model": NAME, **ASK})).status_code == 404


@pytest.mark.parametrize("error", [ConfigError("--port has changed"), EngineError("no memory"), OSError("no disk")])
@pytest.mark.parametrize("query", ["", "?drain_first=true"])
async def test_a_failed_reload_leaves_the_old_version(site: Site, error: Exception, query: str) -> None:
    after = Next(site)
    after.error = error
    after.loading.set()
    failed = await site.http.post("/reload" + query)
    assert failed.status_code == 422 and str(error) in failed.json()["error"]["message"]
    assert after.beside == [not query]
    await site.post("/v1/completions", **ASK)
    assert site.engine.status != "asleep" and len(site.engine.requests) == 1
    result = "refused" if isinstance(error, ConfigError) else "failed"  # the others come when the engine starts
    assert metric(site, f'penstock_reloads_total{{result="{result}"}}') == "1.0"


async def test_nothing_new_is_no_reload(site: Site) -> None:
    Next(site).found = None
    assert "nothing has changed" in (await site.http.post("/reload")).json()["message"]
    assert metric(site, 'penstock_reloads_total{result="unchanged"}') == "1.0"
    assert (await site.http.post("/reload?drain_first=maybe")).status_code == 400


async def waiting(site: Site, after: Next) -> asyncio.Task[httpx.Response]:
    """A reload with drain_first that starts its engine, once the old one has no requests."""
    reloading = asked(site, "/reload?drain_first=true")
    await until(lambda: site.engine.status == "asleep")
    return reloading


async def test_new_requests_wait_while_there_is_no_engine(site: Site) -> None:
    after = Next(site)
    reloading = await waiting(site, after)
    new = asyncio.create_task(site.post("/v1/completions", **ASK))
    assert (await site.http.get("/readyz")).status_code == 503
    assert (await site.http.get("/v1/models")).status_code == 200
    began = time.monotonic()
    late = await site.http.post("/v1/completions", json=ASK, headers={"x-request-timeout": "0.1"})
    assert late.status_code == 504 and time.monotonic() - began < AT_ONCE
    assert not new.done()
    after.loading.set()
    assert (await reloading).status_code == 200
    assert (await new)["system_fingerprint"] == "fp_next"


async def test_requests_that_take_too_long_stop_a_reload(make_site: Callable[..., Site]) -> None:
    site = make_site(drain_timeout=0.1)
    Next(site).loading.set()
    site.engine.gate = asyncio.Event()
    old = asyncio.create_task(site.post("/v1/completions", **ASK))
    await until(lambda: site.engine.running == 1)
    refused = await site.http.post("/reload?drain_first=true")
    assert refused.status_code == 409 and "--drain-timeout" in refused.json()["error"]["message"]
    assert (await site.http.get("/readyz")).status_code == 200 and site.engine.status != "asleep"
    site.engine.gate.set()
    await old


async def test_the_end_of_the_server_ends_all_engines(site: Site) -> None:
    after = Next(site)
    after.loading.set()
    site.engine.gate = asyncio.Event()
    old = asyncio.create_task(site.http.post("/v1/completions", json=ASK))
    await until(lambda: site.engine.running == 1)
    await site.http.post("/reload")
    await site.serving.close()
    assert site.engine.closed and after.engine.closed
    assert (await old).status_code in (200, 503)


async def test_a_reload_in_progress_ends_with_the_server(site: Site) -> None:
    after = Next(site)
    cancelled: list[bool] = []

    async def start() -> ServedModel:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)
        return after.model

    after.found = start
    task: asyncio.Task[Awaitable[str]] = asyncio.create_task(site.serving.reloads.reload())  # type: ignore[arg-type]
    await until(lambda: bool(after.beside))
    await site.serving.close()
    assert cancelled == [True] and site.engine.closed
    with pytest.raises(asyncio.CancelledError):
        await task
