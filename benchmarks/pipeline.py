"""Measures how much faster two stages of a pipeline are when they overlap. Each stage has one core.

The same processes execute the same plans, each with half of the sequences. They alternate between one outstanding plan
and as many as there are stages. Both decoding and a long prompt in chunks are measured.

    python benchmarks/pipeline.py --json benchmarks/results/avx512/pipeline.json
"""

import statistics
import tempfile
import time
from pathlib import Path

from make_model import write_model
from results import parser, write

from penstock.config import EngineConfig
from penstock.engine.main import scheduler_config
from penstock.engine.ranks.workers import WorkersExecutor
from penstock.messages import Capacity, GenerateRequest, SamplingParams, StepResult
from penstock.schedule import Scheduler

STAGES = 2
CONTEXT = 64  # tokens of a prompt before decoding


class Pipeline:
    """Ranks and their scheduler. Each step says how many plans may be outstanding."""

    def __init__(self, config: EngineConfig) -> None:
        self.executor = WorkersExecutor(config)
        self.capacity: Capacity = self.executor.start()
        self.scheduler = Scheduler(scheduler_config(config), self.capacity)
        self.outstanding = 0
        self.requests = 0

    def add(self, prompt: int, output: int) -> str:
        self.requests += 1
        ids = tuple((17 * self.requests + i) % self.capacity.vocab_size for i in range(prompt))
        sampling = SamplingParams(seed=0, max_tokens=output, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(request_id=f"r{self.requests}", prompt_ids=ids, sampling=sampling)
        self.scheduler.add(request, time.monotonic())
        return request.request_id

    def step(self, depth: int) -> StepResult:
        """Submits plans until `depth` are outstanding, then takes a result."""
        while self.outstanding < depth and (plan := self.scheduler.plan(time.monotonic())) is not None:
            self.executor.submit(plan)
            self.outstanding += 1
        result = self.executor.result()
        self.outstanding -= 1
        for delta in self.scheduler.apply(result, time.monotonic()):
            if delta.error:
                raise RuntimeError(f"{delta.request_id}: {delta.error}")
        return result

    def rate(self, depth: int, steps: int) -> float:
        """Steps per second with a full pipeline."""
        for _ in range(2 * STAGES):
            self.step(depth)
        begin = time.perf_counter()
        for _ in range(steps):
            self.step(depth)
        rate = steps / (time.perf_counter() - begin)
        while self.outstanding:
            self.step(0)
        return rate

    def first_token(self, depth: int, prompt: int) -> float:
        """Seconds from a prompt's first chunk to its first token."""
        name = self.add(prompt, 2)
        begin = time.perf_counter()
        while not any(answer.token_ids for answer in self.step(depth).results):
            pass
        seconds = time.perf_counter() - begin
        self.scheduler.abort(name, time.monotonic())
        while self.outstanding:
            self.step(0)
        return seconds


def decoding(config: EngineConfig, rounds: int, steps: int) -> tuple[list[float], list[float]]:
    """Steps per second of each round: (overlapping, one at a time)."""
    pipeline = Pipeline(config)
    try:
        for _ in range(config.max_num_seqs):
            pipeline.add(CONTEXT, config.max_model_len - CONTEXT)
        while pipeline.scheduler.stats().waiting:
            pipeline.step(STAGES)
        rates = [(pipeline.rate(STAGES, steps), pipeline.rate(1, steps)) for _ in range(rounds)]
    finally:
        pipeline.executor.close()
    overlapping, alone = zip(*rates, strict=True)
    return list(overlapping), list(alone)


def prefilling(config: EngineConfig, rounds: int, prompt: int) -> tuple[list[float], list[float]]:
    """Seconds to the first token of a long prompt, for each round: (overlapping, one at a time)."""
    pipeline = Pipeline(config)
    try:
        times = [(pipeline.first_token(STAGES, prompt), pipeline.first_token(1, prompt)) for _ in range(rounds + 1)]
    finally:
        pipeline.executor.close()
    overlapping, alone = zip(*times[1:], strict=True)
    return list(overlapping), list(alone)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--shape", default="deep")
    arguments.add_argument("--sequences", type=int, default=32)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=40, help="steps of a round")
    arguments.add_argument("--prompt", type=int, default=1024)
    args = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            model=str(write_model(Path(folder) / args.shape, args.shape)),
            name="bench",
            pipeline_parallel_size=STAGES,
            threads=1,
            max_model_len=2048,
            max_num_seqs=args.sequences,
            max_num_batched_tokens=256,
            enable_prefix_caching=False,
            log_level="warning",
        )
        overlapping, alone = decoding(config, args.rounds, args.steps)
        sooner, later = prefilling(config, args.rounds, args.prompt)
    ratios = [a / b for a, b in zip(overlapping, alone, strict=True)]
    write(
        {
            "benchmark": "pipeline",
            "shape": args.shape,
            "stages": STAGES,
            "sequences_per_step": args.sequences // STAGES,
            "steps_per_s": {
                "overlapping": round(statistics.median(overlapping), 1),
                "one_outstanding": round(statistics.median(alone), 1),
                "ratio": round(statistics.median(ratios), 2),
                "ratios": [round(ratio, 2) for ratio in ratios],
            },
            "prompt_tokens": args.prompt,
            "first_token_s": {
                "overlapping": round(statistics.median(sooner), 3),
                "one_outstanding": round(statistics.median(later), 3),
                "ratio": round(statistics.median(later) / statistics.median(sooner), 2),
            },
        },
        args.json,
    )


if __name__ == "__main__":
    main()
