"""Batch jobs in turn with `penstock bench throughput` of the same work, and under kill -9 of the server.

    python benchmarks/batch_jobs.py --json benchmarks/results/avx512/batch_jobs.json

A round runs a job on a server, then `penstock batch` on the same file. A machine's pace changes within seconds, so a
job is stopped (SIGSTOP) now and then for runs of the case by `bench throughput`. A job's seconds are those in which it
was not stopped, from the request that creates it to its end. The last job is killed: the server ends with SIGKILL at
random moments, is started again, and must have each custom_id once in the output.
"""

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from results import parser, write
from servers import free_port, running, start

from penstock.bench.workload import Case, fixed, parse_cases

KINDS = ("server", "offline")  # a batch on a server, and `penstock batch`
VOCABULARY = 8192  # token ids that all packaged models have
Turns = tuple[float, list[float]]
Figures = dict[str, Any]
WINDOW = {"endpoint": "/v1/completions", "completion_window": "24h"}


class Job:
    """A file of requests that are those of a case, as often as it takes, each with another prompt."""

    def __init__(self, case: Case, lines: int, vocab_size: int, folder: Path) -> None:
        self.lines = lines
        self.tokens = lines * case.output_len
        self.path = folder / "requests.jsonl"
        items = fixed(Case(lines, case.prompt_len, case.output_len), vocab_size)
        body = {"max_tokens": case.output_len, "ignore_eos": True, "temperature": 0}
        with self.path.open("w") as file:
            for number, item in enumerate(items):
                line = {"custom_id": f"line-{number}", "url": WINDOW["endpoint"]}
                file.write(json.dumps({**line, "body": {"prompt": list(item.prompt_ids), **body}}) + "\n")

    def check(self, answers: bytes) -> None:
        """Raises ValueError unless each line is answered once, with all tokens."""
        read = [json.loads(line) for line in answers.splitlines()]
        ids = {answer["custom_id"] for answer in read}
        if len(read) != self.lines or ids != {f"line-{number}" for number in range(self.lines)}:
            raise ValueError(f"{len(read)} answers to {len(ids)} of {self.lines} lines")
        tokens = sum(answer["response"]["body"]["usage"]["completion_tokens"] for answer in read)
        if tokens != self.tokens:
            raise ValueError(f"{tokens} tokens instead of {self.tokens}")


@contextlib.contextmanager
def serving(flags: list[str], folder: Path, port: int) -> Iterator[tuple[httpx.Client, subprocess.Popen[bytes]]]:
    """A server with the storage in `folder`, which is killed at the end if it runs."""
    command = [sys.executable, "-m", "penstock", "serve", *flags, "--port", str(port), "--state-dir", str(folder)]
    with running(command, port) as server:
        yield server


def begin(client: httpx.Client, job: Job) -> str:
    """Uploads a job's file and creates its batch. Returns the id."""
    with job.path.open("rb") as file:
        made = client.post("/v1/files", files={"file": file}, data={"purpose": "batch"}).raise_for_status().json()
    batch = client.post("/v1/batches", json={"input_file_id": made["id"], **WINDOW}).raise_for_status().json()
    return str(batch["id"])


def shown(client: httpx.Client, batch_id: str) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"/v1/batches/{batch_id}").raise_for_status().json()
    if found["status"] not in ("validating", "in_progress", "completed"):
        raise ValueError(f"the batch is {found['status']}: {found['errors']}")
    return found


def complete(client: httpx.Client, batch_id: str) -> bool:
    return bool(shown(client, batch_id)["status"] == "completed")


def check_output(client: httpx.Client, job: Job, batch: dict[str, Any]) -> None:
    """See Job.check."""
    job.check(client.get(f"/v1/files/{batch['output_file_id']}/content").content)


def processes(pid: int) -> list[int]:
    """A process and those that its first thread has started, the engine among them."""
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def in_turn(pid: int, ended: Callable[[], bool], look: float, stretch: float, bench: Callable[[], float]) -> Turns:
    """Runs a job until it has ended, which is looked for every `look` seconds, and a bench after each `stretch` seconds
    of it and after its end. `pid` is of the process that runs the job; while a bench runs, it stands still. Returns the
    seconds that the job ran, and what the benches returned."""
    seconds, rates, over = 0.0, [], False
    while not over:
        began = time.perf_counter()
        while not (over := ended()) and time.perf_counter() - began < stretch:
            time.sleep(look)
        seconds += time.perf_counter() - began
        stopped = [] if over else processes(pid)
        for each in stopped:
            os.kill(each, signal.SIGSTOP)
        rates.append(bench())
        for each in reversed(stopped):
            os.kill(each, signal.SIGCONT)
    return seconds, rates


def run_on_server(client: httpx.Client, pid: int, job: Job, stretch: float, bench: Callable[[], float]) -> Figures:
    """Runs a job on a server of the process `pid`."""
    before = bench()
    began = time.perf_counter()
    batch_id = begin(client, job)
    made = time.perf_counter() - began
    # Looking more often would take time from the job.
    seconds, rates = in_turn(pid, lambda: complete(client, batch_id), 0.5, stretch, bench)
    check_output(client, job, shown(client, batch_id))
    return figures(job.tokens / (made + seconds), [before, *rates])


def run_offline(flags: list[str], job: Job, folder: Path, stretch: float, bench: Callable[[], float]) -> Figures:
    """Runs `penstock batch`, and measures it after its first answers."""
    answers = folder / "answers.jsonl"
    answers.unlink(missing_ok=True)
    before = bench()
    command = [sys.executable, "-m", "penstock", "batch", str(job.path), str(answers), "--model", *flags]
    child = start(command, stderr=subprocess.DEVNULL)
    while not answers.exists() or not answers.stat().st_size:
        if child.poll() is not None:
            raise ValueError(f"penstock batch ended with {child.returncode}")
        time.sleep(0.005)
    early = answers.read_bytes().count(b"\n")
    seconds, rates = in_turn(child.pid, lambda: child.poll() is not None, 0.05, stretch, bench)
    if child.wait():
        raise ValueError(f"penstock batch ended with {child.returncode}")
    job.check(answers.read_bytes())
    return figures(job.tokens * (1 - early / job.lines) / seconds, [before, *rates])


def figures(rate: float, benches: list[float]) -> Figures:
    """A job beside the benches, in output tokens per second."""
    ratio = rate / statistics.harmonic_mean(benches)
    return {"output_tok_s": round(rate, 1), "bench": [round(each, 1) for each in benches], "to_bench": round(ratio, 3)}


def run_bench(flags: list[str], case: Case, runs: int, folder: Path) -> float:
    """Returns the output tokens per second of `penstock bench throughput`."""
    path = folder / "bench.json"
    command = [sys.executable, "-m", "penstock", "bench", "throughput", *flags, "--cases", str(case)]
    command += ["--runs", str(runs), "--json", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (row,) = json.loads(path.read_bytes())
    return float(statistics.harmonic_mean(row["runs"]))


def kill(flags: list[str], job: Job, times: int, folder: Path, port: int, source: random.Random) -> list[int]:
    """Runs a job while the server is killed. Returns the number of answers at each kill."""
    batch_id, at = "", []
    for share in (*sorted(source.uniform(0.02, 0.95) for _ in range(times)), 1.0):
        with serving(flags, folder, port) as (client, server):
            batch_id = batch_id or begin(client, job)
            while (batch := shown(client, batch_id))["status"] != "completed":
                done = batch["request_counts"]["completed"]
                if done >= share * job.lines:
                    break
                time.sleep(source.uniform(0.01, 0.05))
            if share == 1.0:
                while not complete(client, batch_id):
                    time.sleep(0.5)
                check_output(client, job, shown(client, batch_id))
            else:
                time.sleep(source.uniform(0, 0.05))  # not just after an answer was counted
                server.kill()
                at.append(done)
                print(f"killed at {done} of {job.lines}", flush=True)
    return at


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", default="smollm2-135m")
    arguments.add_argument("--case", default="32x32/16", help="of bench throughput (%(default)s)")
    arguments.add_argument("--lines", type=int, default=10_000, help="of a job (%(default)s)")
    arguments.add_argument("--rounds", type=int, default=1, help="%(default)s; 0: only the kills")
    arguments.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of jobs (all)")
    arguments.add_argument("--stretch", type=float, default=20.0, help="seconds of a job between benches (%(default)s)")
    arguments.add_argument("--runs", type=int, default=6, help="of the case in each bench (%(default)s)")
    arguments.add_argument("--kills", type=int, default=10, help="of the server (%(default)s)")
    arguments.add_argument("--kill-lines", type=int, default=10_000, help="of the job that is killed (%(default)s)")
    arguments.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    given = arguments.parse_args()
    (case,) = parse_cases(given.case)
    flags = [given.model, "--threads", str(given.threads), "--max-num-seqs", str(case.count)]
    port = free_port()
    rounds: dict[str, list[Figures]] = {kind: [] for kind in given.kinds}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = Job(case, given.lines, VOCABULARY, folder)
        bench = partial(run_bench, flags, case, given.runs, folder)
        for number in range(given.rounds):
            for kind in given.kinds:
                if kind == "server":
                    with serving(flags, folder / f"state{number}", port) as (client, server):
                        found = run_on_server(client, server.pid, job, given.stretch, bench)
                else:
                    found = run_offline(flags, job, folder, given.stretch, bench)
                rounds[kind].append(found)
                print(kind, found, flush=True)
        killed = []
        if given.kills:
            job = Job(case, given.kill_lines, VOCABULARY, folder)
            killed = kill(flags, job, given.kills, folder / "killed", port, random.Random(1))
    medians = {kind: statistics.median(each["to_bench"] for each in found) for kind, found in rounds.items() if found}
    settings = {"case": str(case), "lines": given.lines, "stretch_s": given.stretch, "runs": given.runs}
    result = {"benchmark": "batch_jobs", **settings, "to_bench": medians, "rounds": rounds}
    write({**result, "kill_lines": given.kill_lines, "killed_at": killed}, given.json)


if __name__ == "__main__":
    main()
