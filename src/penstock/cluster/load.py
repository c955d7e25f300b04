"""Measures the load of a fleet and the capacity of its engines, from the engines' statistics: the input of `scale`."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from penstock.cluster.replica import ASSUMED_STEP_TOKENS, Replica

RATE_SECONDS = 10.0  # over which the load is a mean
MIX_FADES = 0.99  # weight of earlier tokens in the shares of prompts and outputs, at each measurement

Counts = tuple[int, int, int]  # prompt tokens, output tokens, prompt tokens that wait


class FleetLoad(NamedTuple):
    """See scale.Observation. None: it could not be measured."""

    load: float | None
    capacity: float | None
    kv_usage: float | None
    wait: float | None


class LoadMeter:
    """Takes the difference between two looks at each engine. Used from one event loop; times are on the fleet's
    clock."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], Counts] = {}  # by name and incarnation
        self._arrived = 0.0  # tokens that requests have brought so far
        self._samples: deque[tuple[float, float]] = deque()  # (time, `_arrived`) of the last RATE_SECONDS
        self._prompts = self._outputs = 0.0  # tokens computed lately

    def measure(self, replicas: Sequence[Replica], now: float) -> FleetLoad:
        """Return what is known now. Without engines the load is zero; of engines that cannot be reached it is
        unknown."""
        here = [one for one in replicas if one.status not in ("starting", "gone")]
        if replicas and not here:
            return FleetLoad(None, None, None, None)
        load = self._rate(here, now)
        if not here:
            return FleetLoad(load, None, None, 0.0)
        views = [one.view(now) for one in here]
        kv_usage = sum(view.kv_usage for view in views) / len(views)
        waits = [
            max(view.backlog_tokens * view.prefill_seconds, view.waiting * view.request_seconds / view.max_num_seqs)
            for view in views
            if view.waiting
        ]
        seconds = [each for one in here if (each := self._token_seconds(one, now)) > 0.0]
        capacity = len(seconds) / sum(seconds) if seconds else None
        return FleetLoad(load, capacity, kv_usage, sum(waits) / len(views))

    def _rate(self, replicas: Sequence[Replica], now: float) -> float | None:
        """Return the tokens a second that requests have brought: those computed, and what the queues have grown."""
        counts: dict[tuple[str, int], Counts] = {}
        for replica in replicas:
            stats, view = replica.stats, replica.view(now)
            key = replica.name, view.incarnation
            found = counts[key] = stats.prefill_tokens, stats.decode_tokens, view.backlog_tokens
            before = self._counts.get(key)
            if before is not None:
                prompts, outputs, waiting = (new - old for new, old in zip(found, before, strict=True))
                if prompts >= 0 and outputs >= 0:  # else the counters are those of another engine
                    self._arrived += max(prompts + outputs + waiting, 0)
                    self._prompts += prompts
                    self._outputs += outputs
        self._counts = counts
        self._prompts *= MIX_FADES
        self._outputs *= MIX_FADES
        samples = self._samples
        samples.append((now, self._arrived))
        while len(samples) > 2 and samples[1][0] <= now - RATE_SECONDS:
            samples.popleft()
        (begin, first), (end, last) = samples[0], samples[-1]
        return (last - first) / (end - begin) if end > begin else None

    def _token_seconds(self, replica: Replica, now: float) -> float:
        """Return the time of a token of today's mix in an engine whose steps are full; 0 while it is not measured."""
        view, most = replica.view(now), replica.engine.info.max_step_tokens or ASSUMED_STEP_TOKENS
        output = view.step_seconds / view.max_num_seqs + view.row_seconds
        prompt = view.step_seconds / most + view.prefill_seconds
        share = self._outputs / max(self._outputs + self._prompts, 1.0)
        return share * output + (1.0 - share) * prompt
