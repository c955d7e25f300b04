"""How a batch stores its answers: together if they end together, and each before its place is given to another."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.frontend import RequestLimits
from penstock.frontend.errors import GenerationFailed
from penstock.frontend.jobs import job
from penstock.frontend.local import MOST_FAILURES
from penstock.frontend.storage import files
from penstock.messages import OUT_OF_MEMORY
from tests.frontend.conftest import Site, live
from tests.frontend.test_batches import answers, begin, client_of, ended, line
from tests.patience import until

Sites = Callable[..., Site]


def on_append(monkeypatch: pytest.MonkeyPatch, before: Callable[[list[files.Chunk]], object]) -> None:
    """Lets `before` be called with the answers of each transaction, in the thread of the storage."""
    append_all = files.append_all

    def append(connection: sqlite3.Connection, chunks: list[files.Chunk]) -> None:
        before(chunks)
        append_all(connection, chunks)

    monkeypatch.setattr(files, "append_all", append)


@pytest.mark.parametrize(("most", "together"), [(1 << 20, 16), (1, 1)])
async def test_answers_that_end_together_are_stored_together(
    make_site: Sites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, together: int
) -> None:
    stored: list[list[int]] = []
    on_append(monkeypatch, lambda chunks: stored.append([number for _, number, _ in chunks]))
    monkeypatch.setattr(job, "_GROUP_BYTES", most)
    site = make_site(state_dir=str(tmp_path))
    site.engine.gate = asyncio.Event()
    async with live(site) as port, client_of(port) as client:
        made = await begin(client, b"".join(line(f"id-{i}", max_tokens=2) for i in range(40)))
        await until(lambda: site.engine.running == 16)
        site.engine.gate.set()
        assert (await ended(client, made["id"]))["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    assert len(stored[0]) == together
    assert sorted(number for group in stored for number in group) == list(range(1, 41))


async def test_answers_that_are_not_stored_keep_their_places(
    make_site: Sites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    on_append(monkeypatch, lambda chunks: (begun.set(), go_on.wait(20)))
    site = make_site(state_dir=str(tmp_path))
    async with live(site) as port, client_of(port) as client:
        made = await begin(client, b"".join(line(f"id-{i}", max_tokens=2) for i in range(60)))
        await until(begun.is_set)
        await asyncio.sleep(0.2)
        assert (len(site.engine.requests), site.engine.running) == (16, 0)
        go_on.set()
        assert (await ended(client, made["id"]))["request_counts"]["completed"] == 60


async def test_a_batch_whose_answers_find_no_room_gives_back_its_places(make_site: Sites, tmp_path: Path) -> None:
    site = make_site(state_dir=str(tmp_path), limits=RequestLimits(max_stored_bytes=192 << 10))
    site.says("hello")
    async with live(site) as port, client_of(port) as client:
        full = await ended(client, (await begin(client, b"".join(line(f"id-{i}") for i in range(400))))["id"])
        assert full["status"] == "failed" and full["errors"]["data"][0]["code"] == "storage_full"
        kept = await answers(client, full["output_file_id"])
        assert 0 < len(kept) < 400 and full["request_counts"]["completed"] == len(kept)
        for file_id in (full["input_file_id"], full["output_file_id"]):
            assert (await client.delete(f"/v1/files/{file_id}")).status_code == 200
        site.engine.gate = asyncio.Event()
        made = await begin(client, b"".join(line(f"id-{i}") for i in range(20)))
        await until(lambda: site.engine.running == 16)  # all places
        site.engine.gate.set()
        assert (await ended(client, made["id"]))["request_counts"]["completed"] == 20


async def test_a_batch_that_expires_keeps_the_answers_of_requests_that_run(make_site: Sites, tmp_path: Path) -> None:
    site = make_site(state_dir=str(tmp_path))
    site.says("hello")
    site.engine.gate = asyncio.Event()
    async with live(site) as port, client_of(port) as client:
        made = await begin(client, b"".join(line(f"id-{i}") for i in range(50)))
        await until(lambda: site.engine.running == 16)
        site.app.background._jobs[made["id"]]._batch["expires_at"] = 1  # type: ignore[union-attr]
        site.engine.gate.set()
        batch = await ended(client, made["id"])
        assert batch["status"] == "expired" and batch["request_counts"]["completed"] == 16
        assert len(await answers(client, batch["output_file_id"])) == 16


async def test_a_line_that_always_fails_for_lack_of_memory_is_given_up(
    make_site: Sites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.frontend.local.RETRY_SECONDS", 0.01)
    site = make_site(state_dir=str(tmp_path))
    site.engine.refusal = GenerationFailed(f"{OUT_OF_MEMORY} beside the others: send it again later")
    async with live(site) as port, client_of(port) as client:
        batch = await ended(client, (await begin(client, line("a") + line("b")))["id"])
        assert batch["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
        assert await answers(client, batch["error_file_id"]) == {"a": 503, "b": 503}
    assert len(site.engine.requests) == 2 * MOST_FAILURES


async def test_a_line_with_a_hostile_grammar_fails_alone(make_site: Sites, tmp_path: Path) -> None:
    """It does not reach the engine, so a server that is started again does not meet it again."""
    site = make_site(state_dir=str(tmp_path))
    site.says("hello")
    hostile = line("a", guided_grammar='start: a\na: (a|b) (a|b) | "x"\nb: (a|b) (a|b) | "x"\n')
    async with live(site) as port, client_of(port) as client:
        batch = await ended(client, (await begin(client, line("0") + hostile + line("z")))["id"])
        assert await answers(client, batch["output_file_id"]) == {"0": 200, "z": 200}
        text = (await client.get(f"/v1/files/{batch['error_file_id']}/content")).text
        assert '"status_code":400' in text and "invalid_grammar" in text and "too complex" in text
    assert len(site.engine.requests) == 2
