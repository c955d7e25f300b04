"""The workloads of the paper on VTC (arXiv 2401.00588), small enough for a test, and its algorithm 2 as published."""

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Arrival(NamedTuple):
    step: int  # before which it comes
    tenant: str
    prompt: int  # tokens
    output: int


def steady(tenant: str, every: int, steps: range, prompt: int = 8, output: int = 8) -> list[Arrival]:
    """A request each `every` steps."""
    return [Arrival(step, tenant, prompt, output) for step in steps if step % every == 0]


def poisson(tenant: str, rate: float, steps: int, prompt: int, output: int, seed: int) -> list[Arrival]:
    """`rate` requests a step on average."""
    source, found, at = random.Random(seed), [], 0.0
    while (at := at + source.expovariate(rate)) < steps:
        found.append(Arrival(int(at), tenant, prompt, output))
    return found


def on_off(tenant: str, every: int, steps: int, period: int, prompt: int = 8, output: int = 8) -> list[Arrival]:
    """Requests in every second period."""
    return [each for each in steady(tenant, every, range(steps), prompt, output) if each.step // period % 2 == 0]


STEPS = 120


def _increase() -> list[Arrival]:
    source = random.Random(5)
    return [Arrival(step, "b", 8, 8) for step in range(STEPS) if source.random() < step / STEPS]


WORKLOADS: dict[str, Callable[[], list[Arrival]]] = {
    "overload": lambda: steady("a", 2, range(STEPS)) + steady("b", 1, range(STEPS)),
    "proportional": lambda: [
        *steady("a", 4, range(STEPS)),
        *steady("b", 2, range(STEPS)),
        *steady("c", 1, range(STEPS)),
    ],
    "on_off_less": lambda: on_off("a", 6, STEPS, 30) + steady("b", 1, range(STEPS)),
    "on_off_overload": lambda: on_off("a", 1, STEPS, 30) + steady("b", 1, range(STEPS)),
    "poisson_short_long": lambda: poisson("a", 1.0, STEPS, 4, 12, 1) + poisson("b", 0.5, STEPS, 24, 4, 2),
    "poisson_overload": lambda: poisson("a", 0.4, STEPS, 6, 10, 3) + poisson("b", 2.0, STEPS, 6, 10, 4),
    "increase": lambda: steady("a", 2, range(STEPS)) + _increase(),
    "dist_shift": lambda: (
        on_off("a", 1, STEPS, 40)
        + steady("b", 1, range(STEPS // 3), 4, 4)
        + steady("b", 1, range(STEPS // 3, STEPS), 20, 10)
    ),
}


def arrivals(name: str) -> dict[int, list[tuple[str, Arrival]]]:
    """The requests of a workload with their ids, by step."""
    found: dict[int, list[tuple[str, Arrival]]] = {}
    for number, each in enumerate(sorted(WORKLOADS[name]())):
        found.setdefault(each.step, []).append((f"{each.tenant}{number:04}", each))
    return found


@dataclass
class _Running:
    tenant: str
    left: int


def published_order(trace: dict[int, list[tuple[str, Arrival]]], places: int, steps: int) -> list[str]:
    """The order in which algorithm 2 starts requests: input price 1, output price 2, `places` in the batch."""
    counters: dict[str, float] = {}
    queue: dict[str, deque[tuple[str, Arrival]]] = {}
    running: list[_Running] = []
    order: list[str] = []
    last = ""
    returned = set[str]()  # tenants that had nothing that waited, and have started nothing since

    def waiting() -> Iterable[str]:
        return (tenant for tenant, line in queue.items() if line)

    for step in range(steps):
        for name, each in trace.get(step, ()):
            line = queue.setdefault(each.tenant, deque())
            if not line:
                least = min((counters[tenant] for tenant in waiting()), default=counters.get(last, 0.0))
                returned.add(each.tenant)
                counters[each.tenant] = max(counters.get(each.tenant, 0.0), least)
            line.append((name, each))
        while len(running) < places and any(waiting()):
            tenant = min(
                waiting(),
                key=lambda tenant: (
                    counters[tenant],
                    tenant not in returned,  # the paper leaves ties open
                    *(queue[tenant][0][1].step, queue[tenant][0][0][1:]),
                ),
            )
            returned.discard(tenant)
            name, each = queue[tenant].popleft()
            counters[tenant] += each.prompt
            last = tenant
            running.append(_Running(tenant, each.output))
            order.append(name)
        for each_running in running:
            counters[each_running.tenant] += 2
            each_running.left -= 1
        running = [each_running for each_running in running if each_running.left]
    return order
