"""Measures the time of the scheduler's plan and apply, and the share of its KV memory that is wasted.

The executor answers at once with one token per sequence, so that all time is the scheduler's. Both wall time and CPU
time are reported; on a machine with other load only CPU time is meaningful. Waste is 1 - (tokens whose KV is computed)
/ (token slots of the blocks held), averaged over the steps of a conversation-like mix: lognormal prompts and outputs, a
new request for each that ends, no common prefixes.

    python benchmarks/schedule.py --json benchmarks/results/avx512/schedule.json
"""

import math
import random
import time
from collections import deque
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

from results import parser, write

from penstock.messages import (
    Capacity,
    GenerateRequest,
    Identity,
    KVGroup,
    SamplingParams,
    SequenceResult,
    StepPlan,
    StepResult,
    TenantShare,
    Window,
)
from penstock.schedule import Scheduler, SchedulerConfig

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
VOCABULARY = 50_000  # sampled ids are below it; the stop token is above and never sampled


class Stopwatch:
    """Adds up the wall and CPU µs of the calls made through it, for each `lap`."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self._lap = [0.0, 0.0]

    def call(self, function: Callable[..., Any], *arguments: object) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        result = function(*arguments)
        self._lap[1] += time.thread_time() - cpu
        self._lap[0] += time.perf_counter() - wall
        return result

    def lap(self, keep: bool) -> None:
        if keep:
            self.wall.append(self._lap[0] * 1e6)
            self.cpu.append(self._lap[1] * 1e6)
        self._lap = [0.0, 0.0]

    def figures(self) -> dict[str, float]:
        named = {"us": self.wall, "cpu_us": self.cpu}
        p50 = {f"p50_{unit}": round(median(times), 1) for unit, times in named.items()}
        return p50 | {f"p99_{unit}": round(quantiles(times, n=100)[98], 1) for unit, times in named.items()}


def answer(plan: StepPlan, rng: random.Random) -> StepResult:
    """A result with one token for every unit of work that samples."""
    results = [SequenceResult(work.seq, (rng.randrange(VOCABULARY),) if work.sample else ()) for work in plan.work]
    return StepResult(plan.plan_id, tuple(results))


def request(number: int, prompt: int, output: int, rng: random.Random) -> GenerateRequest:
    return GenerateRequest(
        request_id=str(number),
        prompt_ids=tuple(rng.randrange(VOCABULARY) for _ in range(prompt)),
        sampling=SamplingParams(seed=number, max_tokens=output, eos_token_ids=(VOCABULARY,)),
        arrival=1.0 + number,
        tenant=f"t{number % 2}",
        share=TenantShare(),
    )


def conversation_request(number: int, rng: random.Random) -> GenerateRequest:
    """A request with lengths as in public chat traces: medians of 160 and 180 tokens, with long tails."""
    prompt = min(max(int(rng.lognormvariate(math.log(160), 1.0)), 4), 2000)
    output = min(max(int(rng.lognormvariate(math.log(180), 0.8)), 4), 1500)
    return request(number, prompt, output, rng)


def scheduler_for(running: int, windows: tuple[int, ...], depth: int, tenants: bool) -> Scheduler:
    """A scheduler with enough blocks that no sequence is preempted."""
    blocks = 1 + running * MAX_MODEL_LEN // BLOCK_SIZE
    groups = tuple(KVGroup(blocks, Window(window)) for window in windows)
    config = SchedulerConfig(
        max_num_seqs=running,
        max_num_batched_tokens=max(2048, running),
        max_model_len=MAX_MODEL_LEN,
        tenants=tenants,
    )
    return Scheduler(config, Capacity(BLOCK_SIZE, groups, depth, Identity("benchmark"), vocab_size=1 << 20))


def decode_time(
    running: int, steps: int, windows: tuple[int, ...], depth: int, *, tenants: bool = False
) -> dict[str, float]:
    """Times plan + apply while `running` sequences decode and none starts or ends."""
    rng = random.Random(0)
    scheduler = scheduler_for(running, windows, depth, tenants)
    for number in range(running):
        scheduler.add(request(number, rng.randrange(16, 512), MAX_MODEL_LEN, rng), 1.0)
    outstanding: deque[StepPlan] = deque()
    watch = Stopwatch()
    while len(watch.wall) < steps:
        plan = watch.call(scheduler.plan, 2.0)
        outstanding.append(plan)
        if len(outstanding) < depth:
            continue
        result = answer(outstanding.popleft(), rng)
        watch.call(scheduler.apply, result, 2.0)
        watch.lap(keep=sum(len(r.token_ids) for r in result.results) == running)
    return watch.figures()


def conversations(running: int, steps: int, windows: tuple[int, ...], *, tenants: bool = False) -> dict[str, float]:
    """Measures waste and plan + apply while requests start and end. The first tenth of the steps is a warm-up."""
    rng = random.Random(1)
    scheduler = scheduler_for(running, windows, 1, tenants)
    watch = Stopwatch()
    computed: dict[int, int] = {}  # by sequence
    waste: list[float] = []
    number = ended = 0
    for step in range(steps):
        while number - ended < running:
            scheduler.add(conversation_request(number, rng), 1.0 + number)
            number += 1
        plan = watch.call(scheduler.plan, 1.0 + number)
        for seq in plan.gone:
            del computed[seq]
        computed.update((new.seq, new.num_computed) for new in plan.new)
        for work in plan.work:
            computed[work.seq] += work.count
        keep = step >= steps // 10
        if keep:
            for window, held in zip(windows, scheduler.stats().blocks_held, strict=True):
                used = sum(min(tokens, window or tokens) for tokens in computed.values())
                waste.append(1 - used / (held * BLOCK_SIZE))
        deltas = watch.call(scheduler.apply, answer(plan, rng), 1.0 + number)
        watch.lap(keep)
        ended += sum(delta.finish_reason is not None for delta in deltas)
    return {"kv_waste": round(sum(waste) / len(waste), 4), "requests": number, **watch.figures()}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--running", type=int, default=256, help="sequences that decode at a time")
    arguments.add_argument("--steps", type=int, default=2000, help="measured steps, at most 3000")
    args = arguments.parse_args()
    rows: list[dict[str, Any]] = []
    for name, windows, depth in (
        ("decode", (0,), 1),
        ("decode, depth 2", (0,), 2),
        ("decode, full and window groups", (0, 512), 1),
    ):
        rows.append({"case": name, **decode_time(args.running, args.steps, windows, depth)})
    rows.append({"case": "decode, two tenants", **decode_time(args.running, args.steps, (0,), 1, tenants=True)})
    rows.append({"case": "conversations", **conversations(args.running, args.steps, (0,))})
    rows.append({"case": "conversations, two tenants", **conversations(args.running, args.steps, (0,), tenants=True)})
    write({"benchmark": "schedule", "running": args.running, "block_size": BLOCK_SIZE, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
