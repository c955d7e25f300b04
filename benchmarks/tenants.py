"""Measures what a tenant with few clients feels of one with many, on a real server.

    python benchmarks/tenants.py --json benchmarks/results/amx/tenants.json --plot docs/images/tenants.svg
    python benchmarks/tenants.py --light second --json benchmarks/results/amx/tenants_classes.json

Rounds take turns: the light tenant alone; beside a heavy tenant with many clients; and, as the peer, both without a
tenants file: first come, first served. Clients of the heavy tenant, and the two of the light one, send their next
request as soon as they have an answer. With `--light second` the light tenant sends one request a second instead, and
the heavy tenant's requests are of a class for batches, which leaves two places free and gets few prompt tokens in a
step. `allowed` is what the light tenant may feel at most: twice (with classes 1.5 times) its P99 alone, and one step:
the mean one, and in `allowed_p99` the P99 of all steps, by the event log that each server writes.
Clients of the heavy tenant are in a process with the lowest priority. Outputs have 12 to 36 tokens: with outputs of one
length, sequences start and end together, and most steps have no prompt. The parts of the light tenant's time are from
the server's ledger, joined by the id of the request: `before` the server has begun with it, in the `queue` until the
first step, in `steps` until the first token, and `after` them until the client has it.

Counts compare the work of the cases whatever else the machine does: `out_step` are tokens of output for a step,
`computed` tokens that the engine computed for one of these, `step_cpu` the engine's CPU seconds for a step, `api_cpu`
those of the API process for a request, and `busy` the share of the time in which steps ran.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from calm import Watch
from overload import Server, serving, session
from results import parser, write
from servers import start

from penstock.bench.workload import percentile
from penstock.cli.output import show_table
from penstock.config.tenants.keys import new_key
from penstock.weights.packaged import EMBEDDED, SMOLLM2

MODELS = {"python-8m": EMBEDDED, "smollm2-135m": SMOLLM2.name}
PROMPT, OUTPUT = 96, (12, 36)  # tokens, and the fewest and most of an output
CASES = ("alone", "shared", "first come")
PARTS = ("before", "queue", "steps", "after")  # of the time to the first token, see above
MEDIANS = ("step", "step_cpu", "out_step", "busy", "computed", "api_cpu", "preempted")
SETTLING = 3.0  # seconds of load before the light tenant begins to count
Figures = dict[str, Any]


def tenants_file(folder: Path, case: str, classes: bool) -> tuple[Path, dict[str, str]]:
    """Writes the tenants file of a case. Returns it and the keys by tenant."""
    keys, tenants = {}, dict[str, dict[str, Any]]()
    for name in ("light", "heavy"):
        keys[name], key_id, stored = new_key()
        tenants[name] = {"keys": [{"name": "k", "id": key_id, "hash": stored}]}
    content: Figures = {"tenants": tenants}
    if classes:
        content["classes"] = {"standard": {"reserved": 2}, "batch": {"rank": 1, "step_tokens": 64}}
        tenants["heavy"]["class"] = "batch"
    file = folder / f"{case}.yaml"
    file.write_text(json.dumps(content))
    return file, keys


class Clients:
    """Clients of one tenant, each with one request at a time."""

    def __init__(self, http: aiohttp.ClientSession, server: Server, key: str, seed: int) -> None:
        # Of each request: when it was sent, seconds to its first token, and its id.
        self.first: list[tuple[float, float, str]] = []
        self._http, self._url = http, server.url + "/v1/completions"
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._random = random.Random(seed)

    async def send(self) -> None:
        body = {
            "prompt": [self._random.randrange(100, 1000) for _ in range(PROMPT)],
            "max_tokens": self._random.randint(*OUTPUT),
            "ignore_eos": True,
            "stream": True,
            "logit_bias": {"500": 100.0},  # a token that is text
        }
        began, first = time.monotonic(), 0.0
        async with self._http.post(self._url, json=body, headers=self._headers) as answer:
            answer.raise_for_status()
            async for _ in answer.content.iter_any():
                first = first or time.monotonic() - began
        self.first.append((began, first, answer.headers["x-request-id"]))

    async def flat_out(self) -> None:
        while True:
            await self.send()

    async def each_second(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self.send())
                await asyncio.sleep(1.0)


async def engine_counts(http: aiohttp.ClientSession, server: Server) -> dict[str, float]:
    """Returns the engine's counters, and the CPU seconds of the engine and of the API process."""
    async with http.get(server.url + "/metrics") as answer:
        text = await answer.text()
    names = ("engine_steps", "engine_step_seconds", "engine_computed_tokens", "engine_cpu_seconds")
    names += ("generation_tokens", "num_preemptions")
    found = {name: re.findall(rf"^penstock_{name}_total{{.*}} (\S+)$", text, re.MULTILINE) for name in names}
    found["cpu_seconds"] = re.findall(r"^process_cpu_seconds_total (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, (value,) in found.items()}


async def heavy_load(server: Server, key: str, clients: int, seed: int) -> None:
    """Runs the heavy tenant's clients until standard input ends. Prints the times of its answers."""
    os.nice(10)  # in reality clients have machines of their own: these are not to take time from the server
    async with session(server) as http:
        many = Clients(http, server, key, seed)
        load = [asyncio.create_task(many.flat_out()) for _ in range(clients)]
        await asyncio.to_thread(sys.stdin.read)
        for task in load:
            task.cancel()
        await asyncio.gather(*load, return_exceptions=True)
    print(json.dumps(many.first))


async def measure(server: Server, keys: dict[str, str], seconds: float, heavy: int, seed: int, paced: bool) -> Figures:
    command = [sys.executable, __file__, "--load", server.url, keys.get("heavy", ""), str(heavy), str(seed + 1)]
    async with session(server) as http:
        light = Clients(http, server, keys.get("light", ""), seed)
        await light.send()
        load = start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        tasks = [asyncio.create_task(light.each_second() if paced else light.flat_out()) for _ in range(2 - paced)]
        await asyncio.sleep(SETTLING)
        began, before = time.monotonic(), await engine_counts(http, server)
        await asyncio.sleep(seconds)
        after, ended = await engine_counts(http, server), time.monotonic()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        many = json.loads((await asyncio.to_thread(load.communicate, ""))[0])
    times = {
        name: [(sent - began, first, request) for sent, first, request in found if began <= sent < ended]
        for name, found in (("light", light.first), ("heavy", many))
    }
    used = {name: after[name] - before[name] for name in before}
    tokens, answers = used["generation_tokens"], sum(map(len, times.values()))
    return {
        "tok_s": tokens / (ended - began),
        "step": used["engine_step_seconds"] / used["engine_steps"],
        "step_cpu": used["engine_cpu_seconds"] / used["engine_steps"],
        "out_step": tokens / used["engine_steps"],
        "busy": used["engine_step_seconds"] / (ended - began),
        "computed": used["engine_computed_tokens"] / tokens,
        "api_cpu": used["cpu_seconds"] / answers,
        "preempted": used["num_preemptions"] / answers,
        "times": times,
        "since": began,
        "until": ended,
    }


def ledger_parts(folder: Path, figures: Figures) -> list[dict[str, float]]:
    """Returns the seconds of each part of the time to the first token, for each answer to the light tenant."""
    connection = sqlite3.connect(folder / "ledger.sqlite3")
    query = "SELECT request_id, began, queue_ms, ttft_ms FROM requests WHERE tenant = 'light' AND status = 200"
    rows = {request: times for request, *times in connection.execute(query)}
    connection.close()
    epoch = time.time() - time.monotonic() + figures["since"]
    parts = []
    for sent, first, request in figures["times"]["light"]:
        if request in rows:
            began, queue, whole = rows[request][0], rows[request][1] / 1000, rows[request][2] / 1000
            before = began - epoch - sent
            parts.append({"before": before, "queue": queue, "steps": whole - queue, "after": first - before - whole})
    return parts


def step_seconds(log: Path, figures: Figures) -> list[float]:
    """Returns the seconds of the steps while requests counted, from the engine's event log."""
    planned, seconds = 0.0, []
    for line in log.open("rb"):
        if b'"type":"plan"' in line:
            planned = json.loads(line)["now"]
        elif b'"type":"apply"' in line and figures["since"] <= planned < figures["until"]:
            seconds.append(json.loads(line)["now"] - planned)
    return seconds


@contextlib.contextmanager
def started(
    model: str, case: str, folder: Path, places: int, classes: bool
) -> Iterator[tuple[Server, dict[str, str], Path]]:
    state = folder / f"state-{case}"
    flags = ["--threads", "1", "--max-num-seqs", str(places), "--kv-cache-memory", "128MiB", "--speculation", "off"]
    flags += ["--state-dir", str(state), "--access-log", "0", "--max-waiting", "1024"]
    flags += ["--event-log", str(folder / f"events-{case}")]
    keys: dict[str, str] = {}
    if case != "first come":
        file, keys = tenants_file(folder, case, classes)
        flags += ["--tenants", str(file)]
    with serving(model, flags, folder / f"log-{case}") as server:
        yield server, keys, state


def row_of(case: str, rounds: list[Figures]) -> Figures:
    """Returns the figures of a case. Percentiles are of the requests of all rounds together."""
    first = [[seconds for _, seconds, _ in each["times"]["light"]] for each in rounds]
    parts = [part for each in rounds for part in each["parts"]]
    columns = {"": [each for values in first for each in values]}
    columns |= {f"{name}_": [part[name] for part in parts] for name in PARTS}
    columns["step_"] = [each for figures in rounds for each in figures["steps"]]
    row: Figures = {"case": case, "requests": len(columns[""])}
    for name, values in columns.items():
        for rank in (0.5, 0.99):
            row[f"{name}p{rank * 100:.0f}"] = round(percentile(values, rank), 4) if values else None
    return row | {
        "p99_rounds": [round(percentile(values, 0.99), 4) for values in first],
        **{name: round(median(each[name] for each in rounds), 4) for name in MEDIANS},
        "tok_s": round(median(each["tok_s"] for each in rounds)),
        "tok_s_rounds": [round(each["tok_s"]) for each in rounds],
    }


def plot(file: Path, found: dict[str, list[Figures]]) -> None:
    """Draws the times to the first token of both tenants in the last round, without and with a tenants file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for axis, (case, title) in zip(axes, (("first come", "without tenants"), ("shared", "with tenants")), strict=True):
        for name, color in (("heavy", "#d9822b"), ("light", "#0f8a8f")):
            points = found[case][-1]["times"][name]
            axis.plot([at for at, *_ in points], [first for _, first, _ in points], ".", color=color, label=name, ms=3)
        axis.set(title=title, xlabel="seconds", yscale="log")
    axes[0].set_ylabel("time to the first token, s")
    axes[0].legend(frameon=False, markerscale=3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def main() -> None:
    if sys.argv[1:2] == ["--load"]:
        url, key, clients, seed = sys.argv[2:]
        asyncio.run(heavy_load(Server(url, 0, Path()), key, int(clients), int(seed)))
        return
    args = parser(__doc__)
    args.add_argument("--model", choices=MODELS, default="python-8m")
    args.add_argument("--light", choices=("clients", "second"), default="clients", help="two clients, or one a second")
    args.add_argument("--seconds", type=float, default=20.0, help="of a round")
    args.add_argument("--rounds", type=int, default=3)
    args.add_argument("--heavy", type=int, default=200, help="clients of the heavy tenant")
    args.add_argument("--places", type=int, default=32, help="sequences that run at a time")
    args.add_argument("--plot", type=Path, metavar="FILE", help="also draw the last round into this file")
    given = args.parse_args()
    paced = given.light == "second"
    found: dict[str, list[Figures]] = {case: [] for case in CASES}
    watch, began = Watch(), time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(given.rounds):
            for case in CASES if number % 2 == 0 else reversed(CASES):
                heavy = 0 if case == "alone" else given.heavy
                with started(MODELS[given.model], case, folder, given.places, paced) as (server, keys, state):
                    figures = asyncio.run(measure(server, keys, given.seconds, heavy, number, paced))
                figures["parts"] = ledger_parts(state, figures) if keys else []
                figures["steps"] = step_seconds(folder / f"events-{case}", figures)
                found[case].append(figures)
    rows = [row_of(case, rounds) for case, rounds in found.items()]
    factor = 1.5 if paced else 2.0
    for row in rows:
        row["allowed"] = round(factor * rows[0]["p99"] + row["step"], 4)
        row["allowed_p99"] = round(factor * rows[0]["p99"] + row["step_p99"], 4)
        row["throughput"] = round(row["tok_s"] / rows[-1]["tok_s"], 4)
    columns = [("case", "case"), ("requests", "requests"), ("TTFT P50 s", "p50"), ("P99 s", "p99")]
    columns += [("allowed", "allowed"), ("with P99 step", "allowed_p99"), ("step s", "step"), ("P99", "step_p99")]
    columns += [(f"{name} P99", f"{name}_p99") for name in PARTS]
    columns += [("tok/s", "tok_s"), ("/ first come", "throughput"), ("out / step", "out_step")]
    columns += [("computed", "computed"), ("preempted", "preempted")]
    show_table("A light tenant beside a heavy one", columns, rows)
    if given.plot:
        plot(given.plot, found)
    settings = {name: getattr(given, name) for name in ("model", "light", "heavy", "places", "seconds", "rounds")}
    write({**settings, "calm_share": watch.share(began, time.perf_counter()), "rows": rows}, given.json)


if __name__ == "__main__":
    main()
