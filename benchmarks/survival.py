"""Kills or stops the engine of a running server at random moments under many streams. Every stream must end with the
tokens that it has without a fault.

    python benchmarks/survival.py --json benchmarks/results/avx512/survival.json

The streams are greedy or sampled; some are held to a JSON schema, some call a tool. A trial passes if all streams are
complete and equal to the undisturbed ones, and if the engine is back in time: at most 3 s more than it needs to load.
The load time is measured by killing the engine of an idle server. Two pauses are reported apart, because the server
makes them on purpose: until a silent engine counts as hung (`noticed_s`), and before it starts an engine that has ended
several times within a minute (`backoff_s`).
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from results import parser, write
from servers import free_port, start

from penstock.engine.recovery import DELAYS, MINUTE

STREAMS, MAX_TOKENS = 50, 64
TOPICS = ("the sea", "a clock", "bread", "the moon", "a train", "winter", "a garden", "music", "a letter", "iron")
READY_SECONDS = 120.0
SLACK = 3.0  # seconds beyond the load time after which the engine must be back
ENGINE = b"penstock.engine.process"
FLAGS = "--max-num-seqs 64"

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "mood": {"enum": ["calm", "sad", "merry"]},
        "pages": {"type": "integer", "minimum": 1, "maximum": 900},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 6},
    },
    "required": ["title", "mood", "pages", "words"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "story", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "save_story", "description": "Saves a story", "parameters": SCHEMA}}
KINDS: dict[str, dict[str, Any]] = {  # of the streams, in turn
    "greedy": {"temperature": 0.0, "ignore_eos": True, "logprobs": True},
    "sampled": {"temperature": 0.8, "ignore_eos": True, "logprobs": True},
    "greedy schema": {"temperature": 0.0, "response_format": FORMAT},
    "sampled schema": {"temperature": 0.9, "response_format": FORMAT, "logprobs": True},
    "sampled tool": {"temperature": 0.9, "tools": [TOOL], "tool_choice": "required"},
}


class Said(NamedTuple):
    text: str  # content, and arguments of calls
    tokens: tuple[tuple[str, float], ...]  # with log-probabilities, of streams that ask for them
    finish_reason: str


class Read(NamedTuple):
    said: Said
    longest_gap: float  # seconds between two events


class Trial(NamedTuple):
    equal: int  # streams with the tokens that they have without a fault
    noticed_s: float  # from the fault until /readyz says that the engine is not there
    backoff_s: float  # that the server waits before it starts an engine that has ended several times within a minute
    back_s: float  # from the fault to readiness
    gap_s: float  # the longest time without an event of any stream

    @property
    def restart_s(self) -> float:
        """Seconds to start the engine, without the two pauses."""
        return self.back_s - self.noticed_s - self.backoff_s


class Progress:
    """Counts the characters that streams have brought. All of them are known beforehand, unlike the time they take."""

    def __init__(self) -> None:
        self.characters = 0
        self._wanted = 0
        self._reached = asyncio.Event()

    def add(self, characters: int) -> None:
        self.characters += characters
        if self._wanted and self.characters >= self._wanted:
            self._reached.set()

    async def until(self, characters: int) -> None:
        self._wanted = characters
        self.add(0)
        await self._reached.wait()


class Backoff:
    """The server's pauses before a restart, which follow from the times of those before it."""

    def __init__(self) -> None:
        self._starts: deque[float] = deque()

    def next(self) -> float:
        now = time.monotonic()
        while self._starts and self._starts[0] < now - MINUTE:
            self._starts.popleft()
        self._starts.append(now)
        return DELAYS[min(len(self._starts), len(DELAYS)) - 1]


def body(number: int) -> dict[str, Any]:
    topic = TOPICS[number % len(TOPICS)]
    return {
        "messages": [{"role": "user", "content": f"Write paragraph {number} of a story about {topic}."}],
        "seed": number,
        "max_tokens": MAX_TOKENS,
        "stream": True,
        **list(KINDS.values())[number % len(KINDS)],
    }


async def read(http: aiohttp.ClientSession, url: str, number: int, progress: Progress) -> Read:
    """Reads one stream to its end. Raises RuntimeError for an error event."""
    text, tokens, reason, last, longest = [], [], "", time.monotonic(), 0.0
    async with http.post(url + "/v1/chat/completions", json=body(number)) as answer:
        if answer.status != 200:
            raise RuntimeError(await answer.text())
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            choice = event["choices"][0]
            delta = choice["delta"]
            parts = [delta.get("content") or ""]
            for call in delta.get("tool_calls") or ():
                parts += [call["function"].get("name") or "", call["function"].get("arguments") or ""]
            text += parts
            progress.add(sum(map(len, parts)))
            tokens += [(one["token"], one["logprob"]) for one in (choice.get("logprobs") or {}).get("content") or ()]
            reason = choice["finish_reason"] or reason
    return Read(Said("".join(text), tuple(tokens), reason), longest)


async def is_ready(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url + "/readyz") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def until_ready(http: aiohttp.ClientSession, url: str, wanted: bool = True) -> None:
    end = time.monotonic() + READY_SECONDS
    while await is_ready(http, url) != wanted:
        if time.monotonic() > end:
            raise RuntimeError(f"the server was not {'ready' if wanted else 'restarting'} within {READY_SECONDS:g} s")
        await asyncio.sleep(0.01)


def engine_of(server: int) -> int:
    """The engine's process. The server may have another child, which checks grammars."""
    for child in Path(f"/proc/{server}/task/{server}/children").read_text().split():
        with contextlib.suppress(OSError):
            if ENGINE in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    raise RuntimeError("the server has no engine")


async def fault_and_return(
    http: aiohttp.ClientSession, url: str, server: int, fault: signal.Signals
) -> tuple[float, float]:
    """Returns the seconds until the fault was noticed, and until the server is ready again."""
    began = time.monotonic()
    os.kill(engine_of(server), fault)
    await until_ready(http, url, wanted=False)
    noticed = time.monotonic() - began
    await until_ready(http, url)
    return noticed, time.monotonic() - began


async def load_seconds(http: aiohttp.ClientSession, url: str, server: int, backoff: Backoff) -> float:
    """Seconds that the engine needs to start if nothing else runs."""
    pause = backoff.next()
    noticed, back = await fault_and_return(http, url, server, signal.SIGKILL)
    return back - noticed - pause


async def trial(
    http: aiohttp.ClientSession,
    url: str,
    server: int,
    fault: signal.Signals,
    moment: float,
    undisturbed: list[Said],
    backoff: Backoff,
) -> Trial:
    """A fault at the `moment`, as a share of all that the streams say."""
    progress = Progress()
    streams = [asyncio.create_task(read(http, url, number, progress)) for number in range(STREAMS)]
    try:
        await progress.until(int(moment * sum(len(one.text) for one in undisturbed)))
        noticed, back = await fault_and_return(http, url, server, fault)
        ended = await asyncio.gather(*streams, return_exceptions=True)
    finally:
        for stream in streams:
            stream.cancel()
    equal = 0
    for number, (one, before) in enumerate(zip(ended, undisturbed, strict=True)):
        if isinstance(one, Read) and one.said == before:
            equal += 1
        else:
            print(f"stream {number} differs:\n  {before}\n  {one}", flush=True)
    gaps = [one.longest_gap for one in ended if isinstance(one, Read)]
    # The pause runs from the moment at which the server notices: what is not over by then counts.
    return Trial(equal, noticed, backoff.next(), back, max(gaps, default=0.0))


def summary(done: list[Trial], load: float) -> dict[str, Any]:
    passed = [each for each in done if each.equal == STREAMS and each.restart_s <= load + SLACK]
    return {
        "passed": f"{len(passed)}/{len(done)}",
        "streams_equal": f"{sum(each.equal for each in done)}/{STREAMS * len(done)}",
        "noticed_s_median": round(statistics.median(each.noticed_s for each in done), 2),
        "noticed_s_worst": round(max(each.noticed_s for each in done), 2),
        "restart_s_median": round(statistics.median(each.restart_s for each in done), 2),
        "restart_s_worst": round(max(each.restart_s for each in done), 2),
        "backoff_s_worst": round(max(each.backoff_s for each in done), 2),
        "back_s_worst": round(max(each.back_s for each in done), 2),
        "gap_s_worst": round(max(each.gap_s for each in done), 2),
    }


async def measure(url: str, server: int, faults: list[str], trials: int, pause: float) -> dict[str, Any]:
    choose, backoff = random.Random(1), Backoff()
    results: dict[str, Any] = {}
    done: dict[signal.Signals, list[Trial]] = {signal.Signals[fault]: [] for fault in faults}
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        await until_ready(http, url)
        loads = [await load_seconds(http, url, server, backoff)]
        began = time.monotonic()
        undisturbed = await asyncio.gather(*(read(http, url, number, Progress()) for number in range(STREAMS)))
        seconds = time.monotonic() - began
        print(f"load {loads[0]:.1f} s; undisturbed: {STREAMS} streams in {seconds:.1f} s", flush=True)
        said = [one.said for one in undisturbed]
        for number in range(trials):
            for fault, trials_of in done.items():
                moment = choose.uniform(0.01, 0.9)
                trials_of.append(await trial(http, url, server, fault, moment, said, backoff))
                print(f"{fault.name} {number + 1}/{trials} at {moment:.0%}: {trials_of[-1]}", flush=True)
                await asyncio.sleep(pause)
        await asyncio.sleep(pause)
        loads.append(await load_seconds(http, url, server, backoff))
    for fault, trials_of in done.items():
        results[fault.name] = summary(trials_of, max(loads))
    return {
        "streams": STREAMS,
        "kinds": list(KINDS),
        "max_tokens": MAX_TOKENS,
        "load_s": [round(load, 2) for load in loads],
        "undisturbed_s": round(seconds, 1),
        **results,
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--faults", default="SIGKILL,SIGSTOP", help="signals (SIGKILL,SIGSTOP)")
    arguments.add_argument("--trials", type=int, default=20, help="of each fault")
    arguments.add_argument("--pause", type=float, default=8.0, help="seconds between trials; fewer mean more backoff")
    arguments.add_argument("--flags", default=FLAGS, help=f"of penstock serve ({FLAGS})")
    given = arguments.parse_args()
    faults = given.faults.split(",")
    port = free_port()
    command = [sys.executable, "-m", "penstock", "serve", "smollm2-135m", "--port", str(port), *given.flags.split()]
    server = start(command, stderr=subprocess.DEVNULL)
    try:
        results = asyncio.run(measure(f"http://127.0.0.1:{port}", server.pid, faults, given.trials, given.pause))
    finally:
        server.terminate()
        server.wait(60)
    write({"benchmark": "survival", "flags": given.flags, **results}, given.json)
    for fault in faults:
        passed, _, count = results[fault]["passed"].partition("/")
        if passed != count:
            sys.exit(1)


if __name__ == "__main__":
    main()
