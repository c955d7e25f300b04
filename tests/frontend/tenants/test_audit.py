"""The audit log: what it has, and that every change of it is found."""

import hashlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.frontend.tenants import audit
from penstock.frontend.tenants.audit import AuditLog, line_of, signature
from penstock.frontend.tenants.audit_check import check_audit, compare_with_ledger
from penstock.frontend.tenants.ledger import open_ledger
from tests.frontend.tenants.conftest import TenantSite
from tests.patience import wait_for

Sites = Callable[..., TenantSite]
KEY = b"a secret of the operator"


def written(folder: Path, count: int = 60, heads_each: int = 10) -> tuple[Path, Path]:
    """A log with heads."""
    log, heads = folder / "audit.jsonl", folder / "heads.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit, "HEAD_RECORDS", heads_each)
        made = AuditLog(log, heads, KEY, required=False)
        for number in range(count):
            made.add("request", number=number, tenant="a", ledger=True)
        made.close()
    return log, heads


def test_an_intact_log_is_intact_and_is_continued(tmp_path: Path) -> None:
    log, heads = written(tmp_path)
    report = check_audit(log, heads, KEY)
    assert (report.wrong, report.records, report.signed) == ("", 60, 60)
    assert len(heads.read_bytes().splitlines()) >= 6
    written(tmp_path, 7)
    report = check_audit(log, heads, KEY)
    assert (report.wrong, report.records, report.signed) == ("", 67, 67)


@pytest.mark.parametrize("seed", range(100))
def test_tampering_is_found(tmp_path: Path, seed: int) -> None:
    """A changed byte, a line that is changed with its chain, removed, doubled, moved, or invented, a cut tail, a forged
    head."""
    log, heads = written(tmp_path)
    source = random.Random(seed)
    lines = log.read_bytes().splitlines(keepends=True)
    at = source.randrange(len(lines))
    match seed % 8:
        case 0:
            data = bytearray(log.read_bytes())
            place = source.randrange(len(data))
            data[place] = (data[place] + 1 + source.randrange(255)) % 256
            log.write_bytes(data)
        case 1:
            log.write_bytes(b"".join(lines[:at] + lines[at + 1 :]))
        case 2:
            log.write_bytes(b"".join([*lines[: at + 1], *lines[at:]]))
        case 3:
            other = (at + 1 + source.randrange(len(lines) - 1)) % len(lines)
            lines[at], lines[other] = lines[other], lines[at]
            log.write_bytes(b"".join(lines))
        case 4:  # all that follows is computed again, as one who knows the format would
            log.write_bytes(b"".join(_chained(lines, at)))
        case 5:
            log.write_bytes(b"".join(lines[:at]))
        case 6:
            log.write_bytes(log.read_bytes()[: -source.randrange(1, len(lines[-1]))])
        case 7:
            changed = _chained(lines, at)
            log.write_bytes(b"".join(changed))
            digest = hashlib.sha256(changed[-1]).hexdigest()
            head = {"n": 60, "hash": digest, "ts": round(time.time(), 3)}
            head["signature"] = signature(b"a guess", 60, digest, head["ts"])  # type: ignore[arg-type]
            heads.write_bytes(line_of(head))
    report = check_audit(log, heads, KEY)
    assert report.wrong, f"{['byte', 'gone', 'twice', 'moved', 'rewritten', 'tail', 'torn', 'head'][seed % 8]} at {at}"


def _chained(lines: list[bytes], at: int) -> list[bytes]:
    """The lines with another tenant in one of them, and with all hashes after it right."""
    found, digest = lines[:at], hashlib.sha256(lines[at - 1]).hexdigest() if at else audit.FIRST
    for line in lines[at:]:
        record = json.loads(line) | {"prev": digest}
        if len(found) == at:
            record["tenant"] = "somebody else"
        found.append(line_of(record))
        digest = hashlib.sha256(found[-1]).hexdigest()
    return found


_FULL = """
import resource, sys, time
from pathlib import Path
from penstock.frontend.tenants.audit import AuditLog
log = AuditLog(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].encode(), required=True)
added = 0
def until(refuses):
    global added
    while log.refuses != refuses:
        log.add("request", number=added)
        added += 1
        time.sleep(0.001)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))  # a write beyond fails, as on a full disk
until(True)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
until(False)
log.close()
print(added, log.lost)
"""


def test_a_disk_that_fills_loses_records_and_says_so(tmp_path: Path) -> None:
    """The kernel cuts a write off in the middle. What is in the log stays whole, and says how many are missing."""
    log, heads = tmp_path / "audit.jsonl", tmp_path / "heads.jsonl"
    command = [sys.executable, "-c", _FULL, str(log), str(heads), KEY.decode()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    added, lost = map(int, ended.stdout.split())
    assert "records are missing in the audit log" in ended.stderr
    report = check_audit(log, heads, KEY)
    assert (report.wrong, report.lost, report.records) == ("", lost, added - lost + 1)
    events = [json.loads(line)["event"] for line in log.read_bytes().splitlines()]
    assert events.count("records_lost") == 1 and lost > 0


async def test_the_log_has_who_was_let_in_and_why_others_were_not(tenant_site: Sites, tmp_path: Path) -> None:
    heads, secret = tmp_path / "heads.jsonl", tmp_path / "secret"
    secret.write_bytes(KEY)
    config = {"audit": "on", "audit_heads": str(heads), "audit_key_file": str(secret)}
    site = tenant_site(
        {
            "a": {"limits": {"requests_per_minute": 1}},
            "b": {"audit_text": True},
            "c": {"keys": {"root": {"admin": True}}},
        },
        config=config,
    )
    sent = [("a/default", 200), ("a/default", 429), ("b/default", 200), ("wrong", 401)]
    for key, status in sent:
        assert (await site.ask(key)).status_code == status
        wait_for(heads.exists, "a head of the first record")
    await site.http.get("/is_sleeping", headers=site.headers("c/root"))
    await site.close()
    log = site.folder / "state" / "audit.jsonl"
    records = [json.loads(line) for line in log.read_bytes().splitlines()]
    assert [(each["event"], each["tenant"], each["status"], each["why"]) for each in records] == [
        ("request", "a", 200, ""),
        ("request", "a", 429, "rate_limit_exceeded"),
        ("request", "b", 200, ""),
        ("request", "", 401, "invalid_api_key"),
        ("admin", "c", 200, ""),
    ]
    assert "request" not in records[0] and len(records[0]["request_sha256"]) == 64
    assert json.loads(records[2]["request"])["prompt"] == "hello"
    assert hashlib.sha256(records[2]["answer"].encode()).hexdigest() == records[2]["answer_sha256"]
    text = log.read_text()
    assert not [key for key in site.keys.values() if key in text or key.split("-", 2)[2] in text]
    report = check_audit(log, heads, KEY)
    assert report.requests == {"a": 2, "b": 1} and report.signed == 5
    connection = open_ledger(site.folder / "state" / "ledger.sqlite3")
    assert compare_with_ledger(report, connection) == ""
    with connection:
        connection.execute("DELETE FROM requests WHERE tenant = 'b'")
    assert compare_with_ledger(report, connection) == "the log has 1 requests of tenant 'b', and the ledger 0"
    connection.close()


async def test_a_required_log_that_cannot_be_written_refuses_requests(
    tenant_site: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tenant_site({"a": {}}, config={"audit": "required"})
    assert (await site.ask("a/default")).status_code == 200
    log = site.folder / "state" / "audit.jsonl"
    wait_for(lambda: log.exists() and log.stat().st_size > 0)

    def fails(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(audit, "_append", fails)
        assert (await site.ask("a/default")).status_code == 200
        assert site.site.app.office is not None
        wait_for(lambda: site.site.app.office.books.refuses)  # type: ignore[union-attr]
        answer = await site.ask("a/default")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "audit_unavailable")


def test_five_thousand_records_a_second(tmp_path: Path) -> None:
    made = AuditLog(tmp_path / "audit.jsonl", tmp_path / "heads.jsonl", KEY, required=False)
    began = time.process_time()
    for number in range(20_000):
        made.add("request", request_id=f"{number:032x}", tenant="a", status=200, why="", client="127.0.0.1")
    made.close()
    assert made.lost == 0
    assert time.process_time() - began < 4 * 3, "with room for a busy machine"
