"""The time that a simulation takes, beside the time of its schedulers alone."""

import gc
import resource
import time
from collections import deque
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

from penstock.messages import GenerateRequest, SequenceResult, StepPlan, StepResult
from penstock.schedule import Scheduler
from penstock.simulate.build import build, size_group
from penstock.simulate.costs.counter import StepCounter
from penstock.simulate.figures import figures_of
from penstock.simulate.prices import load_prices
from penstock.simulate.simulation import Simulation
from penstock.simulate.traffic.request import SimulatedRequest
from simulator_figures.traces import mooncake


def speed_figures(trace: Path, routers: Sequence[str], rounds: int) -> dict[str, Any]:
    """Returns seconds of CPU for each router, and in turn for the schedulers alone with the requests that it sent.

    What a simulation leaves behind is freed before the next one begins, and the prompts of requests that have ended are
    not kept: both would make later simulations slower than they are for a user.
    """
    found: dict[str, Any] = {"trace": trace.name}
    for router in routers:
        found[router] = {"seconds": [], "schedulers alone": []}
    for _ in range(rounds):
        for router in routers:
            scenario = mooncake(trace, router)
            simulation = build(scenario, load_prices(), Path())
            sent = _recorded(simulation)
            begin = time.process_time()
            outcome = simulation.run()
            found[router]["seconds"].append(round(time.process_time() - begin, 2))
            found[router]["figures"] = figures_of(outcome, scenario.slo)
            del simulation, outcome
            gc.collect()
            found[router]["steps"], seconds = _schedulers_alone(scenario, sent)
            found[router]["schedulers alone"].append(round(seconds, 2))
    for router in routers:
        pairs = zip(found[router]["seconds"], found[router]["schedulers alone"], strict=True)
        found[router]["ratios"] = [round(whole / alone, 3) for whole, alone in pairs]
    return {**found, "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}


def _recorded(simulation: Simulation) -> list[tuple[int, str, SimulatedRequest]]:
    """Returns a list that gets what is sent to each replica, and when."""
    sent: list[tuple[int, str, SimulatedRequest]] = []
    for replica in simulation.replicas.values():
        book = replica.book

        def noted(request: SimulatedRequest, uncached: int, *, name: str = replica.name, book: Any = book) -> None:
            sent.append((simulation.clock.ns, name, copy(request)))  # a copy has no token ids yet
            book(request, uncached)

        replica.book = noted  # type: ignore[method-assign]
    return sent


def _schedulers_alone(scenario: Any, sent: list[tuple[int, str, SimulatedRequest]]) -> tuple[int, float]:
    """Runs bare schedulers on the same requests at the same times: plan, count, apply. Returns the steps, and the
    seconds without those in which the requests are made."""
    sized = size_group(scenario.replicas["engine"], load_prices(), Path())
    steps, seconds = 0, 0.0
    for name in dict.fromkeys(name for _, name, _ in sent):
        arrivals = [(at, request.message()) for at, replica, request in sent if replica == name]
        begin = time.process_time()
        steps += _one_scheduler(sized, arrivals)
        seconds += time.process_time() - begin
    return steps, seconds


def _one_scheduler(sized: Any, arrivals: list[tuple[int, GenerateRequest]]) -> int:
    scheduler = Scheduler(sized.limits, sized.capacity)
    counter, results = StepCounter(), dict[int, SequenceResult]()
    outstanding: deque[tuple[int, StepPlan]] = deque()
    now = free = steps = place = 0
    depth = sized.capacity.depth
    while place < len(arrivals) or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, arrivals[place][0])
        while place < len(arrivals) and arrivals[place][0] <= now:
            scheduler.add(arrivals[place][1], now / 1e9)
            place += 1
        while len(outstanding) < depth and (plan := scheduler.plan(now / 1e9)) is not None:
            free = max(now, free) + round(sized.cost.seconds(counter.count(plan)) * 1e9)
            for new in plan.new:
                results[new.seq] = SequenceResult(new.seq, (new.sampling.seed,))
            outstanding.append((free, plan))
        end, plan = outstanding.popleft()
        now = max(now, end)
        answers = tuple([results[work.seq] if work.sample else SequenceResult(work.seq) for work in plan.work])
        scheduler.apply(StepResult(plan.plan_id, answers), now / 1e9)
        steps += 1
    return steps
