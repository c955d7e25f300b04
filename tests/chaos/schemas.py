"""Thousands of schemas, each another: caches are bounded, and each answer follows its own."""

import asyncio
import time
from pathlib import Path
from typing import Any

from tests.chaos.load import ask
from tests.chaos.place import place, require

AT_ONCE = 32
FIELDS = 12
MIB = 1 << 20
MOST_GROWN = 32 * MIB  # of the API process and its checker, and of the engine; the schemas have 20 MB together
LONGEST_LAG_MS = 50.0
KINDS = ({"type": "string", "maxLength": 20}, {"type": "integer"}, {"enum": ["a", "b"]}, {"type": "boolean"})


def schema(number: int) -> dict[str, Any]:
    """An object of about 2 kB whose first field no other schema has."""
    names = [f"f{number}x{i}" for i in range(FIELDS)]
    fields = {name: {**KINDS[i % len(KINDS)], "description": f"field {name} " * 6} for i, name in enumerate(names)}
    return {"type": "object", "properties": fields, "required": names, "additionalProperties": False}


async def unique_schemas(folder: Path, count: int) -> dict[str, Any]:
    """Requests with a schema each. The memory after a fifth of them, when caches are full, is that at the end."""
    async with place(folder, "--max-num-seqs", str(AT_ONCE)) as site:
        before = await site.baseline()
        began = time.monotonic()

        async def client(numbers: Any) -> None:
            for number in numbers:
                structured = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema(number)}}
                body = {"prompt": "import json\n", "max_tokens": 16, "seed": number, "response_format": structured}
                told = await ask(site, body)
                starts = f'{{"f{number}x0":'
                right = told.status == 200 and "".join(told.text.split()).startswith(starts)
                require(right, f"schema {number}: {told} does not begin with {starts}")

        async def run(numbers: range) -> None:
            each = iter(numbers)
            await asyncio.gather(*(client(each) for _ in range(AT_ONCE)))

        await run(range(count // 5))
        memory, own = site.resident(), site.resident(engine=False)
        await run(range(count // 5, count))
        seconds = time.monotonic() - began
        grown, own_grown = site.resident() - memory, site.resident(engine=False) - own
        require(grown < MOST_GROWN, f"{grown / 1e6:.0f} MB more after {count} schemas than after {count // 5}")
        require(await site.value("penstock_engine_restarts_total") == 0, "the engine was started again")
        lags = site.lags(began)
        require(lags["lag_worst_ms"] <= LONGEST_LAG_MS, f"the event loop's lag: {lags}")
        figures = {"schemas": count, "each_ms": round(1000 * seconds / count, 1), **lags}
        figures |= {"grown_mb": round(grown / 1e6, 1), "api_grown_mb": round(own_grown / 1e6, 1)}
        return figures | await site.require_baseline(before)
