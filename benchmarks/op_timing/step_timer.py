"""Times steps of a runner, decode or prefill: op by op, and the host's part."""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from calm import Watch, kept

from op_timing.cost import OpCost, op_cost
from penstock.bench.roofline import MachineRates
from penstock.messages import NewSequence, SamplingParams, StepPlan, StepTiming, Work
from penstock.runtime.runner import ModelRunner

HOST = ("inputs", "launch", "sampler", "rest")  # see StepTiming; launch: the forward's time outside of its ops
WHOLE = "step"


class StepPart(msgspec.Struct, frozen=True):
    """A part of a step: one op, summed over the layers, or one part of the host's work."""

    name: str
    calls: int
    us: float  # per step
    share: float  # of the step
    gb_s: float | None = None
    gflop_s: float | None = None
    roofline_fraction: float | None = None


class StepBreakdown(msgspec.Struct, frozen=True):
    """The parts of a step of `rows` sequences. The last one is the whole step."""

    rows: int
    context: int  # tokens per sequence, on average
    steps: int  # measured
    wall_us: float  # median wall time of a step, other load on the machine included
    lines: tuple[StepPart, ...]
    prompt: int = 0  # prompt tokens that each sequence computed; 0: a decode step
    calm: bool | None = None  # see calm.py: then only calm steps count

    @property
    def us(self) -> float:
        return self.lines[-1].us

    @property
    def host_us(self) -> float:
        return sum(line.us for line in self.lines if line.name in HOST)


_Part = tuple[int, float, OpCost]  # calls in a step, their seconds, their cost


class _Step(NamedTuple):
    timing: StepTiming
    ops: list[tuple[str, float, OpCost]]  # label, seconds, cost


class StepTimer:
    """Runs and times steps of sequences that have `context` tokens in the KV cache, none of which was computed.

    A step decodes, or computes `prompt` tokens of each sequence's prompt.
    """

    def __init__(self, runner: ModelRunner, context: int, rows: Sequence[int], steps: int, prompt: int = 0) -> None:
        """Allocates blocks for `steps` steps of each number of `rows`. ValueError if the KV pool has too few."""
        self._runner, self.context, self._cases, self._steps = runner, context, tuple(rows), steps
        self._prompt, self._plan, self._held = prompt, 0, 0
        sequences, length = max(rows), longest_sequence(context, rows, steps, prompt)
        tables = []
        for group, pool in enumerate(runner.capacity.groups):
            needed, each = -(-length // runner.capacity.block_size), (pool.num_blocks - 1) // sequences
            if each < needed and not pool.window:
                raise ValueError(
                    f"{sequences} sequences of {length} tokens need {sequences * needed} KV blocks, but the pool has "
                    f"{pool.num_blocks - 1}: set a larger --kv-cache-memory, a smaller --context or fewer --rows"
                )
            # A sequence's blocks are spread over the pool. A window's blocks are reused.
            held = min(each, needed)
            runner.pages.groups[group][: 1 + sequences * held] = 0
            tables.append([tuple(1 + i + sequences * (j % held) for j in range(needed)) for i in range(sequences)])
        sampling = SamplingParams(seed=0, max_tokens=length, temperature=0.0)
        vocab, whole = runner.capacity.vocab_size, context + prompt
        computed = context if prompt else context - 1
        self._sequences = tuple(
            NewSequence(i, tuple((17 * i + j) % vocab for j in range(whole)), whole, computed, blocks, sampling, 0)
            for i, blocks in enumerate(zip(*tables, strict=True))
        )
        if not prompt:
            self._execute(new=self._sequences)

    def measure(self, machine: MachineRates, watch: Watch | None = None) -> list[StepBreakdown]:
        """Times the numbers of rows in turn, so that other load hits all alike. The first turn is a warm-up. With
        `watch`, each step waits for calm cores and only calm steps count, if they are a quarter of all."""
        seen: dict[int, list[tuple[_Step, bool | None]]] = {rows: [] for rows in self._cases}
        for turn in range(self._steps + 1):
            for rows, steps in seen.items():
                if not self._prompt:
                    self._step(rows)  # untimed: most decode steps follow one of the same sequences
                began = watch.wait() if watch else 0.0
                step = self._step(rows)
                if turn:
                    steps.append((step, watch.calm(began) if watch else None))
        context = self.context + (0 if self._prompt else len(self._cases) * (self._steps + 1))
        chosen = {rows: kept(steps) for rows, steps in seen.items()}
        parts = {rows: _parts(steps) for rows, (steps, _) in chosen.items()}
        # An op that is faster than torch's best product raises the roofline.
        rates = (done.flops / seconds for each in parts.values() for _, seconds, done in each.values() if seconds)
        reached = MachineRates(machine.bandwidth, max(machine.flops, *rates))
        return [
            msgspec.structs.replace(_breakdown(rows, context, self._prompt, steps, parts[rows], reached), calm=calm)
            for rows, (steps, calm) in chosen.items()
        ]

    def _step(self, rows: int) -> _Step:
        plan: dict[str, Any] = {"work": tuple(Work(i, self._prompt or 1, True) for i in range(rows))}
        if self._prompt:
            plan |= {"gone": tuple(range(self._held)), "new": self._sequences[:rows]}
            self._held = rows
        with self._runner.profile() as timed:
            timing = self._execute(**plan)
        return _Step(timing, [(label, seconds, op_cost(op)) for label, op, seconds in timed])

    def _execute(self, **plan: Any) -> StepTiming:
        self._plan += 1
        result = self._runner.execute(StepPlan(self._plan, **{"work": (), **plan}))
        assert result is not None, "one rank reports"
        for each in result.results:
            if each.error:
                raise RuntimeError(f"a sequence failed during the measurement: {each.error}")
        return result.timing


def longest_sequence(context: int, rows: Sequence[int], steps: int, prompt: int = 0) -> int:
    """Tokens of the longest sequence after all steps, rounded up to a multiple of 128."""
    return -(-(context + (prompt or 2 * len(rows) * (steps + 1)) + 1) // 128) * 128


def _parts(steps: Sequence[_Step]) -> dict[str, _Part]:
    """The parts by label. A part's time is the sum of its calls' medians over the steps, so outliers do not count."""
    parts: dict[str, _Part] = {}
    for calls in zip(*(step.ops for step in steps), strict=True):
        name, _, done = calls[len(calls) // 2]
        count, seconds, sum_done = parts.get(name, (0, 0.0, OpCost()))
        parts[name] = (count + 1, seconds + statistics.median(call[1] for call in calls), sum_done + done)
    return parts


def _breakdown(
    rows: int, context: int, prompt: int, steps: Sequence[_Step], parts: dict[str, _Part], machine: MachineRates
) -> StepBreakdown:
    """The breakdown of one number of rows. The whole step is the sum of its parts."""
    host = [statistics.median(each) for each in zip(*(_host(step) for step in steps), strict=True)]
    total = sum(seconds for _, seconds, _ in parts.values()) + sum(host)
    lines = [_line(name, *part[:2], total, part[2], machine) for name, part in parts.items()]
    lines += [_line(name, 1, seconds, total) for name, seconds in zip(HOST, host, strict=True)]
    lines.append(_line(WHOLE, 1, total, total, sum((done for _, _, done in parts.values()), OpCost()), machine))
    wall = statistics.median(step.timing.total for step in steps)
    return StepBreakdown(rows, context, len(steps), round(wall * 1e6, 1), tuple(lines), prompt)


def _host(step: _Step) -> tuple[float, float, float, float]:
    """Seconds of the host's parts, in the order of HOST."""
    timing = step.timing
    launch = timing.forward - sum(seconds for _, seconds, _ in step.ops)
    return timing.inputs, launch, timing.sample, timing.total - timing.forward - timing.sample - timing.inputs


def _line(
    name: str, calls: int, seconds: float, total: float, done: OpCost | None = None, machine: MachineRates | None = None
) -> StepPart:
    figures = (name, calls, round(seconds * 1e6, 1), round(seconds / total, 4))
    if done is None or machine is None:
        return StepPart(*figures)
    rates = (round(done.bytes / seconds / 1e9, 2), round(done.flops / seconds / 1e9, 1) if done.flops else None)
    return StepPart(*figures, *rates, round(done.least_seconds(machine) / seconds, 4))
