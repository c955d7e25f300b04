"""How many engines a fleet should have: a pure function from what was observed to a number and its reason.

Two loops give a need, and the larger one counts. The slow loop forecasts the load for the time at which an engine that
is started now would be ready: the load a day and a week before, scaled by how today compares. The fast loop looks at
the load now against the measured capacity of an engine, at the share of KV blocks held, and at the time that requests
wait. The use of processors is no measure: an engine with one request may use all of them.

Engines are added at once. They are removed only when one less would have been enough at every moment of a window. It is
shorter while the forecast has a record, and the needs within it fall with the record: a fall that the record has is not
noise.
"""

import math
from collections.abc import Mapping

import msgspec

BUCKET = 60.0  # seconds of load that a forecast knows as one number
DAY, WEEK = 86_400.0, 604_800.0
TREND_SECONDS = 1800.0  # over which today is compared with the day before
MOST_TREND = 2.0  # by which today may differ for a forecast to count
MOST_STEP = 2.0  # times the engines that serve: the need that a long queue can show
BUSY = 0.5  # share of the capacity in use, below which a long wait has another reason than the load
FORECAST_WINDOW = 90.0  # seconds of a window beside a forecast, which keeps engines that will be needed again


class ScalePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator sets. Times are in seconds."""

    least: int = 1  # 0: to zero and back
    most: int = 8
    budget: float = math.inf  # an hour, in the currency of `price`
    price: float = 0.0  # of an engine, an hour
    target_wait: float = 1.0  # that a request may wait for its first step
    target_use: float = 0.8  # share of the capacity, and of KV blocks, that may be in use
    window: float = 300.0  # for which one engine less must have been enough
    idle: float = 900.0  # without a request, after which the last engine ends
    standby: int = 0  # engines beyond the need, loaded and idle or asleep
    forecast: bool = True


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet at one moment. None: it could not be measured. Zero is a measurement."""

    at: float  # seconds on a clock that does not stand still between runs, such as those since the epoch
    ready: int  # engines that serve
    held: int = 0  # requests that wait at fronts because no engine serves
    load: float | None = None  # tokens a second that requests bring: of prompts, without what is cached, and of outputs
    capacity: float | None = None  # tokens a second that an engine can compute within the targets
    kv_usage: float | None = None  # mean share of KV blocks held
    wait: float | None = None  # seconds that requests waited for their first step
    start_seconds: float = 60.0  # from an order to an engine that serves, as measured


class ScaleState(msgspec.Struct, frozen=True):
    """What `decide` remembers. Its size is bounded."""

    wanted: int = 0
    capacity: float = 0.0  # the last that was measured
    # (when, engines that were needed, load expected from a minute before until ahead) within the window, rising times
    needs: tuple[tuple[float, float, float], ...] = ()
    buckets: Mapping[int, float] = {}  # mean load by number, for eight days, without the present one
    bucket: tuple[int, float, int] = (0, 0.0, 0)  # the present one: its number, the sum of loads and how many
    used_at: float = -math.inf  # when there was load last


class ScaleDecision(msgspec.Struct, frozen=True):
    """`wanted` engines shall serve or stand by."""

    wanted: int
    reason: str
    state: ScaleState


def decide(seen: Observation, state: ScaleState, policy: ScalePolicy) -> ScaleDecision:
    """Return the number of engines for what is seen now."""
    capacity = seen.capacity or state.capacity
    load = seen.load
    if load is None or (not capacity and (load > 0.0 or seen.held)):
        wanted, limit = _within(max(state.wanted, int(bool(seen.held))), policy)
        what = "the load" if load is None else "the capacity of an engine"
        why = f"hold: {what} is not known{limit}"
        return ScaleDecision(wanted, why, msgspec.structs.replace(state, wanted=wanted))
    used_at = seen.at if load > 0.0 or seen.held else state.used_at
    if used_at == -math.inf:
        used_at = seen.at
    buckets, bucket = _remember(state, seen.at, load)

    need, reason = _need_now(seen, load, capacity, policy)
    window, then, ahead = policy.window, seen.at + seen.start_seconds, 0.0
    if policy.forecast and capacity and (ahead := forecast(buckets, seen.at, then)):
        window = min(window, FORECAST_WINDOW)
        later = ahead / (capacity * policy.target_use)
        if _whole(later) > _whole(need):
            need, reason = later, f"{ahead:.0f} tokens/s are expected in {seen.start_seconds:.0f} s"
    if _whole(need) == 0 and (seen.held or seen.at - used_at < policy.idle):
        need, reason = 1.0, "a request waits" if seen.held else f"the last request was {seen.at - used_at:.0f} s ago"

    begin = seen.at - policy.window
    # The load is a mean of some time, so it falls later than the record, by up to a bucket.
    expected = forecast(buckets, seen.at - BUCKET, then) if ahead else 0.0
    needs = _thinned((*(each for each in state.needs if each[0] > begin), (seen.at, need, expected)), policy.window)
    past = [(count, before) for at, count, before in needs if at > seen.at - window]
    # A fall within the part of the capacity that is spare may be noise of the record.
    most = _whole(max(n * (ahead / before if 0.0 < ahead < before * policy.target_use else 1.0) for n, before in past))
    count = _whole(need)
    if most > count:
        count, reason = most, f"{most} were needed within the last {window:.0f} s"
    if policy.standby and count:
        count, reason = count + policy.standby, f"{reason}; {policy.standby} stand by"
    wanted, limit = _within(count, policy)
    return ScaleDecision(wanted, reason + limit, ScaleState(wanted, capacity, needs, buckets, bucket, used_at))


def forecast(buckets: Mapping[int, float], now: float, then: float) -> float:
    """Return the load that is expected from now until shortly after a time, since an engine is of use until it can be
    replaced: the largest of the day and of the week before, times how the last half hour compares with theirs. 0
    without a record of either."""
    found, present = 0.0, int(now // BUCKET)
    for season in (int(DAY // BUCKET), int(WEEK // BUCKET)):
        until = int((then + BUCKET) // BUCKET)
        known = [buckets[each - season] for each in range(present, until + 1) if each - season in buckets]
        if not known:
            continue
        lately = range(present - int(TREND_SECONDS // BUCKET), present)
        both = [each for each in lately if each in buckets and each - season in buckets]
        today, past = sum(buckets[each] for each in both), sum(buckets[each - season] for each in both)
        trend = min(max(today / past, 1 / MOST_TREND), MOST_TREND) if past > 0.0 else 1.0
        found = max(found, trend * max(known))
    return found


def _need_now(seen: Observation, load: float, capacity: float, policy: ScalePolicy) -> tuple[float, str]:
    """The engines that today's load needs, not rounded, and why. Every measure is of the whole fleet, so that one that
    leaves does not look like less load."""
    needs = [(0.0, "there is no load")]
    use = 0.0
    if capacity and load > 0.0:
        use = load / (capacity * max(seen.ready, 1))
        count = load / (capacity * policy.target_use)
        needs.append((count, f"{load:.0f} tokens/s, and an engine computes {capacity * policy.target_use:.0f}"))
    if seen.kv_usage is not None:
        count = seen.ready * seen.kv_usage / policy.target_use
        needs.append((count, f"{seen.kv_usage:.0%} of the KV blocks are held"))
    busy = use > BUSY or (seen.kv_usage or 0.0) > BUSY
    if seen.wait is not None and seen.wait > policy.target_wait and busy:
        count = math.ceil(seen.ready * min(seen.wait / policy.target_wait, MOST_STEP))
        needs.append((count, f"requests wait for {seen.wait:.1f} s"))
    return max(needs, key=lambda each: _whole(each[0]))


def _whole(need: float) -> int:
    return math.ceil(need - 1e-9)


def _within(need: int, policy: ScalePolicy) -> tuple[int, str]:
    """Apply the limits, the budget last. Returns the limit that has changed the number, in words."""
    affordable = math.inf if not policy.price else policy.budget // policy.price
    wanted = int(min(max(need, policy.least), policy.most, affordable))
    if wanted == need:
        return wanted, ""
    if wanted == affordable:
        return wanted, f"; the budget allows {wanted}"
    return wanted, f"; at least {wanted} are set" if wanted > need else f"; at most {wanted} are set"


def _thinned(needs: tuple[tuple[float, float, float], ...], window: float) -> tuple[tuple[float, float, float], ...]:
    """Keep at most one entry for a hundredth of the window: the last time, the largest need, the smallest load that was
    expected."""
    kept: dict[int, tuple[float, float, float]] = {}
    for at, count, expected in needs:
        slot = int(at / window * 100)
        _, most, least = kept.get(slot, (at, count, expected))
        kept[slot] = at, max(most, count), min(least, expected)
    return tuple(kept.values())


def _remember(state: ScaleState, at: float, load: float) -> tuple[Mapping[int, float], tuple[int, float, int]]:
    """Return the buckets and the present one with a load. They are copied once a bucket."""
    number, (before, total, count), buckets = int(at // BUCKET), state.bucket, state.buckets
    if number == before:
        return buckets, (number, total + load, count + 1)
    if count:
        oldest = int((at - WEEK - DAY) // BUCKET)
        buckets = {each: mean for each, mean in buckets.items() if each >= oldest} | {before: total / count}
    return buckets, (number, load, 1)
