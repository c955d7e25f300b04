"""The clock of a simulation."""

NANO = 10**9  # nanoseconds in a second


class EventClock:
    """A Clock that the simulation sets. `now` is always `ns` / NANO seconds, so equal times are equal as floats."""

    def __init__(self) -> None:
        self.ns = 0
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def set(self, ns: int) -> None:
        """Moves the clock to a time in nanoseconds."""
        self.ns = ns
        self.now = ns / NANO
