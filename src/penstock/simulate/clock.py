"""A clock that stands still until it is moved."""


class VirtualClock:
    """A Clock whose time is `now`, in seconds. Whoever takes the next event from a queue sets it."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
