"""Writes records to a file in a thread, so that no request waits for the disk."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

IDLE_SECONDS = 1.0  # after which an empty batch is written
CLOSE_SECONDS = 60.0
_log = logging.getLogger("penstock.tenants")

T = TypeVar("T")


class BackgroundWriter(Generic[T]):
    """Passes records in batches to a function, which runs in a thread."""

    def __init__(
        self, name: str, write: Callable[[list[T]], None], *, most: int, batch: int, gather_seconds: float = 0.0
    ) -> None:
        """`write` is called at once, and each second without a record, with an empty batch. It handles all errors.
        `most` records may wait. A batch has up to `batch` records, and is gathered for some seconds."""
        self.lost = 0  # records that could not be written
        self._name, self._write, self._batch, self._gather_seconds = name, write, batch, gather_seconds
        self._records: queue.Queue[T | None] = queue.Queue(most)
        self._thread = threading.Thread(target=self._run, name="penstock-writer", daemon=True)
        self._thread.start()

    def add(self, record: T) -> None:
        """Write a record soon. Never blocks. If too many wait it is lost."""
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self.lose(1, "too many wait")

    def lose(self, count: int, why: str) -> None:
        """Count records that are lost. The log says so each time that their number doubles."""
        before, self.lost = self.lost, self.lost + count
        if self.lost.bit_length() > before.bit_length():
            _log.error("%d records are missing in %s: %s", self.lost, self._name, why)

    def close(self) -> None:
        """Write what is left. Block for at most a minute."""
        with contextlib.suppress(queue.Full):  # the disk fails, and so will this
            self._records.put(None, timeout=1)
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        self._write([])
        last = False
        while not last:
            batch, last = self._gather()
            self._write(batch)

    def _gather(self) -> tuple[list[T], bool]:
        """Return the next records, and whether they are the last ones."""
        batch: list[T] = []
        with contextlib.suppress(queue.Empty):
            record = self._records.get(timeout=IDLE_SECONDS)
            if record is not None:
                time.sleep(self._gather_seconds)
            while record is not None:
                batch.append(record)
                if len(batch) == self._batch:
                    return batch, False
                record = self._records.get_nowait()
            return batch, True
        return batch, False
