"""Builds a simulation from a scenario: sizes replicas, makes engines, traffic and faults."""

from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from penstock.config import DoesNotFit, EngineConfig
from penstock.config.memory import token_bytes
from penstock.declared.settings import DEFAULTS
from penstock.engine.queue import RequestQueue
from penstock.messages import Capacity, Identity, KVGroup
from penstock.schedule import Scheduler, SchedulerConfig
from penstock.simulate.autoscale import Rate, ReplicaScaler
from penstock.simulate.batching import BatchScheduler
from penstock.simulate.clock import EventClock
from penstock.simulate.costs.analytic import AnalyticCost
from penstock.simulate.costs.devices import SimulatedDevice, find_device
from penstock.simulate.costs.fitted import FittedEngine
from penstock.simulate.costs.work import StepCostModel
from penstock.simulate.faults import Faults
from penstock.simulate.models import find_spec
from penstock.simulate.prices import PriceBook
from penstock.simulate.replica import Machine, SimulatedReplica
from penstock.simulate.routing import make_router
from penstock.simulate.scenario import ReplicaSpec, Scenario
from penstock.simulate.simulation import ReplicaPlan, Simulation
from penstock.simulate.traffic.arrivals import rate_of
from penstock.simulate.traffic.lengths import mean
from penstock.simulate.traffic.request import TokenIds
from penstock.simulate.traffic.workload import TrafficSource

VOCABULARY = 2**31  # simulated token ids are below it
NETWORK = 12.5e9  # bytes a second between replicas: a link of 100 Gbit/s
GPU_DEPTH = 2  # as in config.resolve, without speculation


@dataclass(frozen=True)
class SizedGroup:
    """What a group's replicas can hold, and what their steps cost."""

    spec: ReplicaSpec
    capacity: Capacity
    limits: SchedulerConfig
    cost: StepCostModel
    price: float  # of a device for an hour
    page_seconds: float = 0.0  # for the KV blocks of a token to come from another replica
    delay: float = 0.0  # of a step, by each result of a replica on the same processors
    together: int = 1  # replicas that share processors

    @property
    def devices(self) -> int:
        """Devices of a replica."""
        return self.spec.tensor * self.spec.pipeline


def engine_config(spec: ReplicaSpec, device: SimulatedDevice, longest: int) -> EngineConfig:
    """Returns the engine's configuration for a model whose sequences have up to `longest` tokens."""
    share = spec.machines / spec.count if spec.machines else 1.0
    return EngineConfig(
        model=spec.model,
        name=spec.model,
        device=device.kind,
        quantization=spec.quantization,
        kv_cache_dtype=spec.kv_cache,
        gpu_memory_utilization=DEFAULTS["gpu_memory_utilization"] * share,
        max_model_len=min(spec.max_model_len, longest),
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=max(spec.max_num_batched_tokens, spec.max_num_seqs),
        block_size=spec.block_size,
        tensor_parallel_size=spec.tensor,
        pipeline_parallel_size=spec.pipeline,
        depth=max(spec.pipeline, GPU_DEPTH if device.kind == "cuda" else 1),
    )


def size_group(spec: ReplicaSpec, prices: PriceBook, folder: Path) -> SizedGroup:
    """Sizes a group of replicas. Raises ValueError for what does not exist or fit."""
    if spec.cost:
        fitted = FittedEngine.read(folder / spec.cost)
        return SizedGroup(
            spec,
            fitted.capacity,
            fitted.limits,
            fitted.cost,
            spec.price or 0.0,
            delay=fitted.cost.delay,
            together=fitted.engines,
        )
    device = find_device(spec.device)
    model = find_spec(spec.model)
    engine = engine_config(spec, device, model.max_position)
    cost = AnalyticCost(model, engine, device)
    blocks = [1 + -(-spec.kv_tokens // spec.block_size)] * len(model.windows) if spec.kv_tokens else _blocks(cost)
    size = spec.block_size
    if spec.kv == "contiguous":
        size = engine.max_model_len
        blocks = [1 + (number - 1) * spec.block_size // size for number in blocks]
    groups = tuple(KVGroup(number, window) for number, window in zip(blocks, model.windows, strict=True))
    limits = SchedulerConfig(
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_model_len=engine.max_model_len,
        enable_prefix_caching=spec.prefix_caching and spec.kv == "paged",
        target_step_time=spec.target_step_ms / 1e3,
        tenants=spec.tenants,
    )
    capacity = Capacity(
        size, groups, engine.depth, Identity(spec.model), vocab_size=VOCABULARY, late_ids=spec.pipeline == 1
    )
    price = prices.hour(device.name, spot=spec.spot) if spec.price is None else spec.price
    return SizedGroup(spec, capacity, limits, cost, price, sum(token_bytes(cost.whole, engine)) / NETWORK)


def _blocks(cost: AnalyticCost) -> list[int]:
    """Returns the blocks of each KV group that fit. Raises DoesNotFit, which names the model and the device."""
    engine, device = cost.engine, cost.device
    try:
        return list(cost.memory.num_blocks)
    except DoesNotFit as error:
        raise DoesNotFit(f"{engine.name} on {engine.split.world} x {device.name}: {error}") from None


def build(scenario: Scenario, prices: PriceBook, folder: Path) -> Simulation:
    """Returns a simulation that is ready to run. Raises ValueError for what a scenario cannot have.

    `folder`: paths in the scenario are relative to it.
    """
    clock, ids, numbers = EventClock(), TokenIds(), count(1)
    traffics = [
        TrafficSource(spec, scenario.duration, scenario.seed, folder, ids, numbers)
        for spec in scenario.traffic.values()
    ]
    plans: dict[str, ReplicaPlan] = {}
    groups: dict[str, list[str]] = {}
    for group, spec in scenario.replicas.items():
        sized = size_group(spec, prices, folder)
        machines = [Machine() for _ in range(spec.machines)]
        beside: dict[str, SimulatedReplica] = {}
        for number in range(spec.count):
            if number % sized.together == 0:
                beside = {}
            name = f"{group}-{number}"
            groups.setdefault(group, []).append(name)
            machine = machines[number % spec.machines] if machines else None
            plans[name] = ReplicaPlan(
                partial(_make_replica, sized, name, group, machine, beside, clock),
                price=sized.price,
                devices=sized.devices,
                share=spec.machines / spec.count if spec.machines else 1.0,
                start_seconds=spec.start_seconds,
            )
    targets = {name for group, spec in scenario.replicas.items() for name in (group, spec.model, *groups[group])}
    for traffic in scenario.traffic.values():
        wanted = traffic.model if traffic.models == 1 else f"{traffic.model}-{traffic.models - 1}"
        if wanted and wanted not in targets:
            raise ValueError(
                f"the traffic {traffic.name!r} is for {wanted!r}, which no replica has: name one of {sorted(targets)}"
            )
    simulation = Simulation(
        plans,
        make_router(scenario.router, scenario.seed),
        traffics,
        clock,
        duration=scenario.duration,
        drain=scenario.drain,
        front_seconds=scenario.front_seconds,
        tracks=bool(scenario.faults),
    )
    regions = {spec.region for spec in scenario.replicas.values()}
    faults = Faults(simulation, groups, regions, scenario.seed, scenario.duration)
    for name, fault in scenario.faults.items():
        faults.schedule(name, fault)
    scaled = {each.group for each in scenario.autoscale.values()}
    for group, members in groups.items():
        for name in members if group not in scaled else ():
            simulation.start(name, 0.0)
    for each in scenario.autoscale.values():
        seconds = scenario.replicas[each.group].start_seconds
        ReplicaScaler(simulation, each, groups[each.group], seconds, _expected_load(scenario)).begin()
    return simulation


def _expected_load(scenario: Scenario) -> Rate:
    """Returns the mean of the tokens that requests bring in a second, as a function of time. Traffic without a rate,
    such as a trace, counts as none."""
    parts = [
        (rate_of(spec.arrivals, scenario.duration)[0], mean(spec.prompt) + mean(spec.output))
        for spec in scenario.traffic.values()
        if spec.arrivals is not None
    ]
    return lambda at: sum(rate(at) * tokens for rate, tokens in parts)


def _make_replica(
    sized: SizedGroup,
    name: str,
    group: str,
    machine: Machine | None,
    beside: dict[str, SimulatedReplica],
    clock: EventClock,
) -> SimulatedReplica:
    """Returns a replica, empty. Without `machine` it has one of its own."""
    spec, capacity = sized.spec, sized.capacity
    slots, scheduler = sized.limits.max_num_seqs, None
    if spec.batching != "continuous":
        # A batch reserves max_model_len tokens for each row, as there are no pages.
        room = min((group.num_blocks - 1) * capacity.block_size for group in capacity.groups)
        slots = max(min(spec.batch, room // sized.limits.max_model_len), 1)
        scheduler = BatchScheduler(slots, spec.window)
    queue = RequestQueue(
        max_num_seqs=slots, max_waiting=spec.max_waiting, max_waiting_tokens=DEFAULTS["max_waiting_tokens"], clock=clock
    )
    return SimulatedReplica(
        name,
        group,
        name if spec.own_models else spec.model,
        spec.region,
        scheduler or Scheduler(sized.limits, capacity),
        capacity,
        sized.cost,
        machine or Machine(),
        queue,
        clock,
        role=spec.role,
        page_seconds=sized.page_seconds,
        step_tokens=sized.limits.max_num_batched_tokens,
        round_trip=spec.round_trip,
        beside=beside,
        delay=sized.delay,
    )
