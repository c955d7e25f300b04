"""The ledger: what a row has, that rows survive a kill, and that quotas begin with what it says."""

import asyncio
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from penstock.frontend.tenants import request_log
from penstock.frontend.tenants.ledger import FIELDS, FILE, Ledger, LedgerRow, open_ledger, quota_counters, summary
from penstock.frontend.tenants.quotas import Quotas, counter_key, window
from penstock.messages import ComputeUsage, RequestTiming, TokenDelta
from tests.frontend.tenants.conftest import ASK, TenantSite
from tests.frontend.test_batches import begin, ended, line
from tests.patience import PATIENCE

Sites = Callable[..., TenantSite]
PRICES = [{"since": "2026-01-01", "input": 2.0, "output": 6.0, "cached": 1.0}]


def rows(site: TenantSite) -> list[dict[str, Any]]:
    connection = sqlite3.connect(site.folder / "state" / FILE)
    found = connection.execute(f"SELECT {', '.join(FIELDS)} FROM requests ORDER BY began").fetchall()
    connection.close()
    return [dict(zip(FIELDS, row, strict=True)) for row in found]


async def test_a_row_has_what_the_request_used(tenant_site: Sites) -> None:
    site = tenant_site({"a": {"keys": {"ci": {}}}}, prices=PRICES, currency="EUR", show_cost=True)
    site.site.engine.cached_tokens = 1
    answer = await site.ask("a/ci", n=2)
    usage = answer.json()["usage"]
    await site.close()
    (row,) = rows(site)
    assert (row["tenant"], row["key"], row["wire"], row["model"]) == ("a", "ci", "openai", "tiny")
    assert (row["route"], row["status"], row["request_id"]) == ("/v1/completions", 200, answer.headers["x-request-id"])
    assert (row["prompt"], row["output"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert row["cached"] == 1
    cost = (row["prompt"] - 1) * 2.0 + 1 * 1.0 + row["output"] * 6.0
    assert (row["nano"], row["currency"]) == (round(cost * 1000), "EUR")
    assert usage["cost"] == pytest.approx(cost / 1e6)
    assert 0 < row["ttft_ms"] <= row["total_ms"]
    assert answer.json()["id"].endswith(row["id"])


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 16}], ids=["whole", "streamed", "large"])
async def test_a_row_goes_before_the_end_of_its_answer(
    tenant_site: Sites, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """So nothing that was answered is in no ledger, whenever the process is killed."""
    monkeypatch.setattr("penstock.frontend.http.response.SMALL_ANSWER", 1000)
    site, order = tenant_site({"a": {}}), list[str]()
    app = site.site.app
    assert app.office is not None
    finish = app.office.books.finish
    monkeypatch.setattr(app.office.books, "finish", lambda *row: (order.append("row"), finish(*row)))

    async def noted(scope: Any, receive: Any, send: Any) -> None:
        async def sends(message: Any) -> None:
            if message["type"] == "http.response.body":
                order.append("part" if message.get("more_body", False) else "end")
            await send(message)

        await app(scope, receive, sends)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(noted), base_url="http://localhost") as http:
        body = {**ASK, **fields}
        assert (await http.post("/v1/completions", json=body, headers=site.headers("a/default"))).status_code == 200
    assert order.count("row") == 1 and order[-1] == "end"
    assert order.index("row") == (len(order) - 2 if "stream" in fields else 0)
    assert ("part" in order) is bool(fields)


async def test_batches_are_accounted_to_their_owner(tenant_site: Sites) -> None:
    site = tenant_site({"a": {}, "b": {}})
    site.site.says("hello")
    background = site.site.app.background
    assert background is not None
    running = asyncio.create_task(background.run())
    site.http.headers.update(site.headers("b/default"))
    batch = await ended(site.http, (await begin(site.http, line("x") + line("y")))["id"])
    running.cancel()
    assert batch["request_counts"]["completed"] == 2
    assert {made.share.rank for made in site.site.engine.requests if made.share} == {1}
    await site.close()
    assert [(row["tenant"], row["wire"], row["status"]) for row in rows(site)] == [("b", "batch", 200)] * 2


async def test_the_dashboard_reads_what_tenants_have_used(tenant_site: Sites, make_site: Callable[..., Any]) -> None:
    """A tenant sees its own hours, and an operator those of all."""
    site = tenant_site({"a": {}, "b": {}, "ops": {"keys": {"root": {"admin": True}}}}, prices=PRICES)
    for key in ("a/default", "a/default", "b/default"):
        assert (await site.ask(key)).status_code == 200
    await asyncio.sleep(0.3)
    async with asyncio.timeout(PATIENCE):
        while len(rows(site)) < 3:
            await asyncio.sleep(0.02)
    shown = {}
    for key in ("a/default", "b/default", "ops/root"):
        answer = await site.http.get("/tenant_usage", headers=site.headers(key))
        assert answer.status_code == 200, answer.text
        shown[key] = {row["tenant"]: row["requests"] for row in answer.json()["rows"]}
    assert shown == {"a/default": {"a": 2}, "b/default": {"b": 1}, "ops/root": {"a": 2, "b": 1}}
    assert answer.json()["rows"][0]["nano"] > 0 and answer.json()["currency"] == "USD"
    assert (await make_site().http.get("/tenant_usage")).status_code == 404


async def test_vectors_and_refused_requests_have_rows_too(tenant_site: Sites) -> None:
    site = tenant_site({"a": {"limits": {"requests_per_minute": 1}}})
    assert [(await site.ask("a/default")).status_code for _ in range(2)] == [200, 429]
    await site.close()
    assert [(row["status"], row["error"], row["output"] > 0) for row in rows(site)] == [
        (200, "", True),
        (429, "rate_limit_exceeded", False),
    ]


async def test_the_request_log_has_the_rows_of_the_ledger_and_is_rotated(
    tenant_site: Sites, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(request_log, "BYTES", 1000)
    site = tenant_site({"a": {}}, config={"request_log": str(tmp_path / "requests.log")})
    for _ in range(5):
        assert (await site.ask("a/default")).status_code == 200
    await site.close()
    files = sorted(tmp_path.glob("requests.log*"))
    assert len(files) > 1 and all(file.stat().st_size <= 1000 for file in files)
    shown = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert sorted(shown, key=lambda each: each["began"]) == rows(site)


def test_a_request_log_has_a_share_and_every_error(tmp_path: Path) -> None:
    log = request_log.RequestLog(tmp_path / "requests.log", 0.25)
    for number in range(2000):
        log.add(row(number))
    for number in range(2000, 2010):
        log.add(row(number, status=499 if number % 2 else 200, error="" if number % 2 else "failed_later"))
    log.close()
    shown = [json.loads(line)["id"] for line in (tmp_path / "requests.log").read_text().splitlines()]
    assert shown[-10:] == [f"{number:08}" for number in range(2000, 2010)]
    assert 400 <= len(shown) - 10 <= 600  # 500 drawn of 2000; five standard deviations


def test_a_request_log_on_a_full_disk_says_what_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    log = request_log.RequestLog(Path("/dev/full"))
    log.add(row(1))
    log.close()
    assert "1 records are missing in the request log /dev/full: [Errno 28] No space left on device" in caplog.text


async def test_the_engine_says_what_an_aborted_request_has_used(tenant_site: Sites) -> None:
    """Its client goes after the first token. The engine's last delta comes when the stream is closed already."""
    site = tenant_site({"a": {"limits": {"tokens_per_day": 1000}}})
    engine, office = site.site.engine, site.site.app.office
    watched: list[Callable[[TokenDelta], object]] = []
    engine.watch_ends = watched.append  # type: ignore[attr-defined]
    await site.ask("a/default")
    holder = site.site.app.keys.holder(site.keys["a/default"].encode())
    assert office is not None and holder is not None and holder.grant is not None
    account = office.open(holder.grant, "openai", "gone", [])
    request = replace(engine.requests[-1], request_id="gone-0")
    deltas = account.on(site.site.serving.model).client.generate(request)
    await anext(deltas)
    await deltas.aclose()  # type: ignore[attr-defined]
    account.close(status=499)
    assert office.watches(account)
    usage = ComputeUsage(9, 2, 1, 0.5, 3.0)
    watched[0](TokenDelta("gone-0", 0, 3, (), "abort", timing=RequestTiming(0.25, usage=usage)))
    assert not office.watches(account)
    await site.close()
    row = rows(site)[-1]
    assert (row["computed"], row["repeated"], row["rejected"], row["step_ms"], row["block_seconds"]) == (
        9,
        2,
        1,
        500,
        3,
    )
    assert (row["status"], row["output"], row["queue_ms"]) == (499, 3, 250)


def row(number: int, **fields: Any) -> LedgerRow:
    return LedgerRow(
        id=f"{number:08}", began=time.time(), tenant="t", key="k", model="m", version="v", wire="openai", **fields
    )


_WRITER = """
import sys, time
from pathlib import Path
from penstock.frontend.tenants import ledger
ledger._BATCH_SECONDS = 0.01
book = ledger.Ledger(Path(sys.argv[1]), 400)
for number in range(int(sys.argv[2]), 10_000_000):
    book.add(ledger.LedgerRow(id=f"{number:08}", began=time.time(), tenant="t", key="k", model="m", version="v",
                              wire="openai", prompt=3, output=4, nano=5))
    if number % 50 == 0:
        print(number, flush=True)
        time.sleep(0.002)
"""


def test_rows_survive_kills_at_random_times_once_each(tmp_path: Path) -> None:
    """What was committed stays, in order and without a gap: no row is there twice, none before the last is missing."""
    path, source, first = tmp_path / FILE, random.Random(7), 0
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path), str(first)], stdout=subprocess.PIPE, env={**os.environ}
        )
        assert process.stdout is not None
        while not path.exists() or not _count(path, first):
            time.sleep(0.01)
        time.sleep(source.random() * 0.4)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        connection = open_ledger(path)
        numbers = [int(found) for (found,) in connection.execute("SELECT id FROM requests ORDER BY id")]
        connection.close()
        assert numbers == list(range(len(numbers)))
        first = len(numbers)
    assert first > 100


def _count(path: Path, first: int) -> bool:
    try:
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)
        (count,) = connection.execute("SELECT COUNT(*) FROM requests").fetchone()
        connection.close()
    except sqlite3.Error:
        return False
    return int(count) > first


def test_a_row_is_written_once_however_often_it_is_added(tmp_path: Path) -> None:
    book = Ledger(tmp_path / FILE, 400)
    for number in (1, 2, 1, 1):
        book.add(row(number, prompt=number))
    book.close()
    connection = open_ledger(tmp_path / FILE)
    ((requests, prompt, *_),) = [each[1:] for each in summary(connection, ["tenant"], 0, 1e12)]
    assert (requests, prompt) == (2, 3)


def test_old_rows_expire(tmp_path: Path) -> None:
    for began in (time.time() - 90 * 86_400, time.time()):
        book = Ledger(tmp_path / FILE, 60)
        book.add(LedgerRow(id=str(began), began=began, tenant="t", key="", model="m", version="", wire="x"))
        book.close()
    assert open_ledger(tmp_path / FILE).execute("SELECT COUNT(*) FROM requests").fetchone() == (1,)


def test_quotas_begin_with_the_sums_of_this_day_and_month(tmp_path: Path) -> None:
    now = 1_800_000_000.0
    month_start = now - 9 * 86_400
    book = Ledger(tmp_path / FILE, 36_500)
    for number, (began, tokens) in enumerate([(now, 10), (now - 2 * 86_400, 20), (month_start - 40 * 86_400, 40)]):
        book.add(
            LedgerRow(
                id=str(number),
                began=began,
                tenant="t",
                key="",
                model="",
                version="",
                wire="",
                prompt=tokens,
                nano=tokens,
            )
        )
    book.close()
    quotas = Quotas()
    quotas.load(quota_counters(open_ledger(tmp_path / FILE), now), now)
    month, day = window("month", now)[0], window("day", now)[0]
    assert quotas.used.get(counter_key("t", "tokens", "day", day), 0) == 10
    assert quotas.used.get(counter_key("t", "tokens", "month", month), 0) == 30
    assert quotas.used.get(counter_key("t", "money", "month", month), 0) == 30


async def test_a_budget_stays_spent_when_the_server_starts_again(tenant_site: Sites) -> None:
    tenants = {"a": {"limits": {"tokens_per_month": 12}}}
    site = tenant_site(tenants)
    assert (await site.ask("a/default")).status_code == 200
    assert (await site.ask("a/default", max_tokens=8)).status_code == 429
    await site.close()
    again = tenant_site(tenants)
    assert (await again.ask("a/default", max_tokens=8)).status_code == 429
