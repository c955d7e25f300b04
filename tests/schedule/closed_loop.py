"""Clients that send their next request when they have an answer, of a scheduler on a virtual clock.

Nothing but the scheduler runs, and the time of a step depends on its tokens alone: so the figures are exact, and those
of two policies can be compared.
"""

import heapq
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

from penstock.bench.workload import percentile
from penstock.messages import (
    Capacity,
    GenerateRequest,
    Identity,
    KVGroup,
    SamplingParams,
    SequenceResult,
    StepResult,
    TenantShare,
    Window,
)
from penstock.schedule import Scheduler, SchedulerConfig

STEP_SECONDS, TOKEN_SECONDS = 0.003, 0.0001  # a step, and each token in it
PAUSE = (0.002, 0.006)  # seconds between an answer and the next request
PLACES = 32
SETTLING = 1.0  # seconds in which all clients begin: their first tokens do not count


@dataclass(frozen=True)
class Clients:
    """The clients of a tenant."""

    count: int
    every: float = 0.0  # seconds between requests, whether they are answered or not; 0: one at a time for each client
    prompt: tuple[int, int] = (48, 144)  # fewest and most tokens
    output: tuple[int, int] = (12, 36)
    share: TenantShare = field(default_factory=TenantShare)


@dataclass
class Figures:
    """What the clients felt."""

    seconds: float = 0.0
    longest_step: float = 0.0  # seconds
    steps: int = 0
    tokens: Counter[str] = field(default_factory=Counter)  # of outputs, by tenant
    first: dict[str, list[float]] = field(default_factory=dict)  # seconds to the first token, by tenant
    preemptions: int = 0
    computed: int = 0  # tokens

    @property
    def throughput(self) -> float:
        return self.tokens.total() / self.seconds

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps

    def p99(self, tenant: str) -> float:
        return percentile(self.first[tenant], 0.99)


def run(tenants: dict[str, Clients], *, fair: bool, steps: int = 1000, seed: int = 1, **limits: int) -> Figures:
    """Run so many steps. Without `fair`, the order is that of a server without tenants."""
    capacity = Capacity(16, (KVGroup(2000, Window(0)),), 1, Identity("simulated"), vocab_size=2**31)
    limits = {"max_num_seqs": PLACES, "max_num_batched_tokens": 512, "max_model_len": 1024, **limits}
    scheduler = Scheduler(SchedulerConfig(**limits, tenants=fair), capacity)
    source, numbers = random.Random(seed), itertools.count()
    sent: dict[str, tuple[str, float]] = {}
    due = [(0.1 * source.random(), next(numbers), name) for name, each in tenants.items() for _ in range(each.count)]
    heapq.heapify(due)
    found, now = Figures(first={name: [] for name in tenants}), 0.0
    while found.steps < steps:
        while due and due[0][0] <= now:
            at, _, name = heapq.heappop(due)
            clients, number = tenants[name], next(numbers)
            request = GenerateRequest(
                request_id=str(number),
                prompt_ids=tuple(source.choices(range(2**30), k=source.randint(*clients.prompt))),
                sampling=SamplingParams(seed=1, max_tokens=source.randint(*clients.output), ignore_eos=True),
                tenant=name,
                cache_salt=name,
                share=clients.share if fair else None,
            )
            scheduler.add(request, now)
            sent[request.request_id] = name, at
            if clients.every:
                heapq.heappush(due, (at + clients.every, next(numbers), name))
        plan = scheduler.plan(now)
        if plan is None:
            now = due[0][0]
            continue
        seconds = STEP_SECONDS + TOKEN_SECONDS * sum(work.count for work in plan.work)
        now += seconds
        found.steps, found.longest_step = found.steps + 1, max(found.longest_step, seconds)
        results = tuple(SequenceResult(work.seq, (7,) if work.sample else ()) for work in plan.work)
        for delta in scheduler.apply(StepResult(plan.plan_id, results), now):
            name, at = sent[delta.request_id]
            found.tokens[name] += len(delta.token_ids)
            if delta.offset == 0 and delta.token_ids and at >= SETTLING:
                found.first[name].append(now - at)
            if delta.finish_reason is not None and not tenants[name].every:
                heapq.heappush(due, (now + source.uniform(*PAUSE), next(numbers), name))
    found.seconds = now
    stats = scheduler.stats()
    found.preemptions, found.computed = stats.preemptions, stats.computed_tokens
    return found
