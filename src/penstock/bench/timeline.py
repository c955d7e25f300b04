"""Records when the tokens of each request arrive, and computes rates and percentiles."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from penstock.bench.workload import percentile


@dataclass
class Timeline:
    """The times of one request, in seconds. `stamps` holds (time, number of tokens) for each chunk received."""

    sent: float
    stamps: list[tuple[float, int]] = field(default_factory=list)
    error: str = ""

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.stamps)

    @property
    def ttft(self) -> float:
        return self.stamps[0][0] - self.sent

    @property
    def e2e(self) -> float:
        return self.stamps[-1][0] - self.sent

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first."""
        return (self.e2e - self.ttft) / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def itls(self) -> list[float]:
        """Seconds between chunks, as a reader sees them."""
        times = [time for time, _ in self.stamps]
        return [later - earlier for earlier, later in pairwise(times)]


@dataclass(frozen=True)
class Slo:
    """A service level objective: a request is good if it meets every limit that is set, in seconds."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Parses a text such as "ttft=0.5,tpot=0.05", in seconds. ValueError for another key, or for no number."""
        limits: dict[str, float] = {}
        for part in (piece.strip() for piece in text.split(",")):
            match = re.fullmatch(r"(ttft|tpot|e2e)=(\d+\.?\d*|\.\d+)", part)
            if match is None:
                raise ValueError(
                    f"--slo: {part!r} is not a limit; name ttft, tpot or e2e in seconds, such as ttft=0.5,tpot=0.05"
                )
            limits[match[1]] = float(match[2])
        return cls(**limits)

    def met(self, line: Timeline) -> bool:
        """True if the request meets every limit."""
        pairs = ((self.ttft, line.ttft), (self.tpot, line.tpot), (self.e2e, line.e2e))
        return all(limit is None or value <= limit for limit, value in pairs)


def summarise(lines: Sequence[Timeline], elapsed: float, slo: Slo | None = None) -> dict[str, Any]:
    """Rates and percentiles over the requests that succeeded; times in milliseconds."""
    good = [line for line in lines if not line.error and line.stamps]
    summary: dict[str, Any] = {
        "requests": len(lines),
        "failed": len(lines) - len(good),
        "elapsed_s": round(elapsed, 3),
        "output_tokens": sum(line.tokens for line in good),
        "output_tok_s": round(sum(line.tokens for line in good) / elapsed, 2),
        "requests_s": round(len(good) / elapsed, 3),
    }
    series = {
        "ttft": [line.ttft for line in good],
        "tpot": [line.tpot for line in good if line.tokens > 1],
        "itl": [gap for line in good for gap in line.itls],
        "e2e": [line.e2e for line in good],
    }
    for name, values in series.items():
        for label, share in (("p50", 0.5), ("p99", 0.99)):
            summary[f"{name}_ms_{label}"] = round(percentile(values, share) * 1e3, 2) if values else None
    if slo is not None:
        summary["goodput_s"] = round(sum(slo.met(line) for line in good) / elapsed, 3)
    return summary
