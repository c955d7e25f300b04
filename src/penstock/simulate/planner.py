"""Plans a fleet: which devices, how many, how divided and quantised, for some traffic at the least cost.

Candidates are estimated with formulas, the cheapest are simulated. The formulas are those of a queue in equilibrium:
a replica gets `rate` requests a second, each of which takes `prefill` seconds of steps with its prompt and then one
row in decode steps. With B rows, a decode step takes step(B) seconds; prompts take rate * prefill of the time. So

    TPOT = step(B) / (1 - rate * prefill),  B = rate * output * TPOT (Little's law).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import msgspec

from penstock.config import ConfigError, DoesNotFit
from penstock.families import CannotSplit
from penstock.families.shard import possible_splits
from penstock.simulate.build import SizedGroup, build, size_group
from penstock.simulate.costs.analytic import AnalyticCost
from penstock.simulate.costs.devices import DEVICES
from penstock.simulate.costs.work import StepLoad
from penstock.simulate.figures import figures_of
from penstock.simulate.models import find_spec
from penstock.simulate.prices import PriceBook, ProviderPrice
from penstock.simulate.scenario import ReplicaSpec, Scenario, Targets
from penstock.simulate.traffic.arrivals import Poisson
from penstock.simulate.traffic.lengths import LogNormal
from penstock.simulate.traffic.workload import Shared, TrafficSpec

MAX_REPLICAS = 400
MAX_DEVICES = 16  # of a replica
SIGMA = 0.6  # of the logarithm of lengths: between fixed lengths and the long tails of public traces
QUANTIZATIONS: Mapping[str, Sequence[Literal["none", "int8", "int4", "fp8"]]] = MappingProxyType(
    {"cuda": ("none", "fp8", "int8", "int4"), "cpu": ("none", "int8", "int4")}
)
SIMULATED_REQUESTS = 1500  # to verify a candidate,
LONGEST_SECONDS = 1e6  # in which as many come: fewer of very rare ones are simulated
WEIGHT_BYTES = {"none": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}  # of a parameter, at least
GRID = 1.08  # numbers of rows whose steps are estimated differ by this factor
SLOWEST, FASTEST = 1e-3, 1e5  # requests a second of a replica,
BISECTIONS = 20  # between which its capacity is found
ROUNDS = 4  # of adding replicas until a simulation meets the target


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic, and what it needs. Lengths are means in tokens, times in seconds."""

    model: str
    rate: float  # requests a second at the busiest time
    prompt: int
    output: int
    cached: float = 0.0  # share of a prompt that others begin with, too
    ttft: float = 1.0
    tpot: float = 0.05
    share: float = 0.95  # of the requests that keep to both

    def __post_init__(self) -> None:
        for name, value, most in (
            ("--rate", self.rate, 1e5),
            ("--prompt", self.prompt, 1e6),
            ("--output", self.output, 1e6),
            ("--ttft", self.ttft, 3600),
            ("--tpot", self.tpot, 60),
        ):
            if not 0 < value <= most:
                raise ValueError(f"{name} is {value}: give a number above 0, up to {most:.10g}")
        for name, value, least in (("--cached", self.cached, 0), ("--share", self.share, 0.5)):
            if not least <= value < 1:
                raise ValueError(f"{name} is {value}: give a number from {least} to less than 1")


@dataclass(frozen=True)
class FleetCandidate:
    """A fleet that should do, by the formulas; and as simulated, if it was."""

    replica: ReplicaSpec
    count: int
    hour: float  # money
    rate: float  # requests a second that one replica can take
    rows: float  # in a decode step, at the demand
    ttft: float  # at the share of the demand, estimated
    tpot: float
    bottleneck: str
    load: float  # of `rate` that each replica gets
    attained: float | None = None  # share of simulated requests that kept to the targets
    interval: tuple[float, float] = (0.0, 1.0)  # of the same, at 95%

    @property
    def devices(self) -> int:
        return self.count * self.replica.tensor * self.replica.pipeline


def replicas_for(demand: Demand, devices: Sequence[str]) -> Iterator[ReplicaSpec]:
    """Yields the replicas to try: devices, splits, quantisations."""
    spec = find_spec(demand.model)
    longest = min(4 * (demand.prompt + demand.output), spec.max_position)
    if demand.prompt + demand.output > longest:
        raise ValueError(
            f"prompts of {demand.prompt} and outputs of {demand.output} tokens exceed the {longest} tokens that "
            f"{demand.model} was made for: shorten them"
        )
    for name in devices:
        kind = DEVICES[name].kind
        for split in possible_splits(spec, MAX_DEVICES if kind == "cuda" else 1, 128):
            if split.expert or split.tensor > 8 or (split.pipeline > 1 and split.tensor < 8):
                continue  # stages pay only where a machine's devices do not suffice
            for quantization in QUANTIZATIONS[kind]:
                if quantization == "fp8" and DEVICES[name].flops8 == DEVICES[name].flops:
                    continue
                if spec.num_parameters() * WEIGHT_BYTES[quantization] / split.world > DEVICES[name].memory:
                    continue
                yield ReplicaSpec(
                    model=demand.model,
                    device=name,
                    tensor=split.tensor,
                    pipeline=split.pipeline,
                    quantization=quantization,
                    kv_cache="fp8" if quantization == "fp8" else "auto",
                    max_model_len=longest,
                    max_num_batched_tokens=2048,
                    target_step_ms=1e3 * demand.tpot,
                )


class NoFleet(ValueError):
    """No number of replicas serves a demand. `alone`: TTFT and TPOT of a request that a replica computes alone, if
    these miss the targets. `many`: it takes more replicas than are planned for."""

    def __init__(self, alone: tuple[float, float] | None = None, *, many: bool = False) -> None:
        super().__init__("no number of replicas serves it")
        self.alone, self.many = alone, many


def estimate(demand: Demand, sized: SizedGroup) -> FleetCandidate:
    """Returns how many of these replicas the demand needs. Raises NoFleet if no number serves it."""
    assert isinstance(sized.cost, AnalyticCost)
    load, best = _ReplicaLoad(demand, sized), None
    exponents = 0.0, math.log2(FASTEST / SLOWEST)
    for _ in range(BISECTIONS):
        middle = sum(exponents) / 2
        found = load.at(SLOWEST * 2**middle)
        if found is not None and found[0] <= demand.ttft and found[1] <= demand.tpot:
            exponents, best = (middle, exponents[1]), found
        else:
            exponents = exponents[0], middle
    if best is None:
        alone = load.at(SLOWEST)
        raise NoFleet(None if alone is None else alone[:2])
    low = SLOWEST * 2 ** exponents[0]
    count = math.ceil(demand.rate / low)
    if count > MAX_REPLICAS:
        raise NoFleet(many=True)
    ttft, tpot, rows = load.at(demand.rate / count) or best
    hour = count * sized.devices * sized.price
    return FleetCandidate(
        sized.spec, count, hour, low, rows, ttft, tpot, load.bottleneck(low), demand.rate / count / low
    )


class _ReplicaLoad:
    """The times of one replica at some rate."""

    def __init__(self, demand: Demand, sized: SizedGroup) -> None:
        self._demand, self._sized = demand, sized
        prompt = max(round(demand.prompt * (1 - demand.cached)), 1)
        seen, cost = demand.prompt - prompt, sized.cost
        chunk = sized.limits.max_num_batched_tokens
        self._prefill = 0.0
        for start in range(0, prompt, chunk):
            size = min(chunk, prompt - start)
            pairs = size * (seen + start + (size + 1) // 2)
            whole = cost.seconds(StepLoad(0, 0, size, pairs, seen + start + size, 0))
            self._prefill += whole / cost.stages
        # Lengths vary: E[prefill²] is larger than the square of the mean.
        self._square = self._prefill**2 * math.exp(SIGMA**2)
        self._tail = -math.log(1 - demand.share)
        held = demand.prompt * (1 - demand.cached) + demand.output / 2 + sized.capacity.block_size
        room = min((group.num_blocks - 1) * sized.capacity.block_size for group in sized.capacity.groups)
        self._most_by_memory = room / (held * 1.2)
        self._most = min(self._most_by_memory, sized.limits.max_num_seqs)

    def at(self, rate: float) -> tuple[float, float, float] | None:
        """Returns TTFT and TPOT at the demand's share, and rows; None if the replica cannot keep up."""
        demand, cost = self._demand, self._sized.cost
        prompts = rate * self._prefill
        if prompts >= 0.95:
            return None
        rows = 1.0
        for _ in range(60):
            step = self._step(rows)
            tpot = step / (1 - prompts)
            following = max(rate * demand.output * tpot, 1e-3)
            if following > 4 * self._most:
                return None
            if abs(following - rows) < 1e-3 * rows:
                break
            rows = (rows + following) / 2
        # A tail of requests runs beside more rows and prompts than the mean.
        spread = rows + 1.3 * self._tail**0.5 * math.sqrt(max(rows, 1.0))
        if spread > self._most:
            return None
        slow = self._step(spread) / (1 - prompts) * (1 + prompts / 2)
        wait = rate * self._square / (2 * (1 - prompts))
        ttft = self._prefill * cost.stages * 1.6 + wait * self._tail + self._step(spread)
        return ttft, slow, rows

    def _step(self, rows: float) -> float:
        whole = round(GRID ** round(math.log(max(rows, 1.0), GRID)))
        cost, demand = self._sized.cost, self._demand
        context = round(whole * (demand.prompt + demand.output / 2))
        return cost.seconds(StepLoad(decodes=whole, decode_context=context, sampled=whole))

    def bottleneck(self, rate: float) -> str:
        """Returns what keeps a replica from more than `rate`."""
        found = self.at(rate * 1.05)
        if found is not None:
            return "the time to the first token" if found[0] > self._demand.ttft else "the time of a decode step"
        if rate * self._prefill > 0.9:
            return "the computing of prompts"
        return "memory for the KV cache" if self._most == self._most_by_memory else "max_num_seqs"


def search(demand: Demand, prices: PriceBook, devices: Sequence[str]) -> list[FleetCandidate]:
    """Returns the candidates, the cheapest first: the best of each device and quantisation. Of equal prices, the one
    with fewer devices and then more exact weights comes first. Raises ValueError if there is none, with the reason."""
    best: dict[tuple[str, str], FleetCandidate] = {}
    reasons: list[NoFleet] = []
    for replica in replicas_for(demand, devices):
        try:
            found = estimate(demand, size_group(replica, prices, Path()))
        except (DoesNotFit, CannotSplit, ConfigError):
            continue
        except NoFleet as error:
            reasons.append(error)
            continue
        key = (replica.device, replica.quantization)
        if key not in best or found.hour < best[key].hour:
            best[key] = found
    if not best:
        raise ValueError(
            f"no fleet of {', '.join(devices)} serves {demand.rate:g} requests/s of {demand.model} with a TTFT of "
            f"{demand.ttft:g} s and a TPOT of {demand.tpot:g} s: {_why_none(reasons)}"
        )
    return sorted(best.values(), key=lambda each: (each.hour, each.devices, each.replica.device))


def _why_none(reasons: Sequence[NoFleet]) -> str:
    alone = [error.alone for error in reasons if error.alone]
    if any(error.many for error in reasons):
        return (
            f"it takes more than {MAX_REPLICAS} replicas; plan for a part of --rate, or name faster devices (--device)"
        )
    if alone:
        ttft, tpot = (min(times) for times in zip(*alone, strict=True))
        why = f"a request alone takes {ttft:.2g} s and {tpot:.2g} s at least; give a longer --ttft or --tpot, or name "
        return f"{why}faster devices (--device)"
    return "the model and its KV cache do not fit; name devices with more memory (--device)"


def verify_cheapest(
    demand: Demand,
    found: Sequence[FleetCandidate],
    prices: PriceBook,
    count: int,
    say: Callable[[FleetCandidate], None],
) -> list[FleetCandidate]:
    """Returns the candidates with the `count` cheapest as simulated. Those that miss the target come last. A simulation
    may add replicas, and then another candidate is among the cheapest."""
    unseen, seen = list(found), list[FleetCandidate]()
    while unseen and len(seen) < 3 * count:
        if sum(each.hour <= unseen[0].hour for each in seen if _attains(demand, each)) >= count:
            break
        say(unseen[0])
        seen.append(verify(demand, unseen.pop(0), prices))
    return sorted([*seen, *unseen], key=lambda each: (not _attains(demand, each), each.hour, each.devices))


def _attains(demand: Demand, candidate: FleetCandidate) -> bool:
    return candidate.attained is None or candidate.attained >= demand.share


def verify(demand: Demand, candidate: FleetCandidate, prices: PriceBook, seed: int = 1) -> FleetCandidate:
    """Returns the candidate as simulated. Replicas are added until the target is met, at most a few times."""
    for _ in range(ROUNDS):
        candidate = _simulated(demand, candidate, prices, seed)
        if _attains(demand, candidate):
            return candidate
        before, count = candidate.count, candidate.count + max(round(candidate.count * 0.1), 1)
        hour, load = candidate.hour / before * count, candidate.load * before / count
        candidate = replace(candidate, count=count, hour=hour, load=load)
    return _simulated(demand, candidate, prices, seed)


def _simulated(demand: Demand, candidate: FleetCandidate, prices: PriceBook, seed: int) -> FleetCandidate:
    """Simulates a part of a large fleet: as many replicas as SIMULATED_REQUESTS keep busy long enough."""
    count = min(candidate.count, 8)
    rate = demand.rate * count / candidate.count
    duration = min(max(SIMULATED_REQUESTS / rate, 2 * demand.output * demand.tpot), LONGEST_SECONDS)
    outcome = build(_scenario(demand, candidate, count, rate, duration, seed), prices, Path()).run()
    figures = figures_of(outcome, Targets(ttft=demand.ttft, tpot=demand.tpot))
    attained, total = figures["attained_pct"], len(outcome.requests)
    if attained is None:
        return candidate
    return replace(candidate, attained=attained / 100, interval=_wilson(attained / 100, total))


def _scenario(
    demand: Demand, candidate: FleetCandidate, count: int, rate: float, duration: float, seed: int
) -> Scenario:
    shared = round(demand.prompt * demand.cached)
    own = max(demand.prompt - shared, 1)
    lengths = [
        LogNormal(mean / math.exp(SIGMA**2 / 2), SIGMA, 4 * mean) for mean in (max(own, 2), max(demand.output, 2))
    ]
    traffic = TrafficSpec(
        name="demand",
        arrivals=Poisson(rate),
        prompt=lengths[0],
        output=lengths[1],
        shared=Shared(shared) if shared else None,
    )
    replica = msgspec.structs.replace(candidate.replica, count=count)
    return Scenario(
        title="verify", traffic={"demand": traffic}, replicas={"fleet": replica}, seed=seed, duration=duration
    )


def _wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Returns the interval of a share of `count` (Wilson, 1927)."""
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(middle - half, 0.0), min(middle + half, 1.0)


class SuggestedChange(msgspec.Struct, frozen=True):
    """One setting to change, and the cost of an hour with it."""

    what: str
    hour: float


def best_change(demand: Demand, candidate: FleetCandidate, prices: PriceBook) -> SuggestedChange | None:
    """Returns the one setting that saves most, by the formulas; None if none saves anything."""
    spec, changes = candidate.replica, []
    tried: list[tuple[str, Demand, ReplicaSpec]] = [
        ("--max-num-seqs 512", demand, msgspec.structs.replace(spec, max_num_seqs=512)),
        ("a TPOT target 1.5 times as long", msgspec.structs.replace(demand, tpot=1.5 * demand.tpot), spec),
        ("a TTFT target twice as long", msgspec.structs.replace(demand, ttft=2 * demand.ttft), spec),
    ]
    if spec.kv_cache == "auto":
        kept = "int8" if DEVICES[spec.device].kind == "cpu" else "fp8"
        tried.append((f"--kv-cache-dtype {kept}", demand, msgspec.structs.replace(spec, kv_cache=kept)))
    if not demand.cached:
        shared = msgspec.structs.replace(demand, cached=0.5)
        tried.append(("prompts that share their first half, for the prefix cache", shared, spec))
    base = estimate(demand, size_group(spec, prices, Path()))
    for what, changed, replica in tried:
        try:
            found = estimate(changed, size_group(replica, prices, Path()))
        except (DoesNotFit, ConfigError, NoFleet):
            continue
        if found.hour < base.hour:
            changes.append(SuggestedChange(what, candidate.hour * found.hour / base.hour))
    return min(changes, key=lambda change: change.hour, default=None)


class Purchase(msgspec.Struct, frozen=True):
    """A provider's price for the same traffic, around the clock, and the volume at which a replica costs the same."""

    provider_day: float
    fleet_day: float
    tokens_day: float  # prompt and output
    break_even: float  # tokens a day at which one replica costs as much as the provider; inf: it can serve less
    price: ProviderPrice


def purchase(demand: Demand, candidates: Sequence[FleetCandidate], prices: PriceBook) -> Purchase:
    """Compares the first candidate with a provider, at the demand's rate all day."""
    price = prices.provider(find_spec(demand.model).num_parameters())
    tokens = demand.prompt + demand.output
    token = (demand.prompt * price.input + demand.output * price.output) / 1e6 / tokens
    evens = [24 * one.hour / one.count / token if token else math.inf for one in candidates]
    able = [even for even, one in zip(evens, candidates, strict=True) if even <= one.rate * 86400 * tokens]
    day = demand.rate * 86400 * tokens
    return Purchase(day * token, 24 * candidates[0].hour, day, min(able, default=math.inf), price)
