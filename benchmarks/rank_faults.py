"""Measures what happens when a rank dies or stops: seconds to the report and to the end of all streams.

Each trial starts an engine with several ranks, waits until it is idle or streaming, and sends a signal to one rank. A
trial passes if a report names the rank within the deadline, every stream ends with an error within two seconds of the
report, and no process is left.

    python benchmarks/rank_faults.py --json benchmarks/results/avx512/rank_faults.json

Trials that the file already has are not repeated, so with --seconds several runs can complete the file.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

from results import parser, write

import penstock
from penstock.config import EngineConfig
from penstock.engine.client import StreamingClient
from penstock.engine.launch import launch
from penstock.messages import EngineError, GenerateRequest, SamplingParams

MODEL = Path(penstock.__file__).parent / "assets" / "python-8m"
STREAMS = 8
STREAMS_END_SECONDS = 2.0


class Trial(NamedTuple):
    report_s: float  # from the signal to the report
    streams_s: float  # from the report to the end of the last stream
    named: bool  # the report names the rank and its process
    left: int  # processes, five seconds later


def children(pid: int) -> list[int]:
    """Direct children of a process, the oldest first."""
    return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def stream(client: StreamingClient, number: int) -> float:
    """Runs a long stream and returns the time at which it ended with an error."""
    sampling = SamplingParams(seed=number, max_tokens=1800, ignore_eos=True)
    request = GenerateRequest(request_id=f"r{number}", prompt_ids=(5, 9, 300 + number), sampling=sampling)
    try:
        async for _ in client.generate(request):
            pass
    except EngineError:
        return time.monotonic()
    raise RuntimeError("the stream was complete before the fault")


async def trial(config: EngineConfig, rank: int, fault: signal.Signals, busy: bool) -> Trial:
    client = await launch(config)
    try:
        ranks = children(client.info.pid)
        streams = [asyncio.create_task(stream(client, i)) for i in range(STREAMS if busy else 0)]
        while busy and client.stats().steps < 10:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        pid = ranks[rank]
        began = time.monotonic()
        while client.state.status != "ended" and time.monotonic() - began < config.step_deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, fault)  # repeated, because other programs may continue stopped processes
            await asyncio.sleep(0.005)
        reported = time.monotonic()
        ended = await asyncio.gather(*streams)
        late = GenerateRequest(request_id="late", prompt_ids=(5,), sampling=SamplingParams(seed=0, max_tokens=1))
        try:
            await anext(client.generate(late))
            reason = ""
        except EngineError as error:
            reason = str(error)
        processes = [client.info.pid, *ranks]
        while any(map(alive, processes)) and time.monotonic() - reported < 5:
            await asyncio.sleep(0.01)
        named = reason.startswith(f"rank {rank} (pid {pid})")
        return Trial(reported - began, max(0.0, max(ended, default=0.0) - reported), named, sum(map(alive, processes)))
    finally:
        await client.close()


def summary(trials: list[Trial], deadline: float) -> dict[str, Any]:
    good = [t.named and not t.left and t.report_s < deadline and t.streams_s <= STREAMS_END_SECONDS for t in trials]
    return {
        "passed": f"{sum(good)}/{len(good)}",
        "report_s_median": round(statistics.median(t.report_s for t in trials), 2),
        "report_s_worst": round(max(t.report_s for t in trials), 2),
        "streams_end_s_median": round(statistics.median(t.streams_s for t in trials), 3),
        "streams_end_s_worst": round(max(t.streams_s for t in trials), 3),
        "processes_left": sum(t.left for t in trials),
        "trials": [[round(t.report_s, 3), round(t.streams_s, 3), t.named, t.left] for t in trials],
    }


def earlier(path: Path | None, settings: dict[str, Any]) -> dict[str, list[Trial]]:
    """The trials of an earlier run with the same settings, by case."""
    if path is None or not path.exists():
        return {}
    result = json.loads(path.read_text())
    if any(result.get(name) != value for name, value in settings.items()):
        return {}
    return {case: [Trial(*trial) for trial in figures["trials"]] for case, figures in result["faults"].items()}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--trials", type=int, default=10, help="trials of each case")
    arguments.add_argument("--seconds", type=float, default=float("inf"), help="time after which no trial is started")
    arguments.add_argument("--tensor-parallel-size", type=int, default=2)
    arguments.add_argument("--pipeline-parallel-size", type=int, default=1)
    arguments.add_argument("--step-deadline", type=float, default=8.0)
    args = arguments.parse_args()
    config = EngineConfig(
        model=str(MODEL),
        name="faults",
        dtype="float32",
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        depth=args.pipeline_parallel_size,
        threads=1,
        max_model_len=2048,
        max_num_seqs=STREAMS,
        max_num_batched_tokens=256,
        kv_cache_bytes=64 << 20,
        step_deadline=args.step_deadline,
        log_level="warning",
    )
    settings = {"benchmark": "rank_faults", "split": str(config.split), "deadline_s": args.step_deadline}
    done, began = earlier(args.json, settings), time.monotonic()
    for fault, busy in itertools.product((signal.SIGKILL, signal.SIGSTOP), (False, True)):
        trials = done.setdefault(f"{fault.name} {'mid-step' if busy else 'at rest'}", [])
        while len(trials) < args.trials and time.monotonic() - began < args.seconds:
            trials.append(asyncio.run(trial(config, len(trials) % config.split.world, fault, busy)))
    faults = {case: summary(trials, args.step_deadline) for case, trials in done.items() if trials}
    write({**settings, "faults": faults}, args.json)


if __name__ == "__main__":
    main()
