"""The audit log: one JSON object a line, each with the SHA-256 of the line before it.

A head is the number and the hash of the newest line with an HMAC-SHA256, whose key the server reads at its start. Heads
go to a second file, which should be on another machine's disk: a chain alone cannot show that its tail was cut.
"""

import hashlib
import hmac
import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from penstock.frontend.tenants.writer import BackgroundWriter

FIRST = "0" * 64  # the hash before the first line
HEAD_RECORDS = 1000  # records after which a head is written
HEAD_SECONDS = 60.0  # after which one is written if there are new records
MOST_WAITING = 50_000  # records that are not written yet
_log = logging.getLogger("penstock.audit")


def line_of(record: Mapping[str, Any]) -> bytes:
    """Return a record's line: JSON with sorted keys, in ASCII."""
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def signature(key: bytes, number: int, digest: str, at: float) -> str:
    """Return the signature of a head."""
    return hmac.new(key, f"{number} {digest} {at:.3f}".encode(), hashlib.sha256).hexdigest()


class AuditLog:
    """Appends records to a file. No request waits for it."""

    def __init__(self, path: Path, heads: Path | None, key: bytes, *, required: bool) -> None:
        """`heads` is the file for signed heads, None for none. `required`: requests are refused while records cannot be
        written. Raises ValueError if the end of the file cannot be continued."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = path
        self._heads, self._key, self._required = heads, key, required
        self._number, self._digest = _end_of(path)
        self._signed, self._signed_at = self._number, -math.inf  # the newest head; the first record has one at once
        self._failed = ""
        self._writer = BackgroundWriter[dict[str, Any]](
            f"the audit log {path}", self._write_batch, most=MOST_WAITING, batch=HEAD_RECORDS
        )

    def add(self, event: str, **fields: Any) -> None:
        """Append a record soon. Never blocks."""
        self._writer.add({"ts": round(time.time(), 3), "event": event, **fields})

    @property
    def lost(self) -> int:
        """The number of records that could not be written."""
        return self._writer.lost

    @property
    def refuses(self) -> bool:
        """True while requests are to be refused, because the log is required and cannot be written."""
        return self._required and bool(self._failed)

    def close(self) -> None:
        """Write what is left, and a last head. Blocks for at most a minute."""
        self._writer.close()
        if self._number > self._signed:
            self._sign()

    def _write_batch(self, records: list[dict[str, Any]]) -> None:
        if records:
            self._write(records)
        new = self._number - self._signed
        if new >= HEAD_RECORDS or (new and time.monotonic() - self._signed_at >= HEAD_SECONDS):
            self._sign()

    def _write(self, records: list[dict[str, Any]]) -> None:
        if self._failed:
            records = [{"ts": round(time.time(), 3), "event": "records_lost", "count": self.lost}, *records]
        lines, number, digest = [], self._number, self._digest
        for record in records:
            number += 1
            line = line_of({**record, "n": number, "prev": digest})
            digest = hashlib.sha256(line).hexdigest()
            lines.append(line)
        try:
            _append(self.path, b"".join(lines))
        except OSError as error:
            self._writer.lose(len(records) - bool(self._failed), str(error))
            self._failed = str(error)
        else:
            if self._failed:
                _log.info("the audit log is written again")
            self._failed, self._number, self._digest = "", number, digest

    def _sign(self) -> None:
        self._signed, self._signed_at = self._number, time.monotonic()
        if self._heads is None:
            return
        at = time.time()
        head = {"n": self._number, "hash": self._digest, "ts": round(at, 3)}
        head["signature"] = signature(self._key, self._number, self._digest, at)
        try:
            _append(self._heads, line_of(head))
        except OSError as error:
            _log.error("the heads of the audit log are not written: %s: %s", self._heads, error)


def _append(path: Path, data: bytes) -> None:
    """Append whole lines, or nothing: what a full disk has left of them is cut off."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        try:
            written = os.write(descriptor, data)
            if written < len(data):
                raise OSError("the disk is full")
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def _end_of(path: Path) -> tuple[int, str]:
    """Return the number and the hash of a log's last line. Raises ValueError if it ends within a line."""
    if not path.exists() or not path.stat().st_size:
        return 0, FIRST
    with path.open("rb") as opened:
        line = _last_line(opened)
    try:
        return int(json.loads(line)["n"]), hashlib.sha256(line).hexdigest()
    except (ValueError, LookupError, TypeError):
        message = "its last line is no record; run penstock audit verify, and move the file away"
        raise ValueError(f"the audit log {path} cannot be continued: {message}") from None


def _last_line(opened: IO[bytes]) -> bytes:
    size = opened.seek(0, os.SEEK_END)
    block = min(size, 1 << 20)
    opened.seek(size - block)
    return opened.read(block).splitlines(keepends=True)[-1]
