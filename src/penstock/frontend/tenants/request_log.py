"""The request log: the rows of the ledger as JSON lines, in a file that is rotated, for programs that collect logs."""

import contextlib
import logging
import random
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path

import msgspec

from penstock.frontend.tenants.ledger import LedgerRow
from penstock.frontend.tenants.writer import BackgroundWriter

BYTES, FILES = 64 << 20, 5  # of a file, and the number of older ones that are kept


class RequestLog(RotatingFileHandler):
    """Appends a line for each row. No request waits for it, and a line that cannot be written is lost."""

    def __init__(self, path: Path, share: float = 1.0) -> None:
        """`share`: of the requests without an error, drawn at random. Raises OSError."""
        super().__init__(path, maxBytes=BYTES, backupCount=FILES)
        self._writer = BackgroundWriter[LedgerRow](f"the request log {path}", self._write, most=50_000, batch=1000)
        self._share = share

    def add(self, row: LedgerRow) -> None:
        """Append a row soon, if it is of the share. Never blocks."""
        if row.status >= 400 or row.error or random.random() < self._share:
            self._writer.add(row)

    def close(self) -> None:
        """Write what is left. Blocks for at most a minute."""
        self._writer.close()
        with contextlib.suppress(OSError):  # the disk is full: that was said
            super().close()

    def _write(self, rows: list[LedgerRow]) -> None:
        for row in rows:
            self.handle(logging.makeLogRecord({"msg": msgspec.json.encode(row).decode()}))

    def handleError(self, record: logging.LogRecord) -> None:
        self._writer.lose(1, str(sys.exc_info()[1]))
