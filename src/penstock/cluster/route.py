"""Chooses the engine for a request.

A score is in seconds, so its parts can be compared without weights to tune: the time until the request's first token
(what waits there, and the part of its prompt that is not cached), the time of its output, and by how much it delays the
sequences that run there. So a request follows its prefix as long as that saves more than the load there costs.

Everything is a function of the arguments. `seed` draws among equal engines: several fronts that see the same statistics
must not all choose the same one. Sources: the power of two choices (Mitzenmacher 2001); the idea to score in predicted
time is Preble's (Srivatsa et al. 2024).
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from penstock.cluster.view import FleetView, ReplicaView, RouteRequest

EXPECTED_TOKENS = 128  # of an output whose length is unknown
TRUST_SECONDS = 3.0  # the age at which statistics count about a third, and the mean of the fleet the rest
NOISE = 0.25  # measured step times that differ less from the mean of the fleet count as the mean
EQUAL = 0.02  # share of the time by which the scores of equal engines may differ
EQUAL_SECONDS = 0.0005
OTHER_REGION_SECONDS = 0.05
EXCEEDS = "tokens exceed"  # in reasons

# Assumed while nothing has been measured: prompts count more than sequences.
UNMEASURED = (1e-4, 1e-2, 1e-4)  # prefill_seconds, step_seconds, row_seconds


class RoutePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of `choose`."""

    others: float = 1.0  # weight of the delay of sequences that run there
    affinity: bool = True  # False: ignore what is cached


class RouteChoice(msgspec.Struct, frozen=True):
    """The engines that may get a request, the best first, and why the others may not."""

    replicas: tuple[str, ...]
    seconds: tuple[float, ...] = ()  # their scores
    refused: tuple[tuple[str, str], ...] = ()  # (name, reason)

    @property
    def too_large(self) -> bool:
        """True when the request exceeds the limits of every engine."""
        return not self.replicas and bool(self.refused) and all(EXCEEDS in reason for _, reason in self.refused)

    @property
    def reason(self) -> str:
        """Why no engine may get it."""
        return "; ".join(f"{name}: {reason}" for name, reason in self.refused) or "there are no engines"


Route = Callable[[FleetView, RouteRequest, int], RouteChoice]  # the last argument is a seed, different for each request


def choose(view: FleetView, request: RouteRequest, seed: int, policy: RoutePolicy = RoutePolicy()) -> RouteChoice:
    """Return the engines for a request by their score. The first is the best, or one that equals it."""
    able, refused = _eligible(view, request)
    if not able:
        return RouteChoice((), (), tuple(refused))
    fleet = _Fleet.of(able)
    expected = min(request.max_tokens or EXPECTED_TOKENS, EXPECTED_TOKENS)
    scored = sorted([_score(replica, request, fleet, expected, policy) for replica in able])
    seconds, _, uncached, _ = scored[0]
    limit = seconds + EQUAL * seconds + EQUAL_SECONDS
    equal = [one for one in scored if one[0] <= limit and one[2] <= uncached]
    if len(equal) > 1:
        first = _of_two(sorted(equal, key=lambda one: one[1]), seed)
        scored.remove(first)
        scored.insert(0, first)
    return RouteChoice(tuple([one[1] for one in scored]), tuple([one[0] for one in scored]), tuple(refused))


def round_robin(view: FleetView, request: RouteRequest, seed: int) -> RouteChoice:
    """Return the engines in turn: `seed` counts the requests. A baseline."""
    able, refused = _eligible(view, request)
    names = [replica.name for replica in able]
    turn = seed % len(names) if names else 0
    return RouteChoice((*names[turn:], *names[:turn]), (), tuple(refused))


def least_loaded(view: FleetView, request: RouteRequest, seed: int) -> RouteChoice:
    """Return the engines by their number of requests, whatever is cached. A baseline."""
    able, refused = _eligible(view, request)
    loads = [(replica.running + replica.waiting + replica.booked_requests, replica.name) for replica in able]
    loads.sort(key=lambda one: (one[0], _mix(seed ^ _hash(one[1]))))
    return RouteChoice(tuple(name for _, name in loads), tuple(float(load) for load, _ in loads), tuple(refused))


ROUTES: Mapping[str, Route] = MappingProxyType(
    {"cost": choose, "round-robin": round_robin, "least-loaded": least_loaded}
)


# -- who may get it ---------------------------------------------------------------------------------------------------


def _eligible(view: FleetView, request: RouteRequest) -> tuple[list[ReplicaView], list[tuple[str, str]]]:
    able, refused = [], []
    for replica in view.replicas:
        reason = _why_not(replica, request)
        if reason:
            refused.append((replica.name, reason))
        else:
            able.append(replica)
    return able, refused


def _why_not(replica: ReplicaView, request: RouteRequest) -> str:
    """Return why a replica cannot take a request, or ""."""
    if replica.status != "ready":
        return replica.status
    if replica.name in request.excluded:
        return "it has failed this request"
    if request.pool and replica.pool != request.pool:
        return "it has other weights or numerics"
    if request.model and replica.model != request.model:
        return f"it serves {replica.model}"
    if request.revision and replica.revision != request.revision:
        return f"it serves revision {replica.revision}"
    if request.role != "any" and replica.role not in ("any", request.role):
        return f"its role is {replica.role}"
    if request.prompt_tokens > replica.max_model_len:
        return f"{request.prompt_tokens} {EXCEEDS} its limit of {replica.max_model_len} (--max-model-len)"
    if 0 < replica.kv_tokens < request.prompt_tokens:
        return f"{request.prompt_tokens} {EXCEEDS} its KV cache of {replica.kv_tokens}"
    return ""


# -- the score --------------------------------------------------------------------------------------------------------


class _Fleet(NamedTuple):
    """Means over the engines that may get the request."""

    running: float
    waiting: float
    backlog: float
    usage: float
    prefill: float
    step: float
    row: float

    @classmethod
    def of(cls, replicas: list[ReplicaView]) -> "_Fleet":
        count, measured = len(replicas), 0
        running = waiting = backlog = 0
        usage = prefill = step = row = 0.0
        for each in replicas:
            running += each.running
            waiting += each.waiting
            backlog += each.backlog_tokens
            usage += each.kv_usage
            if each.prefill_seconds > 0.0:
                measured += 1
                prefill += each.prefill_seconds
                step += each.step_seconds
                row += each.row_seconds
        loads = (running / count, waiting / count, backlog / count, usage / count)
        return cls(*loads, *((prefill / measured, step / measured, row / measured) if measured else UNMEASURED))


_Scored = tuple[float, str, int, float]  # seconds, name, tokens that are not cached, tokens computed lately


def _score(replica: ReplicaView, request: RouteRequest, fleet: _Fleet, expected: int, policy: RoutePolicy) -> _Scored:
    running, waiting = float(replica.running), float(replica.waiting)
    backlog, usage = float(replica.backlog_tokens), replica.kv_usage
    if replica.stats_age > 0.0:  # old statistics count less; they exclude nobody
        trust = math.exp(-replica.stats_age / TRUST_SECONDS)
        running += (1.0 - trust) * (fleet.running - running)
        waiting += (1.0 - trust) * (fleet.waiting - waiting)
        backlog += (1.0 - trust) * (fleet.backlog - backlog)
        usage += (1.0 - trust) * (fleet.usage - usage)
    waiting += replica.booked_requests
    backlog += replica.booked_tokens

    if replica.prefill_seconds > 0.0:
        prefill_rate = _steady(replica.prefill_seconds, fleet.prefill)
        step, row = _steady(replica.step_seconds, fleet.step), _steady(replica.row_seconds, fleet.row)
    else:
        prefill_rate, step, row = fleet.prefill, fleet.step, fleet.row

    tokens = request.prompt_tokens
    cached = request.cached.get(replica.name, 0) if policy.affinity else 0
    uncached = max(tokens - cached, 1)
    prefill = uncached * prefill_rate

    wait = backlog * prefill_rate
    sequences = running + waiting
    held = 0.0
    if (over := sequences + 1.0 - replica.max_num_seqs) > 0.0:  # sequences that must end before it can begin
        held = over * replica.request_seconds / replica.max_num_seqs
    if replica.kv_tokens:
        need = (tokens + expected - cached) / replica.kv_tokens
        booked = replica.booked_tokens / replica.kv_tokens
        if (short := need + booked + usage - 1.0) > 0.0:  # memory that must be freed first
            held = max(held, short * replica.request_seconds)

    output = expected * (step + row * (sequences + 1.0))
    inflicted = sequences * (prefill + expected * row)
    seconds = wait + held + prefill + output + policy.others * inflicted
    if request.region and replica.region and replica.region != request.region:
        seconds += OTHER_REGION_SECONDS
    return seconds, replica.name, uncached, replica.recent_tokens + replica.booked_tokens


def _steady(value: float, mean: float) -> float:
    """Return the mean if the value differs from it by no more than measurements do."""
    return mean if abs(value - mean) <= NOISE * mean else value


# -- chance -----------------------------------------------------------------------------------------------------------


def _of_two(equal: list[_Scored], seed: int) -> _Scored:
    """Draw two and return the one that has computed less lately, so that equal engines get equal work over time, also
    if nothing runs anywhere when a request comes."""
    count = len(equal)
    drawn = _mix(seed)
    first = drawn % count
    second = (first + 1 + (drawn >> 32) % (count - 1)) % count
    return min(equal[first], equal[second], key=lambda one: one[3])


def _hash(name: str) -> int:
    """A number of 64 bits that is the same in every process."""
    number = 0xCBF29CE484222325
    for byte in name.encode():
        number = (number ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return number


def _mix(seed: int) -> int:
    """A pseudo-random number of 64 bits: a step of splitmix64 (Steele et al. 2014)."""
    value = (seed + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31
