"""Limits how often streams are moved, so that an error that follows requests does not end one engine after another."""

SHARE = 0.2  # moves for each request, beside those that are always allowed
PER_SECOND = 10.0
LEAST = 256.0  # moves at once: one engine's requests


class MoveBudget:
    """A token bucket: requests fill it, and so does time. A move that finds it empty waits."""

    def __init__(self, now: float) -> None:
        self._tokens = LEAST
        self._filled_at = now

    def request(self) -> None:
        """Count a new request."""
        self._tokens = min(self._tokens + SHARE, LEAST)

    def allows(self, now: float) -> bool:
        """Return whether a stream may move now."""
        self._tokens = min(self._tokens + (now - self._filled_at) * PER_SECOND, LEAST)
        self._filled_at = now
        return self._tokens >= 1.0

    def take(self) -> None:
        """Count a move."""
        self._tokens -= 1.0
