"""Measures what looking for drafts costs: its share of the time of an engine that decodes, on text that gains little.

    python benchmarks/speculation_cost.py MODEL --json benchmarks/results/avx512/speculation_cost.json

The engine runs on a thread of this process, and the time in the scheduler's `Speculation` is added up. On a shared
machine that tells more than the ratio of two runs, which differ by more than the share.
"""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

from results import parser, save, write
from speculation import CONTEXT, cases, run

from penstock.cli.bench.sizes import BenchSizes, prepare_sized
from penstock.engine.launch import launch
from penstock.schedule.drafts.speculation import Speculation
from penstock.text import Tokenizer

CASES = ("prose, greedy", "prose, sampled", "random, greedy", "random, sampled")
BATCHES = (1, 8, 32)


class Spent:
    """Adds up the seconds within methods."""

    def __init__(self, *methods: str) -> None:
        self.seconds = 0.0
        for name in methods:
            setattr(Speculation, name, self._timed(getattr(Speculation, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = method(*arguments)
            self.seconds += time.perf_counter() - began
            return result

        return timed


async def measure(model: str) -> list[dict[str, Any]]:
    prepared = prepare_sized(model, {"speculation": "suffix"}, BenchSizes("--batches", CONTEXT, max(BATCHES)))
    tokenizer = Tokenizer.load(prepared.path)
    client = await launch(prepared.resolved.engine, in_process=True)
    spent, rows = Spent("extend", "note"), []
    chosen = cases(tokenizer, client.info.vocab_size)
    for case in CASES:
        for batch in BATCHES:
            for round_ in range(2):  # the first one measures steps
                items = chosen[case](batch, random.Random(f"{case} {batch} {round_}"))
                spent.seconds = 0.0
                result = await run(client, items, f"{case}-{batch}-{round_}")
            elapsed = sum(map(len, result.tokens)) / result.rate
            rows.append(
                {
                    "case": case,
                    "batch": batch,
                    "share": round(spent.seconds / elapsed, 4),
                    "us_per_step": round(spent.seconds / result.steps * 1e6, 1),
                    "drafts": result.draft_tokens,
                    "accepted": result.accepted,
                    "steps": result.steps,
                }
            )
            print(rows[-1], flush=True)
    await client.close()
    return rows


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("model", help="a model with a chat template")
    args = arguments.parse_args()
    rows = asyncio.run(measure(args.model))
    prose = [row["share"] for row in rows if row["case"].startswith("prose")]
    result = {"benchmark": "speculation_cost", "largest_share_prose": max(prose), "cases": rows}
    save(result, args.json)
    write(result, None)


if __name__ == "__main__":
    main()
