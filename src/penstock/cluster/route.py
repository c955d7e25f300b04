"""Chooses the engine for a request.

A score is in seconds, so its parts can be compared without weights to tune: the time until the request's first token
(the way there and back, what waits there, and the part of its prompt that is not cached), the time of its output, and
by how much it delays the sequences that run there. So a request follows its prefix as long as that saves more than the
load there costs, and goes to a farther region if it is answered sooner there. Of equal engines the near ones count.

Everything is a function of the arguments. `seed` draws among equal engines: several fronts that see the same statistics
must not all choose the same one. Sources: the power of two choices (Mitzenmacher 2001); the idea to score in predicted
time is Preble's (Srivatsa et al. 2024).
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from penstock.cluster.costs import FleetView
from penstock.cluster.view import ReplicaView, RouteRequest
from penstock.messages import other_region

EXPECTED_TOKENS = 128  # of an output whose length is unknown
EQUAL = 0.02  # share of the time by which the scores of equal engines may differ
EQUAL_SECONDS = 0.0005
APART_SECONDS = 0.01  # that it must save to read KV blocks from another engine: a connection, and the last pages
EXCEEDS = "tokens exceed"  # in reasons


class RouteChoice(msgspec.Struct, frozen=True):
    """The engines that may get a request, the best first, and why the others may not."""

    replicas: tuple[str, ...]
    seconds: tuple[float, ...] = ()  # their scores
    refused: tuple[tuple[str, str], ...] = ()  # (name, reason)
    source: str = ""  # an engine whose KV blocks the first one should read; "": none
    computes: bool = False  # the source does not have them yet: it must compute the prompt

    @property
    def too_large(self) -> bool:
        """True when the request exceeds the limits of every engine."""
        return not self.replicas and bool(self.refused) and all(EXCEEDS in reason for _, reason in self.refused)

    @property
    def reason(self) -> str:
        """Why no engine may get it."""
        return "; ".join(f"{name}: {reason}" for name, reason in self.refused) or "there are no engines"


Route = Callable[[FleetView, RouteRequest, int], RouteChoice]  # the last argument is a seed, different for each request


def choose(view: FleetView, request: RouteRequest, seed: int) -> RouteChoice:
    """Return the engines for a request by their score. The first is the best, or one that equals it. Those that compute
    prompts for others come last."""
    able, refused = _eligible(view, request)
    if not able:
        return RouteChoice((), (), tuple(refused))
    last: list[int] = []  # engines that compute prompts for others
    if view.exchanges:
        last = [place for place in able if view.replicas[place].role == "prefill"]
    if len(last) == len(able):
        last = []
    scored = _scores(view, request, [place for place in able if place not in last] if last else able)
    scored.sort()
    seconds, _, uncached, _, _ = scored[0]
    limit = seconds + EQUAL * seconds + EQUAL_SECONDS
    equal = [one for one in scored if one[0] <= limit and one[2] <= uncached]
    if len(equal) > 1:
        if len(view.means.distances) > 1:
            nearest = min(one[4] for one in equal)
            equal = [one for one in equal if one[4] == nearest]
        first = _of_two(sorted(equal, key=lambda one: one[1]), seed) if len(equal) > 1 else equal[0]
        scored.remove(first)
        scored.insert(0, first)
    source, computes = _source(view, request, able, scored[0][1]) if view.exchanges else ("", False)
    if last:
        scored += sorted(_scores(view, request, last))
    scores = tuple([one[0] for one in scored])
    return RouteChoice(tuple([one[1] for one in scored]), scores, tuple(refused), source, computes)


def round_robin(view: FleetView, request: RouteRequest, seed: int) -> RouteChoice:
    """Return the engines in turn: `seed` counts the requests. A baseline."""
    able, refused = _eligible(view, request)
    names = [view.replicas[place].name for place in able]
    turn = seed % len(names) if names else 0
    return RouteChoice((*names[turn:], *names[:turn]), (), tuple(refused))


ROUTES: Mapping[str, Route] = MappingProxyType({"cost": choose, "round-robin": round_robin})


# -- who may get it ---------------------------------------------------------------------------------------------------


def _eligible(view: FleetView, request: RouteRequest) -> tuple[list[int], list[tuple[str, str]]]:
    """Return the places of the engines in the view that may get a request, and why the others may not."""
    able, refused = [], []
    for place, replica in enumerate(view.replicas):
        reason = _why_not(replica, request)
        if reason:
            refused.append((replica.name, reason))
        else:
            able.append(place)
    return able, refused


def _why_not(replica: ReplicaView, request: RouteRequest) -> str:
    """Return why a replica cannot take a request, or ""."""
    if replica.status != "ready":
        return replica.status
    if replica.name in request.excluded:
        return "it has failed this request"
    if request.regions and replica.region not in request.regions:
        return other_region("it", replica.region, request.regions)
    if request.pool and replica.pool != request.pool:
        return "it has other weights or numerics"
    if request.prompt_tokens > replica.max_model_len:
        return f"{request.prompt_tokens} {EXCEEDS} its limit of {replica.max_model_len} (--max-model-len)"
    if 0 < replica.kv_tokens < request.prompt_tokens:
        return f"{request.prompt_tokens} {EXCEEDS} its KV cache of {replica.kv_tokens}"
    return ""


# -- the score --------------------------------------------------------------------------------------------------------

_Scored = tuple[float, str, int, float, float]  # seconds, name, uncached tokens, tokens computed lately, distance


def _scores(view: FleetView, request: RouteRequest, able: list[int]) -> list[_Scored]:
    tokens, cached = request.prompt_tokens, request.cached
    expected = min(request.max_tokens or EXPECTED_TOKENS, EXPECTED_TOKENS)
    costs, scored = view.costs, []
    for place in able:
        name, distance, wait, places, uncached_token, output_token, free_tokens, missing_token, recent = costs[place]
        uncached = tokens - cached[name] if name in cached else tokens
        memory = (uncached + expected - free_tokens) * missing_token
        seconds = wait + (memory if memory > places else places) + uncached * uncached_token + expected * output_token
        scored.append((seconds, name, uncached, recent, distance))
    return scored


# -- KV blocks of other engines ---------------------------------------------------------------------------------------


def _source(view: FleetView, request: RouteRequest, able: list[int], chosen: str) -> tuple[str, bool]:
    """Return the engine whose KV blocks the chosen one should read, and whether that must compute the prompt first.

    A prompt is computed elsewhere if that takes less than the chosen engine's own time and the time by which it would
    delay the sequences that run there. So short prompts, and those for an idle engine, are not.
    """
    place = next(place for place in able if view.replicas[place].name == chosen)
    replica, cost, cached = view.replicas[place], view.costs[place], request.cached
    if replica.role == "alone" or not request.reads_pages:
        return "", False
    uncached = request.prompt_tokens - cached.get(chosen, 0)
    best, source = cost.wait + uncached * cost.uncached_token - APART_SECONDS, ("", False)
    for place, other in enumerate(view.replicas):
        if (
            other.role == "alone"
            or other.pool != replica.pool
            or other.name == chosen
            or other.region != replica.region
        ):
            continue  # pages are large, and may not leave the region
        has = cached.get(other.name, 0)
        if other.status in ("ready", "draining"):
            rest = request.prompt_tokens - max(has, cached.get(chosen, 0))
            seconds = cost.wait + rest * cost.uncached_token
            if seconds < best:
                best, source = seconds, (other.name, False)
        if other.role != "decode" and place in able:
            seconds = view.costs[place].wait + (request.prompt_tokens - has) * view.costs[place].uncached_token
            if seconds < best:
                best, source = seconds, (other.name, True)
    return source


# -- chance -----------------------------------------------------------------------------------------------------------


def _of_two(equal: list[_Scored], seed: int) -> _Scored:
    """Draw two and return the one that has computed less lately, so that equal engines get equal work over time, also
    if nothing runs anywhere when a request comes."""
    count = len(equal)
    drawn = _mix(seed)
    first = drawn % count
    second = (first + 1 + (drawn >> 32) % (count - 1)) % count
    return min(equal[first], equal[second], key=lambda one: one[3])


def _mix(seed: int) -> int:
    """A pseudo-random number of 64 bits: a step of splitmix64 (Steele et al. 2014)."""
    value = (seed + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31
