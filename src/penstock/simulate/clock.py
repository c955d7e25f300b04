"""Clocks whose time the simulator sets."""

NANO = 10**9  # nanoseconds in a second


class VirtualClock:
    """A Clock that returns `now`, in seconds. The simulator sets `now` to the time of the next event."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class EventClock(VirtualClock):
    """A virtual clock in whole nanoseconds. `now` is always `ns` / NANO, so equal times are equal as floats."""

    def __init__(self) -> None:
        super().__init__()
        self.ns = 0

    def set(self, ns: int) -> None:
        """Moves the clock to a time."""
        self.ns = ns
        self.now = ns / NANO
