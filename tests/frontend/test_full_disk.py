"""A batch over a scripted engine, on a disk of its own that is really full."""

import asyncio
import os
import re
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.frontend import RequestLimits
from penstock.frontend.errors import APIError
from penstock.frontend.storage import files
from penstock.frontend.storage.content import remove
from penstock.frontend.storage.database import Database, lock_folder
from tests.frontend.conftest import Site, live
from tests.frontend.test_batches import CHAT, answers, begin, client_of, ended, line, upload

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of as many bytes as the parameter says."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(tmp_path)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mount is not permitted: {error}")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def room(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def occupy(disk: Path, left: int) -> None:
    """Another program's file."""
    with open(disk / "other", "ab") as other:
        os.posix_fallocate(other.fileno(), other.tell(), room(disk) - left)


@pytest.mark.parametrize("disk", [2 * MIB, 24 * MIB], indirect=True)
async def test_a_full_disk_fails_the_batch_and_nothing_else(make_site: Callable[..., Site], disk: Path) -> None:
    site = make_site(state_dir=str(disk / "state"))
    site.says("hello")
    async with live(site) as port, client_of(port) as client:
        small = (await upload(client, b"x" * 100)).json()
        if room(disk) > MIB:
            occupy(disk, MIB)
        made = await begin(client, b"".join(line(f"id-{i}") for i in range(1000)))
        async with asyncio.timeout(60):
            chat, batch = await asyncio.gather(
                client.post(CHAT, json={"messages": [{"role": "user", "content": "hello"}]}), ended(client, made["id"])
            )
        assert chat.status_code == 200
        assert batch["status"] == "failed" and batch["errors"]["data"][0]["code"] == "storage_full"
        stored = await answers(client, batch["output_file_id"])
        assert 0 < len(stored) < 1000
        while (refused := await upload(client, b"x" * 100_000)).status_code == 200:
            pass
        error = refused.json()["error"]
        assert refused.status_code == 507 and error["code"] == "storage_full"
        assert "its disk has" in error["message"] and str(RequestLimits().max_stored_bytes) not in error["message"]
        scraped = (await client.get("/metrics")).text
        assert int(re.findall(r'errors_total{reason="full"} (\d+)', scraped)[0]) >= 2
        assert float(re.findall(r"^penstock_storage_free_bytes (\S+)", scraped, re.MULTILINE)[0]) < MIB
        for file_id in (small["id"], made["input_file_id"]):
            deleted = await client.delete(f"/v1/files/{file_id}")
            assert deleted.status_code == 200, deleted.text
        assert await answers(client, batch["output_file_id"]) == stored
        made = await begin(client, line("a") + line("b"))
        batch = await ended(client, made["id"])
        assert batch["status"] == "completed" and batch["request_counts"]["completed"] == 2


def store(number: int) -> Callable[[sqlite3.Connection], None]:
    def work(db: sqlite3.Connection) -> None:
        files.append(db, "a", number, bytes(50_000))

    return work


@pytest.mark.parametrize("disk", [24 * MIB], indirect=True)
async def test_processes_share_the_spare(disk: Path) -> None:
    lock = lock_folder(disk)
    first, second = (Database(disk, 1 << 30, os.dup(lock)) for _ in range(2))
    for number in range(40):
        await (first, second)[number % 2].run(store(number))
    occupy(disk, MIB)
    with pytest.raises(APIError, match="storage is full"):
        await asyncio.gather(*((first, second)[number % 2].run(store(number)) for number in range(40, 400)))
    await asyncio.gather(first.run(lambda db: None), second.run(lambda db: None))  # the others have ended, too
    await asyncio.gather(*(part.run(store(1000 + i), reserve=True) for i, part in enumerate((first, second))))
    assert (disk / "penstock.sqlite3-spare").stat().st_size > 6 * MIB
    await asyncio.gather(remove(first, "a"), remove(second, "a"))
    assert room(disk) > MIB and (disk / "penstock.sqlite3-spare").stat().st_size == 8 * MIB
    await first.run(store(1))
    await first.close()
    occupy(disk, 0)
    await second.run(store(2), reserve=True)  # the first one's end has left the log in place
    await second.close()
    os.close(lock)


@pytest.mark.parametrize("disk", [24 * MIB], indirect=True)
async def test_a_server_starts_on_a_full_disk(disk: Path) -> None:
    storage = Database(disk, 1 << 30)
    await storage.run(store(0))
    await storage.close()
    occupy(disk, 0)
    storage = Database(disk, 1 << 30)
    assert await storage.run(lambda db: files.count(db, "a")) == 1
    await remove(storage, "a")
    assert await storage.run(lambda db: files.count(db, "a")) == 0
    await storage.close()
