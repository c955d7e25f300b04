"""Measures two engines of which one computes the prompts of the other, beside two equal ones.

    python benchmarks/disaggregation.py --json benchmarks/results/amx/disaggregation.json --plot docs/images/apart.png

Both pairs serve the same requests in turns, on one processor for each engine: documents, which are long prompts with
short answers, and chats, which are short prompts with longer answers. Requests come at random moments (Poisson), which
are the same for both pairs. `tpot_ms` is of each answer, `gap_ms` between two events of a stream. A good request keeps
to both targets. `short` is a load of chats alone.
"""

import asyncio
import contextlib
import itertools
import random
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from calm import Watch
from msgspec.structs import replace
from results import CPUS, parser, write

from penstock.bench.workload import percentile, random_prompt
from penstock.cluster.client import FleetClient
from penstock.config.engine import EngineConfig, PageAccess
from penstock.engine.link.ipc import spawn
from penstock.messages import EngineRole, GenerateRequest, ResetCache, SamplingParams
from penstock.prepare.model import find_model, prepare_found

MODEL = "smollm2-135m"
DOCUMENT, DOCUMENT_OUTPUT = (800, 1600), 16  # tokens
CHAT, CHAT_OUTPUT = (16, 64), 100
TTFT, TPOT = 3.0, 0.05  # targets, in seconds
PAIRS: dict[str, tuple[EngineRole, EngineRole]] = {"equal": ("alone", "alone"), "apart": ("prefill", "decode")}


class Asked(NamedTuple):
    at: float  # seconds from the round's begin
    kind: str
    request: GenerateRequest


class Answered(NamedTuple):
    kind: str
    ttft: float
    tpot: float
    gaps: list[float]

    @property
    def good(self) -> bool:
        return self.ttft <= TTFT and self.tpot <= TPOT


def traffic(seconds: float, rates: dict[str, float], vocabulary: int, seed: int) -> list[Asked]:
    """Return the requests of a round, in the order in which they come."""
    source = random.Random(seed)
    asked = []
    for kind, rate in rates.items():
        lengths, output = (DOCUMENT, DOCUMENT_OUTPUT) if kind == "documents" else (CHAT, CHAT_OUTPUT)
        at = source.expovariate(rate) if rate else seconds
        while at < seconds:
            prompt = random_prompt(source.randint(*lengths), vocabulary, source)
            sampling = SamplingParams(seed=1, max_tokens=output, temperature=0.0, ignore_eos=True)
            name = f"{kind}-{len(asked)}-{seed}"
            asked.append(Asked(at, kind, GenerateRequest(request_id=name, prompt_ids=prompt, sampling=sampling)))
            at += source.expovariate(rate)
    return sorted(asked, key=lambda one: one.at)


async def answer(fleet: FleetClient, asked: Asked, begin: float) -> Answered:
    await asyncio.sleep(max(begin + asked.at - time.monotonic(), 0.0))
    began, times, tokens = time.monotonic(), [], 0
    async for delta in fleet.generate(asked.request):
        times.append(time.monotonic())
        tokens += len(delta.token_ids)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return Answered(asked.kind, times[0] - began, (times[-1] - times[0]) / (tokens - 1), gaps)


@contextlib.asynccontextmanager
async def pair(config: EngineConfig, roles: tuple[EngineRole, EngineRole]) -> AsyncIterator[FleetClient]:
    """Two engines, each on one processor."""
    fleet = FleetClient(clock=time.monotonic, seed=1)
    key = secrets.token_hex(16)
    for number, role in enumerate(roles):
        own = replace(config, role=role, pages=None if role == "alone" else PageAccess(key=key))
        fleet.join(f"engine-{number}", await spawn(own, processors=[CPUS[number]]))
    try:
        yield fleet
    finally:
        await fleet.close()


def figures(answers: Sequence[Answered], seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {"requests": len(answers), "good_a_second": sum(one.good for one in answers) / seconds}
    found["tpot_ms"] = percentiles([one.tpot for one in answers])
    for kind in ("documents", "chats"):
        own = [one for one in answers if one.kind == kind]
        if own:
            found[f"{kind}_ttft_ms"] = percentiles([one.ttft for one in own])
            found[f"{kind}_tpot_ms"] = percentiles([one.tpot for one in own])
            found[f"{kind}_gap_ms"] = percentiles([gap for one in own for gap in one.gaps])
    return found


def percentiles(values: Sequence[float]) -> dict[str, float]:
    return {name: round(1e3 * percentile(values, share), 1) for name, share in (("p50", 0.5), ("p99", 0.99))}


async def measure(args: Any) -> dict[str, Any]:
    prepared = prepare_found(find_model(MODEL, {}))
    config = replace(
        prepared.resolved.engine,
        max_model_len=2048,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        kv_cache_bytes=400 << 20,
        speculation="off",
        threads=1,
    )
    loads = {"documents": {"documents": args.documents, "chats": args.chats}, "short": {"chats": args.short}}
    rounds: dict[str, dict[str, list[dict[str, Any]]]] = {load: {name: [] for name in PAIRS} for load in loads}
    async with contextlib.AsyncExitStack() as held:
        fleets = {name: await held.enter_async_context(pair(config, roles)) for name, roles in PAIRS.items()}
        vocabulary = fleets["equal"].info.vocab_size
        for number in range(args.rounds + 1):  # the first one is not counted: rates are not measured yet
            for load, rates in loads.items():
                seconds = args.seconds if number else args.seconds / 4
                asked = traffic(seconds, rates, vocabulary, number)
                for name, fleet in fleets.items():
                    await fleet.control(ResetCache())
                    begin = time.monotonic()
                    answers = await asyncio.gather(*(answer(fleet, one, begin) for one in asked))
                    if number:
                        rounds[load][name].append(figures(answers, time.monotonic() - begin))
        apart = fleets["apart"].stats()
    return {"rounds": rounds, "blocks_moved": apart.peer_reads, "moves_cut_short": apart.peer_failures}


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw the percentiles of the gaps between tokens, and the good requests a second, of every round."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = (("tpot_ms", "P99 of TPOT, ms"), ("chats_gap_ms", "P99 of gaps of chats, ms"))
    figure, axes = pyplot.subplots(1, 3, figsize=(10, 3))
    places = [(load, name) for load in result["rounds"] for name in PAIRS]
    for axis, (field, title) in zip(axes, (*shown, ("good_a_second", "good requests a second")), strict=True):
        for place, (load, name) in enumerate(places):
            found = [one[field] for one in result["rounds"][load][name]]
            values = [value if field == "good_a_second" else value["p99"] for value in found]
            axis.bar(place, statistics.median(values), color="tab:blue" if name == "equal" else "tab:orange")
            axis.plot([place] * len(values), values, "k.", markersize=4)
        axis.set_xticks(range(len(places)), [f"{load}\n{name}" for load, name in places], fontsize=8)
        axis.set_title(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--seconds", type=float, default=15.0, help="in which requests come, in each round")
    arguments.add_argument("--documents", type=float, default=0.7, help="documents a second")
    arguments.add_argument("--chats", type=float, default=1.0, help="chats a second beside them")
    arguments.add_argument("--short", type=float, default=3.0, help="chats a second without documents")
    arguments.add_argument("--plot", type=Path)
    args = arguments.parse_args()
    watch, began = Watch(), time.perf_counter()
    result = {"benchmark": "disaggregation", "model": MODEL, "targets_s": {"ttft": TTFT, "tpot": TPOT}}
    result |= asyncio.run(measure(args))
    result["calm"] = watch.share(began, time.perf_counter())
    if args.plot:
        plot(result, args.plot)
    write(result, args.json)


if __name__ == "__main__":
    main()
