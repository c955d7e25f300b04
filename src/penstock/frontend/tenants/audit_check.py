"""Checks an audit log: its chain, its signed heads and its agreement with the ledger."""

import hashlib
import hmac
import json
import sqlite3
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.frontend.tenants.audit import FIRST, line_of, signature

MOST_LINE = 4 << 20  # bytes


class AuditReport(msgspec.Struct):
    """What an audit log has, and what is wrong with it."""

    records: int = 0
    signed: int = 0  # the number of the last record that a signed head covers
    lost: int = 0  # records that could not be written, by the log's own count
    wrong: str = ""  # the first thing that is wrong; "": nothing is
    requests: dict[str, int] = {}  # rows that the ledger should have, by tenant


class _Wrong(Exception):
    """The first thing that is wrong."""


def check_audit(log: Path, heads: Path | None, key: bytes) -> AuditReport:
    """Return what an audit log has. Without `heads`, a cut tail is not found. Raises OSError."""
    report = AuditReport()
    try:
        signed = {} if heads is None else _signed(heads, key)
        _check_log(log, signed, report)
    except _Wrong as wrong:
        report.wrong = str(wrong)
    return report


def compare_with_ledger(report: AuditReport, connection: sqlite3.Connection) -> str:
    """Return how the ledger's numbers of requests differ from those of the log; "" if they agree."""
    found = dict(connection.execute("SELECT tenant, COUNT(*) FROM requests WHERE wire != 'batch' GROUP BY tenant"))
    for tenant in sorted({*found, *report.requests}):
        have, due = found.get(tenant, 0), report.requests.get(tenant, 0)
        if have != due:
            return f"the log has {due} requests of tenant {tenant!r}, and the ledger {have}"
    return ""


def _check_log(log: Path, signed: Mapping[int, tuple[str, str]], report: AuditReport) -> None:
    digest, requests = FIRST, Counter[str]()
    with log.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MOST_LINE), b""), 1):
            where = f"{log}, line {number}"
            record = _record(where, line, number, digest)
            digest = hashlib.sha256(line).hexdigest()
            if number in signed:
                if signed[number][0] != digest:
                    raise _Wrong(f"{where}: its hash is not that of the signed head in {signed[number][1]}")
                report.signed = number
            report.records = number
            if record.get("ledger"):
                requests[str(record.get("tenant"))] += 1
            if record.get("event") == "records_lost":
                report.lost = int(record.get("count", 0))
    report.requests = dict(requests)
    if (last := max(signed, default=0)) > report.records:
        covered = f"a signed head covers record {last}"
        raise _Wrong(f"{log} ends with record {report.records}, but {covered}: its tail was cut")


def _record(where: str, line: bytes, number: int, before: str) -> dict[str, Any]:
    """Returns a line's record, if it is the `number`-th and follows a line with the hash `before`."""
    if not line.endswith(b"\n"):
        raise _Wrong(f"{where}: the line is not complete")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise _Wrong(f"{where}: it is not JSON") from None
    if not isinstance(record, dict) or line_of(record) != line:
        raise _Wrong(f"{where}: it is not in the form in which the server writes records")
    if record.get("n") != number:
        raise _Wrong(f"{where}: it has the number {record.get('n')}, and {number} is due")
    if record.get("prev") != before:
        raise _Wrong(f"{where}: it has not the hash of the line before it: that was changed, removed or moved")
    return record


def _signed(path: Path, key: bytes) -> dict[int, tuple[str, str]]:
    """Returns the hash of each record that has a head, and where that head is."""
    found = dict[int, tuple[str, str]]()
    last = 0
    with path.open("rb") as lines:
        for place, line in enumerate(iter(lambda: lines.readline(MOST_LINE), b""), 1):
            where = f"{path}, line {place}"
            try:
                head = json.loads(line)
                number, digest, at, given = int(head["n"]), str(head["hash"]), float(head["ts"]), str(head["signature"])
            except (ValueError, LookupError, TypeError, RecursionError):
                raise _Wrong(f"{where}: it is no head") from None
            if not hmac.compare_digest(signature(key, number, digest, at), given):
                raise _Wrong(f"{where}: its signature is not that of this key")
            if number < last or line_of(head) != line:
                raise _Wrong(f"{where}: it is not in the order or form in which the server writes heads")
            if found.setdefault(number, (digest, where))[0] != digest:
                raise _Wrong(f"{where}: it differs from the head of the same record before it")
            last = number
    return found
