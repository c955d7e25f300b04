"""`penstock serve --tenants` with two API processes: limits hold for both together, and one ledger has all requests."""

import asyncio
import contextlib
import hashlib
import os
import random
import signal
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock.config.tenants.entries import KeyEntry
from penstock.config.tenants.file import add_key
from penstock.config.tenants.keys import new_key
from penstock.frontend.tenants.audit_check import check_audit, compare_with_ledger
from tests.e2e.processes.test_api_processes import api_pids, children
from tests.e2e.server import Server, gauge, serving
from tests.patience import PATIENCE, wait_for

FLAGS = ("--api-processes", "2", "--max-num-seqs", "16", "--kv-cache-memory", "64MiB", "--max-model-len", "512")
FILE = """
tenants:
  limited:
    limits: {tokens_per_month: 300}
  free: {}
  other: {}
prices:
  - {since: 2026-01-01, input: 1, output: 2}
"""
BODY = {"prompt": "import os\n", "max_tokens": 8, "ignore_eos": True}


class Place:
    """A server, its files and the keys of its tenants."""

    def __init__(self, folder: Path, text: str = FILE, tenants: tuple[str, ...] = ("limited", "free", "other")) -> None:
        self.folder, self.file = folder, folder / "tenants.yaml"
        self.file.write_text(text)
        self.keys = {name: self.add(name) for name in tenants}
        self.server: Server

    def add(self, tenant: str, **fields: bool) -> str:
        key, key_id, stored = new_key()
        add_key(self.file, tenant, KeyEntry(name="k", id=key_id, hash=stored, **fields))
        return key

    def rows(self, tenant: str) -> list[tuple[int, int, int]]:
        """(status, tokens, billionths) of each request in the ledger."""
        connection = sqlite3.connect(f"file:{self.folder / 'state' / 'ledger.sqlite3'}?mode=ro", uri=True, timeout=30)
        found = connection.execute("SELECT status, prompt + output, nano FROM requests WHERE tenant = ?", (tenant,))
        rows = found.fetchall()
        connection.close()
        return rows


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("tenants"))
    flags = (*FLAGS, "--tenants", str(made.file), "--state-dir", str(made.folder / "state"), "--audit", "on")
    with serving(made.folder / "log", *flags) as made.server:
        yield made


async def send(place: Place, key: str, **fields: object) -> int:
    """The status of a request, over a connection of its own. 0: it broke."""
    async with httpx.AsyncClient(timeout=PATIENCE, verify=False) as client:
        try:
            headers = {"authorization": f"Bearer {key}"}
            answer = await client.post(place.server.url + "/v1/completions", json={**BODY, **fields}, headers=headers)
        except httpx.TransportError:
            return 0
        return answer.status_code


async def test_a_limit_holds_for_both_processes_together(place: Place) -> None:
    statuses = Counter(await asyncio.gather(*(send(place, place.keys["limited"]) for _ in range(64))))
    while await send(place, place.keys["limited"]) == 200:
        statuses[200] += 1
    assert set(statuses) == {200, 429}
    wait_for(lambda: len([1 for row in place.rows("limited") if row[0] == 200]) >= statuses[200], "the rows")
    used = sum(tokens for _, tokens, _ in place.rows("limited"))
    assert used <= 300
    each = next(tokens for status, tokens, _ in place.rows("limited") if status == 200)
    assert used == statuses[200] * each and used + each > 300


async def test_a_new_key_is_valid_after_a_reload(place: Place) -> None:
    assert f"API keys are those of {place.file}" in place.server.log.read_text()
    admin, new = place.add("ops", admin=True), place.add("later")
    assert await send(place, new) == 401
    os.kill(place.server.process.pid, signal.SIGHUP)
    async with asyncio.timeout(PATIENCE):
        while await send(place, new) != 200:
            await asyncio.sleep(0.1)
        while await send(place, admin) != 200:
            await asyncio.sleep(0.1)
    third = place.add("third")
    reload = httpx.post(
        place.server.url + "/reload", headers={"authorization": f"Bearer {admin}"}, timeout=PATIENCE, verify=False
    )
    assert reload.status_code == 200, reload.text
    async with asyncio.timeout(PATIENCE):
        while await send(place, third) != 200:
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("answered", [1, 9, 17])
async def test_a_process_that_is_killed_loses_no_row_that_was_settled(place: Place, answered: int) -> None:
    """Its requests break while answers come; those that were answered are in the ledger, once. The row goes first: one
    request at most has a row, and its answer did not leave."""
    before = len(place.rows("free"))
    asked = [asyncio.create_task(send(place, place.keys["free"], max_tokens=40)) for _ in range(32)]
    async with asyncio.timeout(PATIENCE):
        while sum(task.done() for task in asked) < answered:
            await asyncio.sleep(0)
    os.kill(api_pids(place.server)[answered % 2], signal.SIGKILL)
    statuses = Counter(await asyncio.gather(*asked))
    wait_for(lambda: len(api_pids(place.server)) == 2, "the new process")
    wait_for(lambda: len(place.rows("free")) - before >= statuses[200], "the rows")
    assert len(place.rows("free")) - before - statuses[200] in (0, 1)


@pytest.mark.parametrize("secrets", [50, pytest.param(1000, marks=pytest.mark.rare)])
async def test_secrets_cross_neither_in_answers_nor_in_the_cache(place: Place, secrets: int) -> None:
    """Interleaved requests: two tenants send each of the secret prompts. An answer depends on its prompt alone, to the
    last bit of its log-probabilities, and no prompt is found in the cache because the other tenant has sent it."""
    body = {"max_tokens": 2, "ignore_eos": True, "temperature": 0, "logprobs": 1}
    prompts = [hashlib.sha256(b"%d of %d" % (number, secrets)).hexdigest() for number in range(secrets)]
    found: dict[tuple[str, int], tuple[list[float], int]] = {}
    work = [(tenant, number) for number in range(secrets) for tenant in ("free", "other")]
    random.Random(5).shuffle(work)

    async def client(http: httpx.AsyncClient) -> None:
        while work:
            tenant, number = work.pop()
            headers = {"authorization": f"Bearer {place.keys[tenant]}"}
            answer = await http.post("/v1/completions", json={**body, "prompt": prompts[number]}, headers=headers)
            content = answer.json()
            cached = content["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)
            found[tenant, number] = content["choices"][0]["logprobs"]["token_logprobs"], cached

    async with httpx.AsyncClient(base_url=place.server.url, timeout=PATIENCE, verify=False) as http:
        await asyncio.gather(*(client(http) for _ in range(48)))
        headers = {"authorization": f"Bearer {place.keys['free']}"}
        for _ in range(2):
            again = await http.post("/v1/completions", json={**body, "prompt": prompts[0]}, headers=headers)
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 16, "its own prompt is cached"
    answers = {tenant: [found[tenant, number][0] for number in range(secrets)] for tenant in ("free", "other")}
    assert answers["free"] == answers["other"]
    assert len(set(map(tuple, answers["free"]))) == secrets, "each prompt has an answer of its own"
    assert {cached for _, cached in found.values()} == {0}


async def test_the_audit_log_agrees_with_the_ledger_and_no_key_is_shown(place: Place) -> None:
    log = place.folder / "state" / "audit.jsonl"
    assert set(await asyncio.gather(*(send(place, place.keys["free"]) for _ in range(65)))) <= {200, 429}
    connection = sqlite3.connect(f"file:{place.folder / 'state' / 'ledger.sqlite3'}?mode=ro", uri=True, timeout=30)
    wait_for(lambda: compare_with_ledger(check_audit(log, None, b""), connection) == "", "all records")
    connection.close()
    report = check_audit(log, None, b"")
    assert report.wrong == "" and report.records > 64
    metrics = httpx.get(place.server.url + "/metrics", timeout=PATIENCE, verify=False)
    assert metrics.status_code == 200
    shown = log.read_text() + (place.folder / "log").read_text() + metrics.text
    server = place.server.process.pid
    for pid in (server, *children(server)):
        for what in ("cmdline", "environ"):
            shown += Path(f"/proc/{pid}/{what}").read_bytes().decode(errors="replace")
    for key in place.keys.values():
        assert key not in shown and key.split("-", 2)[2] not in shown


async def test_the_ledger_has_the_time_in_which_the_engine_was_busy(place: Place) -> None:
    """Also that of requests whose clients went before the end."""
    assert await send(place, place.keys["free"]) == 200

    def sums() -> tuple[float, float]:
        text = httpx.get(place.server.url + "/metrics", timeout=PATIENCE, verify=False).text
        connection = sqlite3.connect(f"file:{place.folder / 'state' / 'ledger.sqlite3'}?mode=ro", uri=True, timeout=30)
        ((milliseconds,),) = connection.execute("SELECT SUM(step_ms) FROM requests").fetchall()
        connection.close()
        return gauge(text, "penstock_engine_step_seconds_total"), (milliseconds or 0.0) / 1000

    async def leave(after: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(after):
                await send(place, place.keys["free"], max_tokens=400)

    async def settled() -> tuple[float, float]:
        """The sums, when they have not changed for a while."""
        found = [sums()]
        while len(found) < 2 or found[-1] != found[-2]:
            await asyncio.sleep(0.8)
            found.append(sums())
        return found[-1]

    before = await settled()
    await asyncio.gather(*(leave(0.2 + 0.05 * number) for number in range(12)), *(leave(60) for _ in range(8)))
    after = await settled()
    busy, accounted = after[0] - before[0], after[1] - before[1]
    assert busy > 0.2
    assert accounted == pytest.approx(busy, rel=0.01)
