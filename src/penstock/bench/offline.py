"""Measures throughput and latency of an engine without a server: requests go straight to an EngineClient."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.bench.roofline import MachineRates, average
from penstock.bench.timeline import Timeline, summarise
from penstock.bench.workload import Case, WorkloadRequest, fixed
from penstock.engine.processors import keep_off
from penstock.messages import EngineClient, EngineStats, GenerateRequest, ResetCache, SamplingParams

WARM_UP = Case(1, 32, 8)


async def run_item(client: EngineClient, item: WorkloadRequest, name: str, start: float) -> Timeline:
    """Sends one request at its arrival time, and records when its tokens arrive."""
    await asyncio.sleep(max(0.0, start + item.arrival - time.perf_counter()))
    line = Timeline(time.perf_counter())
    sampling = SamplingParams(seed=0, max_tokens=item.output_len, temperature=0.0, ignore_eos=True)
    async for delta in client.generate(GenerateRequest(request_id=name, prompt_ids=item.prompt_ids, sampling=sampling)):
        if delta.token_ids:
            line.stamps.append((time.perf_counter(), len(delta.token_ids)))
        line.error = line.error or delta.error
    return line


async def run_items(client: EngineClient, items: Sequence[WorkloadRequest], name: str) -> tuple[list[Timeline], float]:
    """Returns every item's timeline, and the seconds from the first request to the last token."""
    start = time.perf_counter()
    lines = await asyncio.gather(*(run_item(client, item, f"{name}-{i}", start) for i, item in enumerate(items)))
    return list(lines), time.perf_counter() - start


def host_us_per_step(before: EngineStats, after: EngineStats) -> float:
    """Microseconds that a step spends outside the model's forward and the sampler."""
    steps = after.steps - before.steps
    kernels = after.forward_seconds - before.forward_seconds + after.sample_seconds - before.sample_seconds
    return (after.step_seconds - before.step_seconds - kernels) / max(1, steps) * 1e6


async def settled(client: EngineClient) -> EngineStats:
    """The stats after the last step. A client receives them with that step's deltas."""
    await asyncio.sleep(0.05)
    return client.stats()


def peak_memory(pid: int) -> int | None:
    """The peak resident memory of a process in bytes; None if /proc does not have it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:")), None)


async def run_case(client: EngineClient, case: Case, seed: int) -> dict[str, Any]:
    """Runs a case once, with an empty prefix cache. Returns its figures."""
    await client.control(ResetCache())
    before = await settled(client)
    lines, elapsed = await run_items(client, fixed(case, client.info.vocab_size, seed), f"{case}-{seed}")
    after = await settled(client)
    return {
        "case": str(case),
        "began": min(line.sent for line in lines),  # time.perf_counter(), which processes of a machine share
        **summarise(lines, elapsed),
        "steps": after.steps - before.steps,
        "host_us_per_step": round(host_us_per_step(before, after), 1),
        "forward_ms_per_step": round(
            (after.forward_seconds - before.forward_seconds) / max(1, after.steps - before.steps) * 1e3, 3
        ),
    }


async def run_cases(
    client: EngineClient,
    cases: Sequence[Case],
    runs: int,
    probe: Callable[[], MachineRates] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Returns each case's median run by output tokens per second, with the engine's peak memory over all runs.

    The cases run in turn, so that drift of the machine hits all of them. With `probe`, each row has its "machine": the
    mean of the rates measured just before and just after the run. `say` gets what runs now.
    """
    say("warming up")
    await run_items(client, fixed(WARM_UP, client.info.vocab_size), "warm-up")
    results: dict[str, list[dict[str, Any]]] = {str(case): [] for case in cases}
    before = None if probe is None else probe()
    for run in range(runs):
        for number, case in enumerate(cases):
            say(f"run {run + 1} of {runs}, case {number + 1} of {len(cases)}: {case}")
            with keep_off(client.info.cpu):
                row = await run_case(client, case, run)
            if probe is not None and before is not None:
                after = probe()
                row["machine"], before = average(before, after), after
            results[str(case)].append(row)
    medians = []
    for rows in results.values():
        rows.sort(key=lambda row: row["output_tok_s"])
        medians.append({**rows[len(rows) // 2], "runs": [row["output_tok_s"] for row in rows]})
    memory = {"peak_memory_bytes": peak_memory(client.info.pid)} | {
        f"{row.name.lower().replace(' ', '_')}_bytes": row.bytes
        for row in client.info.memory
        if row.name in ("weights", "KV cache")
    }
    return [{**row, **memory} for row in medians]
