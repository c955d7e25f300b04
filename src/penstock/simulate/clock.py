"""A clock whose time the simulator sets."""


class VirtualClock:
    """A Clock that returns `now`, in seconds. The simulator sets `now` to the time of the next event."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
