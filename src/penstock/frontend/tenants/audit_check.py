"""Checks an audit log: its chain, its signed heads and its agreement with the ledger."""

import hashlib
import hmac
import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from penstock.frontend.tenants.audit import FIRST, line_of, signature

MOST_LINE = 4 << 20  # bytes


class AuditReport(msgspec.Struct):
    """What an audit log has, and what is wrong with it."""

    records: int = 0
    signed: int = 0  # the number of the last record that a signed head covers
    heads: int = 0
    lost: int = 0  # records that could not be written, by the log's own count
    wrong: str = ""  # the first thing that is wrong; "": nothing is
    requests: dict[str, int] = {}  # rows that the ledger should have, by tenant


def check_audit(log: Path, heads: Path | None, key: bytes) -> AuditReport:
    """Return what an audit log has. Without `heads`, a cut tail is not found. Raises OSError."""
    report = AuditReport()
    signed = dict[int, tuple[str, int]]()  # hash and line of the head by the number of its record
    if heads is not None:
        for place, head in _heads(heads, key):
            if isinstance(head, str):
                report.wrong = f"{heads}, line {place}: {head}"
                return report
            number, digest = head
            if number in signed and signed[number][0] != digest:
                report.wrong = f"{heads}, line {place}: it differs from the head of the same record before it"
                return report
            signed[number] = digest, place
    report.heads = len(signed)
    digest, requests = FIRST, Counter[str]()
    with log.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MOST_LINE), b""), 1):
            record, wrong = _record(line, number, digest)
            digest = hashlib.sha256(line).hexdigest()
            if not wrong and number in signed and signed[number][0] != digest:
                wrong = f"its hash is not that of the signed head in line {signed[number][1]} of {heads}"
            if wrong:
                report.wrong = f"{log}, line {number}: {wrong}"
                return report
            report.records = number
            report.signed = number if number in signed else report.signed
            if record.get("ledger"):
                requests[str(record.get("tenant"))] += 1
            if record.get("event") == "records_lost":
                report.lost = int(record.get("count", 0))
    report.requests = dict(requests)
    if missing := max((number for number in signed if number > report.records), default=0):
        covered = f"a signed head covers record {missing}"
        report.wrong = f"{log} ends with record {report.records}, but {covered}: its tail was cut"
    return report


def compare_with_ledger(report: AuditReport, connection: sqlite3.Connection) -> str:
    """Return how the ledger's numbers of requests differ from those of the log; "" if they agree."""
    found = dict(connection.execute("SELECT tenant, COUNT(*) FROM requests WHERE wire != 'batch' GROUP BY tenant"))
    for tenant in sorted({*found, *report.requests}):
        have, due = found.get(tenant, 0), report.requests.get(tenant, 0)
        if have != due:
            return f"the log has {due} requests of tenant {tenant!r}, and the ledger {have}"
    return ""


def _record(line: bytes, number: int, before: str) -> tuple[dict[str, Any], str]:
    """Returns a line's record, and what is wrong with it."""
    if not line.endswith(b"\n"):
        return {}, "the line is not complete"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}, "it is not JSON"
    if not isinstance(record, dict) or line_of(record) != line:
        return {}, "it is not in the form in which the server writes records"
    if record.get("n") != number:
        return {}, f"it has the number {record.get('n')}, and {number} is due"
    if record.get("prev") != before:
        return {}, "it does not have the hash of the line before it: that line was changed, removed or moved"
    return record, ""


def _heads(path: Path, key: bytes) -> Iterator[tuple[int, tuple[int, str] | str]]:
    """Yields each line of the heads with the record's number and hash, or with what is wrong."""
    last = 0
    with path.open("rb") as lines:
        for place, line in enumerate(iter(lambda: lines.readline(MOST_LINE), b""), 1):
            try:
                head = json.loads(line)
                number, digest, at, given = int(head["n"]), str(head["hash"]), float(head["ts"]), str(head["signature"])
            except (ValueError, LookupError, TypeError, RecursionError):
                yield place, "it is no head"
                return
            if not hmac.compare_digest(signature(key, number, digest, at), given):
                yield place, "its signature is not that of this key"
                return
            if number < last or line_of(head) != line:
                yield place, "it is not in the order or form in which the server writes heads"
                return
            last = number
            yield place, (number, digest)
