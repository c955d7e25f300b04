"""What happened to each request of a simulation, and what the whole did over time."""

from dataclasses import dataclass, field
from typing import Literal

RequestStatus = Literal["open", "done", "refused", "late", "failed"]


@dataclass(slots=True)
class RequestRecord:
    """One request. Times in nanoseconds; -1: it did not happen. `output` tokens were asked for, `sent` came."""

    number: int
    traffic: str
    at: int
    prompt: int
    output: int
    first: int = -1
    end: int = -1
    sent: int = 0
    cached: int = 0
    replica: str = ""
    status: RequestStatus = "open"
    moves: int = 0

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return (self.first - self.at) / 1e9

    @property
    def latency(self) -> float:
        """Seconds to the last token."""
        return (self.end - self.at) / 1e9

    @property
    def tpot(self) -> float:
        """Seconds for each token after the first."""
        return (self.end - self.first) / 1e9 / (self.output - 1) if self.output > 1 else 0.0


@dataclass(slots=True)
class Sample:
    """The state of all replicas at a time, and what they did since the sample before. Shares are 0 to 1."""

    at: float
    replicas: int
    running: int
    waiting: int
    batch: float  # running sequences, of those that could run
    busy: float  # time in which devices executed steps
    kv_held: float  # blocks that requests hold
    kv_filled: float  # token slots of these blocks that have a token; nan if none is held
    cost: float  # money so far


@dataclass(slots=True)
class Totals:
    """Counters at the end of a simulation, of all replicas together."""

    seconds: float = 0.0
    steps: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    machine_seconds: float = 0.0  # in which machines were paid for
    busy_seconds: float = 0.0  # in which they executed steps
    rows_seconds: float = 0.0  # times the sequences in these,
    slot_seconds: float = 0.0  # and times those that could have been
    device_hours: float = 0.0  # of single devices
    cost: float = 0.0


@dataclass
class Outcome:
    """The result of one run."""

    requests: list[RequestRecord] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    timeline: list[tuple[float, str]] = field(default_factory=list)  # (seconds, what happened)
    totals: Totals = field(default_factory=Totals)
