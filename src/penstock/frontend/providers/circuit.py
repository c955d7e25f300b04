"""Keeps requests from a provider that fails. Pure: time is an argument."""

FAILURES = 5  # in a row, after which the circuit opens
OPEN_SECONDS = 10.0  # that it stays open the first time; each later time is twice as long
LONGEST_OPEN = 120.0


class Circuit:
    """A circuit breaker. While it is open, no request may be sent. After that one may, and its result decides.

    A provider that says when it takes requests again is left alone until then, which counts as no failure.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._opened = 0  # times in a row
        self._until = 0.0
        self._probing = False  # the one request after an open circuit has not ended

    def allows(self, now: float) -> bool:
        """Returns whether a request may be sent now."""
        return now >= self._until and not self._probing

    def wait(self, now: float) -> float:
        """Returns the seconds until a request may be sent."""
        return max(self._until - now, 1.0 if self._probing else 0.0)

    def begin(self) -> None:
        """Notes that a request is sent."""
        self._probing = self._failures >= FAILURES

    def succeeded(self) -> None:
        self._failures = self._opened = 0
        self._probing = False

    def failed(self, now: float) -> None:
        self._probing = False
        self._failures += 1
        if self._failures >= FAILURES:
            self._until = now + min(OPEN_SECONDS * 2**self._opened, LONGEST_OPEN)
            self._opened += 1

    def gave_up(self) -> None:
        """Notes that a request ended for another reason, such as a client that has gone."""
        self._probing = False

    def hold(self, until: float) -> None:
        """Notes that the provider takes no requests until then."""
        self._probing = False
        self._until = max(self._until, until)
