"""How busy a thread is. A thread without time left waits for a processor, or computes."""

import os

LOOK_SECONDS = 0.1  # between two readings
_PATH = "/proc/thread-self/schedstat"  # nanoseconds on a processor, and nanoseconds of waiting for one


class ThreadLoad:
    """The load of the thread that creates it."""

    def __init__(self) -> None:
        try:
            self._file = os.open(_PATH, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # not every kernel counts
            self._file = -1
        self._at, self._ns, self._share = 0.0, 0, 0.0

    def busy(self, now: float) -> float:
        """Returns the share of the last LOOK_SECONDS or more in which the thread did not sleep; 0 if nothing is known.
        `now` is on time.monotonic()."""
        if self._file >= 0 and now >= self._at + LOOK_SECONDS:
            ran, waited, *_ = os.pread(self._file, 100, 0).split()
            ns = int(ran) + int(waited)
            self._share = (ns - self._ns) / 1e9 / (now - self._at) if self._at else 0.0
            self._at, self._ns = now, ns
        return self._share

    def close(self) -> None:
        """Closes the file. May be called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
