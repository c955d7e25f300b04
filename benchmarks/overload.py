"""Sends a server more requests than it can answer, and counts the answers that are in time.

    python benchmarks/overload.py --json benchmarks/results/avx512/overload.json --plot docs/images/overload.png

Capacity is the rate of answers with as many clients as can wait, over at least `--answers` of them, however slow the
model. Then requests come at random times:

- at twice the capacity, where each must have its first token within 2 s: once with `first_token_timeout`, once without,
  first come, first served, where the client counts those that are in time;
- at ten times the capacity, without deadlines, where most are refused.

`useful_tokens` is the share of all computed tokens that were for answers in time. Unlike goodput over capacity, it does
not depend on what else the machine does meanwhile.

The load client has the lowest priority; its share of the processors is reported. Prompts are random token ids.
"""

import asyncio
import contextlib
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from results import CORES, parser, write
from servers import free_port, start

from penstock.bench.workload import percentile
from penstock.weights.packaged import SMOLLM2

PROMPT, OUTPUT, DEADLINE = 128, 16, 2.0
FLAGS = "--threads 1 --max-num-seqs 16 --kv-cache-memory 256MiB --max-waiting 256 --speculation off"
TOKEN = "500"  # the one that is sampled: the first event comes with the first text, which random weights may not give
AFTER = 8.0  # seconds after the last request, in which answers still count
BUCKET = 2.0  # seconds of a point of the plot
LONGEST = 1200.0  # seconds of a measurement of capacity


@dataclass(slots=True)
class Answer:
    sent: float
    status: int = 0
    first: float = 0.0  # time of the first token; 0: none came
    ended: float = 0.0
    complete: bool = False

    @property
    def in_time(self) -> bool:
        return self.complete and self.first - self.sent <= DEADLINE


@dataclass
class Server:
    """A running `penstock serve`."""

    url: str
    pid: int
    log: Path
    memory: list[tuple[float, int]] = field(default_factory=list)  # (time, bytes) of all its processes

    def resident(self) -> int:
        """Bytes of private and shared memory of the server and its engine."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        pages = 0
        for pid in (str(self.pid), *children):
            with contextlib.suppress(FileNotFoundError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def refusal_seconds(self) -> list[float]:
        """The server's own times of the requests that it refused."""
        return [float(found) for found in re.findall(r"status=429 seconds=([\d.]+)", self.log.read_text())]


@contextlib.contextmanager
def serving(model: str, flags: list[str], log: Path) -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "penstock", "serve", model, "--port", str(port), *flags]
    with log.open("wb") as sink:
        process = start(command, stdout=sink, stderr=sink, start_new_session=True)
    try:
        yield Server(f"http://127.0.0.1:{port}", process.pid, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()


class Load:
    """Sends requests, and keeps what became of each."""

    def __init__(self, http: aiohttp.ClientSession, server: Server, **fields: Any) -> None:
        self.answers: list[Answer] = []
        self._http = http
        self._url = server.url + "/v1/completions"
        self._fields = {
            "max_tokens": OUTPUT,
            "ignore_eos": True,
            "stream": True,
            "logit_bias": {TOKEN: 100.0},
            **fields,
        }
        self._random = random.Random(0)

    async def send(self) -> None:
        prompt = [self._random.randrange(100, 1000) for _ in range(PROMPT)]
        answer = Answer(time.monotonic())
        self.answers.append(answer)
        with contextlib.suppress(aiohttp.ClientError):
            async with self._http.post(self._url, json={"prompt": prompt, **self._fields}) as response:
                answer.status = response.status
                async for line in response.content:
                    if line.startswith(b'data: {"id"'):
                        answer.first = answer.first or time.monotonic()
                    elif line.startswith(b"data: [DONE]"):
                        answer.complete = bool(answer.first)
                    elif line.startswith(b'data: {"error"'):
                        answer.first = 0.0
        answer.ended = time.monotonic()

    async def closed(self, clients: int, seconds: float, answers: int) -> float:
        """Each client sends a request when the one before it has been answered.

        That goes on for `seconds`, and until the last three quarters of the time have `answers` complete answers.
        Returns the rate in these three quarters. Raises RuntimeError if that takes longer than LONGEST.
        """
        start = time.monotonic()
        rate: float | None = None

        async def client() -> None:
            nonlocal rate
            while rate is None:
                await self.send()
                passed = time.monotonic() - start
                if rate is None and passed >= seconds:
                    measured = rate_of(self.answers, start + passed / 4, start + passed)
                    if measured * passed * 3 / 4 >= answers - 0.5:
                        rate = measured
                    elif passed > LONGEST:
                        raise RuntimeError(f"fewer than {answers} answers in {passed * 3 / 4:.0f} s: lower --answers")

        await asyncio.gather(*(client() for _ in range(clients)))
        assert rate is not None
        return rate

    async def open(self, rate: float, seconds: float, server: Server) -> None:
        """Requests come at random times, however long the answers take. Those that are open long after the end are
        cancelled."""
        start = due = time.monotonic()
        tasks: set[asyncio.Task[None]] = set()
        while due < start + seconds:
            due += self._random.expovariate(rate)
            await asyncio.sleep(max(due - time.monotonic(), 0))
            task = asyncio.create_task(self.send())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if not server.memory or time.monotonic() > server.memory[-1][0] + 1:
                server.memory.append((time.monotonic(), server.resident()))
        if tasks:
            await asyncio.wait(tasks, timeout=AFTER)
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def rate_of(answers: list[Answer], start: float, end: float) -> float:
    """Complete answers a second that ended in a part of the time."""
    return sum(answer.complete and start <= answer.ended < end for answer in answers) / (end - start)


@contextlib.asynccontextmanager
async def session(server: Server) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        end = time.monotonic() + 120
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(server.url + "/readyz") as answer:
                    if answer.status == 200:
                        break
            if time.monotonic() > end:
                raise RuntimeError(f"the server was not ready:\n{server.log.read_text()}")
            await asyncio.sleep(0.1)
        yield http


async def computed_tokens(http: aiohttp.ClientSession, server: Server) -> float:
    """Tokens that the engine has computed so far, for whatever became of them."""
    async with http.get(server.url + "/metrics") as answer:
        found = re.search(r"^penstock_engine_computed_tokens_total{.*} ([\d.e+]+)$", await answer.text(), re.MULTILINE)
    assert found is not None
    return float(found[1])


async def capacity_of(server: Server, clients: int, seconds: float, answers: int) -> float:
    async with session(server) as http:
        return await Load(http, server).closed(clients, seconds, answers)


async def deadline_run(
    server: Server, rate: float, seconds: float, **fields: Any
) -> tuple[dict[str, Any], list[float]]:
    """Returns figures, and the answers in time for each second, by the time at which their requests came."""
    async with session(server) as http:
        load = Load(http, server, **fields)
        before, start = await computed_tokens(http, server), time.monotonic()
        await load.open(rate, seconds, server)
        computed = await computed_tokens(http, server) - before
    counted = [answer for answer in load.answers if seconds / 4 <= answer.sent - start < seconds]
    span = seconds * 3 / 4
    points = [0.0] * int(seconds / BUCKET)
    for answer in load.answers:
        place = int((answer.sent - start) / BUCKET)
        if answer.in_time and place < len(points):
            points[place] += 1 / BUCKET
    return {
        "requests": len(counted),
        "in_time": sum(answer.in_time for answer in counted),
        "goodput": round(sum(answer.in_time for answer in counted) / span, 2),
        "useful_tokens": round(sum(answer.in_time for answer in load.answers) * (PROMPT + OUTPUT - 1) / computed, 3),
        "begun_but_late": sum(answer.complete and not answer.in_time for answer in counted),
        "dropped": sum(answer.status == 504 for answer in counted),
        "refused": sum(answer.status == 429 for answer in counted),
    }, points


async def refusal_run(server: Server, rate: float, seconds: float) -> dict[str, Any]:
    async with session(server) as http:
        load = Load(http, server)
        start = time.monotonic()
        await load.open(rate, seconds, server)
    refusals = server.refusal_seconds()
    settled = [size for when, size in server.memory if when > start + seconds / 4]
    return {
        "requests": len(load.answers),
        "refused": sum(answer.status == 429 for answer in load.answers),
        "refusal_ms_p50": round(percentile(refusals, 0.5) * 1e3, 1),
        "refusal_ms_p99": round(percentile(refusals, 0.99) * 1e3, 1),
        "goodput": round(rate_of(load.answers, start + seconds / 4, start + seconds), 2),
        "resident_mb": round(settled[0] / 1e6),
        "resident_growth": round(max(settled) / settled[0] - 1, 4),
    }


def plot(path: Path, points: dict[str, list[float]], capacity: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for name, values in points.items():
        axes.plot([(i + 0.5) * BUCKET for i in range(len(values))], values, ".-", label=name, linewidth=1)
    axes.axhline(capacity, color="grey", linestyle=":", label="capacity")
    axes.set(xlabel="seconds since the load began", ylabel=f"answers a second, first token within {DEADLINE:g} s")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


async def measure(
    server: Server, seconds: float, overload_seconds: float, clients: int, answers: int
) -> tuple[dict[str, Any], Any]:
    figures: dict[str, Any] = {}
    points: dict[str, list[float]] = {}
    await capacity_of(server, clients, 3, 1)  # warm-up
    capacity = await capacity_of(server, clients, seconds, answers)
    for name, fields in (
        ("dropped when late", {"first_token_timeout": DEADLINE}),
        ("first come, first served", {}),
    ):
        figures[name], points[name] = await deadline_run(server, 2 * capacity, seconds, **fields)
        again = await capacity_of(server, clients, seconds / 2, answers)  # the machine may have changed meanwhile
        figures[name]["capacity"] = round((capacity + again) / 2, 2)
        figures[name]["share_of_capacity"] = round(2 * figures[name]["goodput"] / (capacity + again), 3)
        capacity = again
    figures["ten times"] = await refusal_run(server, 10 * capacity, overload_seconds)
    again = await capacity_of(server, clients, seconds / 2, answers)
    figures["ten times"]["share_of_peak"] = round(2 * figures["ten times"]["goodput"] / (capacity + again), 3)
    figures["ten times"]["capacity"] = round((capacity + again) / 2, 2)
    return figures, (points, capacity)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", default=str(SMOLLM2.locate()), help="default: SmolLM2-135M-Instruct")
    arguments.add_argument(
        "--flags", default="--threads 1 --max-num-seqs 16 --kv-cache-memory 256MiB --max-waiting 256"
    )
    arguments.add_argument("--clients", type=int, default=48, help="of the measurement of capacity")
    arguments.add_argument("--answers", type=int, default=100, help="at least, in each measurement of capacity")
    arguments.add_argument("--seconds", type=float, default=40.0, help="of each run at twice the capacity")
    arguments.add_argument("--overload-seconds", type=float, default=300.0, help="of the run at ten times the capacity")
    arguments.add_argument("--plot", type=Path, metavar="PNG")
    args = arguments.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(args.model, args.flags.split(), Path(folder) / "log") as server,
    ):
        os.nice(10)  # the server has been started with the ordinary priority
        began = time.monotonic()
        figures, (points, capacity) = asyncio.run(
            measure(server, args.seconds, args.overload_seconds, args.clients, args.answers)
        )
        used, seconds = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - began
    if args.plot:
        plot(args.plot, points, capacity)
    result = {
        "benchmark": "overload",
        "model": Path(args.model).name,
        "flags": args.flags,
        "prompt": PROMPT,
        "output": OUTPUT,
        "first_token_deadline_s": DEADLINE,
        "seconds": args.seconds,
        "overload_seconds": args.overload_seconds,
        "load_client_share_of_processors": round((used.ru_utime + used.ru_stime) / seconds / CORES, 3),
        **figures,
    }
    write(result, args.json)


if __name__ == "__main__":
    main()
