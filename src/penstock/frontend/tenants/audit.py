"""The audit log: one JSON object a line, each with the SHA-256 of the line before it.

A head is the number and the hash of the newest line with an HMAC-SHA256, whose key the server reads at its start. Heads
go to a second file, which should be on another machine's disk: a chain alone cannot show that its tail was cut.
"""

import contextlib
import hashlib
import hmac
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

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
    """Appends records to a file in a thread. No request waits for it."""

    def __init__(self, path: Path, heads: Path | None, key: bytes, *, required: bool) -> None:
        """`heads` is the file for signed heads, None for none. `required`: requests are refused while records cannot be
        written. Raises ValueError if the end of the file cannot be continued."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = path
        self.lost = 0  # records that could not be written
        self._heads, self._key, self._required = heads, key, required
        self._number, self._digest = _end_of(path)
        self._failed = ""
        self._records: queue.Queue[dict[str, Any] | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="penstock-audit", daemon=True)
        self._thread.start()

    def add(self, event: str, **fields: Any) -> None:
        """Append a record soon. Never blocks."""
        try:
            self._records.put_nowait({"ts": round(time.time(), 3), "event": event, **fields})
        except queue.Full:
            self._lose(1, "too many records wait")

    @property
    def refuses(self) -> bool:
        """True while requests are to be refused, because the log is required and cannot be written."""
        return self._required and bool(self._failed)

    def close(self) -> None:
        """Write what is left, and a last head. Blocks for at most a minute."""
        with contextlib.suppress(queue.Full):  # the disk fails, and so will this
            self._records.put(None, timeout=1)
            self._thread.join(60)

    def _run(self) -> None:
        signed, signed_at = self._number, time.monotonic()
        last = False
        while not last:
            records, last = self._gather()
            if records:
                self._write(records)
            due = time.monotonic() - signed_at >= HEAD_SECONDS or self._number - signed >= HEAD_RECORDS or last
            if due and self._number > signed:
                self._sign()
                signed, signed_at = self._number, time.monotonic()

    def _gather(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the next records, and whether they are the last ones. Without any, returns after a second."""
        found: list[dict[str, Any]] = []
        try:
            record = self._records.get(timeout=1.0)
            while record is not None and len(found) < HEAD_RECORDS:
                found.append(record)
                record = self._records.get_nowait()
        except queue.Empty:
            return found, False
        if record is not None:
            found.append(record)
        return found, record is None

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
            self._lose(len(records) - bool(self._failed), str(error))
            self._failed = str(error)
        else:
            if self._failed:
                _log.info("the audit log is written again")
            self._failed, self._number, self._digest = "", number, digest

    def _sign(self) -> None:
        if self._heads is None:
            return
        at = time.time()
        head = {"n": self._number, "hash": self._digest, "ts": round(at, 3)}
        head["signature"] = signature(self._key, self._number, self._digest, at)
        try:
            _append(self._heads, line_of(head))
        except OSError as error:
            _log.error("the heads of the audit log are not written: %s: %s", self._heads, error)

    def _lose(self, count: int, why: str) -> None:
        before, self.lost = self.lost, self.lost + count
        if self.lost.bit_length() > before.bit_length():
            _log.error("%d records are missing in the audit log %s: %s", self.lost, self.path, why)


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
