"""Compares decoding with speculation and without it in one engine, which switches it on and off every few steps.

    python benchmarks/speculation_blocks.py MODEL --json benchmarks/results/avx512/speculation_blocks.json

Two engines that take turns on a shared machine differ by several percent, which hides a cost of 1%. Here all steps are
those of one engine with the same memory and threads, and blocks that are compared follow each other at once. Tokens do
not depend on drafts, so the outputs are those of an engine that always speculates.

A group is four blocks of `--block` steps in which all requests decode: on, off, off, on, or off, on, on, off, as chance
has it. So a steady change, such as the growing context, counts for both alike. `ratio` is the tokens a second of all
blocks with speculation over those without, with its 95% interval (bootstrap over groups). `median` is that of the
groups' ratios: disturbances hardly change it, but it does not see the cost of rare steps. `control` is one of the two
blocks without speculation of each group, by chance, over the other. `slower`: the interval of `ratio` lies below 0.97.
`looking` is the time in the scheduler's `Speculation`, as a share of the blocks with it.

While speculation is off, `Speculation` is not called, and the account of a sequence, which limits what drafts may cost,
does not grow. When it is on again, it follows the tokens that came meanwhile, so its work for both blocks falls into
one: `looking` is more than in an engine that always speculates.

The engine's loop runs on the main thread. No client beside it competes with the kernels' threads.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from results import parser, save, write
from speculation import CONTEXT, LEAST_RATIO, Item, cases

from penstock.cli.bench.sizes import BenchSizes, prepare_sized
from penstock.engine.link.wire import Add, Command, Ended, Ready, Rejected, Step, Stop
from penstock.engine.main import MODEL_BACKEND, run_engine
from penstock.messages import EngineInfo, EngineStats, GenerateRequest, SamplingParams, StepResult
from penstock.schedule.drafts.speculation import MOST_DELAY, Speculation
from penstock.schedule.step import Outstanding, StepBuilder
from penstock.text import Tokenizer

CASES = "prose, greedy;prose, sampled;random, greedy;random, sampled"
ORDERS = ((True, False, False, True), (False, True, True, False))  # of a group: whether speculation is on
SAMPLES = 2000  # of the bootstrap


class Block(NamedTuple):
    """Consecutive steps."""

    on: bool  # with speculation
    tokens: int
    seconds: float
    looking: float  # of these, within Speculation


Group = Sequence[Block]  # in one of ORDERS


class Switch:
    """Switches the scheduler's speculation, and adds up its seconds."""

    def __init__(self) -> None:
        self.on = True
        self.seconds = 0.0
        extend, note = Speculation.extend, Speculation.note

        def switched_extend(speculation: Speculation, step: StepBuilder, running: int) -> None:
            if self.on:
                began = time.perf_counter()
                extend(speculation, step, running)
                self.seconds += time.perf_counter() - began

        def switched_note(
            speculation: Speculation, step: Outstanding, result: StepResult, seconds: float | None
        ) -> None:
            if self.on:
                began = time.perf_counter()
                note(speculation, step, result, seconds)
                self.seconds += time.perf_counter() - began
                return
            for sequence in step.sequences:
                sequence.lead -= MOST_DELAY * (seconds or 0.0)

        Speculation.extend = switched_extend  # type: ignore[method-assign, assignment]
        Speculation.note = switched_note  # type: ignore[method-assign, assignment]


class Client:
    """The engine's channel: sends it one set of requests after another, and times its steps.

    A plan and its result lie between two calls of `receive`, as a CPU has one plan outstanding.
    """

    def __init__(
        self,
        switch: Switch,
        block: int,
        sets: Callable[["Client", EngineInfo], Iterator[Sequence[GenerateRequest]]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`block`: steps of a block. `sets` yields a set of requests when all of the one before have ended."""
        self._switch, self._block, self._make_sets, self._clock = switch, block, sets, clock
        self._sets: Iterator[Sequence[GenerateRequest]] = iter(())
        self._chance = random.Random(0)
        self._count = 0  # requests of the set
        self._awaited: set[str] = set()  # of these, those that have no token
        self._running: set[str] = set()  # of these, those that have not ended
        self._blocks: list[Block] = []  # of the group so far
        self._order: Sequence[bool] = ORDERS[0]
        self._timed = False  # whether the present step belongs to a block
        self._began = 0.0  # the present step
        self._steps, self._tokens, self._seconds, self._looked = 0, 0, 0.0, 0.0  # of the block so far
        self.groups: list[Group] = []  # of the set
        self.stats = EngineStats()
        self.ended = ""

    def receive(self, *, wait: float) -> list[Command | Rejected]:
        now = self._clock()
        if self._running:
            self._next_step(now)
            return []
        self._switch.on = True
        requests = next(self._sets, None)
        if requests is None:
            return [Stop("all is measured")]
        self._running = {request.request_id for request in requests}
        self._awaited, self._count = set(self._running), len(requests)
        self.groups, self._blocks, self._timed, self._steps = [], [], False, 0
        return [Add(request) for request in requests]

    def post(self, step: Step) -> None:
        if step.rejected:
            raise RuntimeError(step.rejected[0].message)
        self.stats = step.stats or self.stats
        for delta in step.deltas:
            if delta.error:
                raise RuntimeError(delta.error)
            self._tokens += len(delta.token_ids)
            self._awaited.discard(delta.request_id)
            if delta.finish_reason is not None:
                self._running.remove(delta.request_id)

    def announce(self, event: Ready | Ended) -> None:
        if isinstance(event, Ready):
            self.stats, self._sets = event.stats, self._make_sets(self, event.info)
        else:
            self.ended = event.reason

    def _next_step(self, now: float) -> None:
        """Count the step that has ended, and decide whether the next one may have drafts."""
        if self._timed:
            self._steps += 1
            self._seconds += now - self._began
            if self._steps == self._block:
                self._end_block()
        self._timed = not self._awaited and len(self._running) == self._count
        if not self._timed:
            self._switch.on = True
        elif not self._steps:
            self._begin_block()
        self._began = now

    def _begin_block(self) -> None:
        if not self._blocks:
            self._order = self._chance.choice(ORDERS)
        self._switch.on = self._order[len(self._blocks)]
        self._tokens, self._seconds, self._looked = 0, 0.0, self._switch.seconds

    def _end_block(self) -> None:
        looking = self._switch.seconds - self._looked
        self._blocks.append(Block(self._switch.on, self._tokens, self._seconds, looking))
        self._steps = 0
        if len(self._blocks) == len(self._order):
            self.groups.append(self._blocks)
            self._blocks = []


def _rate(blocks: Sequence[Block]) -> float:
    """Tokens a second."""
    return sum(block.tokens for block in blocks) / sum(block.seconds for block in blocks)


def _ratio(groups: Sequence[Group]) -> float:
    """The rate with speculation over that without."""
    blocks = [block for group in groups for block in group]
    return _rate([block for block in blocks if block.on]) / _rate([block for block in blocks if not block.on])


def bootstrap(groups: Sequence[Group], seed: int = 0) -> list[float]:
    """The ratio of the groups, and its 95% interval."""
    chance = random.Random(seed)
    ratios = sorted(_ratio(chance.choices(groups, k=len(groups))) for _ in range(SAMPLES))
    return [_ratio(groups), ratios[SAMPLES // 40], ratios[-1 - SAMPLES // 40]]


def control(groups: Sequence[Group], seed: int = 0) -> list[Group]:
    """The groups' blocks without speculation, one of each by chance as if it had it."""
    chance = random.Random(seed)
    halves: list[Group] = []
    for group in groups:
        off = [block for block in group if not block.on]
        chance.shuffle(off)
        halves.append([off[0]._replace(on=True), off[1]])
    return halves


def summary(groups: Sequence[Group]) -> dict[str, Any]:
    """The figures of a case's groups. Without groups there is none: with drafts the outputs ended too soon."""
    if not groups:
        return {"groups": 0, "slower": False}
    blocks = [block for group in groups for block in group]
    on, off = ([block for block in blocks if block.on is wanted] for wanted in (True, False))
    figures: dict[str, Any] = {"groups": len(groups)}
    for name, chosen in (("ratio", groups), ("control", control(groups))):
        value, *interval = (round(number, 4) for number in bootstrap(chosen))
        figures |= {name: value, f"{name}_interval": interval}
    return figures | {
        "median": round(statistics.median(_ratio([group]) for group in groups), 4),
        "slower": figures["ratio_interval"][1] < LEAST_RATIO,
        "looking": round(sum(block.looking for block in on) / sum(block.seconds for block in on), 4),
        "tok_s_off": round(_rate(off), 1),
        "tok_s_on": round(_rate(on), 1),
    }


class Measurement:
    """All cases, one after the other, and their figures."""

    def __init__(self, tokenizer: Tokenizer, args: Any) -> None:
        self._tokenizer, self._args = tokenizer, args
        self.rows: list[dict[str, Any]] = []

    def sets(self, client: Client, info: EngineInfo) -> Iterator[Sequence[GenerateRequest]]:
        args, chosen = self._args, cases(self._tokenizer, info.vocab_size)
        for case in args.cases.split(";"):
            for batch in map(int, args.batches.split(",")):
                groups: list[Group] = []
                before = client.stats
                for number in range(args.runs + 1):
                    items = chosen[case](batch, random.Random(f"{case} {batch} {number}"))
                    yield [self._request(f"{case}-{batch}-{number}", i, item, info) for i, item in enumerate(items)]
                    if number:
                        groups += client.groups
                    else:  # the first one warms up, and measures steps
                        before = client.stats
                after = client.stats
                drafts = {
                    "steps": after.steps - before.steps,
                    "drafts": after.draft_tokens - before.draft_tokens,
                    "accepted": after.accepted_tokens - before.accepted_tokens,
                }
                self.rows.append({"case": case, "batch": batch} | summary(groups) | drafts)
                print(self.rows[-1], flush=True)
                save(self.result(), args.json)

    def result(self) -> dict[str, Any]:
        """The figures of the cases so far."""
        return {
            "benchmark": "speculation_blocks",
            "model": Path(self._args.model).name,
            "block": self._args.block,
            "tokens": self._args.tokens,
            "slower": [f"{row['case']}, batch {row['batch']}" for row in self.rows if row["slower"]],
            "cases": self.rows,
        }

    def _request(self, run: str, index: int, item: Item, info: EngineInfo) -> GenerateRequest:
        sampling = SamplingParams(
            seed=index,
            max_tokens=self._args.tokens,
            temperature=item.temperature,
            eos_token_ids=info.eos_token_ids,
            ignore_eos=True,
        )
        return GenerateRequest(
            request_id=f"{run}-{index}",
            prompt_ids=item.prompt,
            sampling=sampling,
            cache_salt=run,
            prediction_ids=item.prediction,
        )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("model", help="a model with a chat template")
    arguments.add_argument("--cases", default=CASES, help="of benchmarks/speculation.py, with semicolons between them")
    arguments.add_argument("--batches", default="1,8,32", help="requests that run at once")
    arguments.add_argument("--block", type=int, default=16, help="steps of a block")
    arguments.add_argument("--tokens", type=int, default=264, help="of each output: four groups, and a few more")
    arguments.add_argument("--runs", type=int, default=10, help="sets of requests of each case")
    args = arguments.parse_args()
    sizes = BenchSizes("--batches", CONTEXT, max(map(int, args.batches.split(","))))
    prepared = prepare_sized(args.model, {"speculation": "suffix"}, sizes)
    measurement = Measurement(Tokenizer.load(prepared.path), args)
    client = Client(Switch(), args.block, measurement.sets)
    if not run_engine(prepared.resolved.engine, MODEL_BACKEND, client):
        raise SystemExit(client.ended)
    write(measurement.result(), args.json)


if __name__ == "__main__":
    main()
