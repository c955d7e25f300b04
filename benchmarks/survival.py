"""Kills or stops the engine of a running server at random moments under many streams. Every stream must end with the
text that it has without a fault.

    python benchmarks/survival.py --json benchmarks/results/avx512/survival.json

A trial passes if all streams are complete and equal to the undisturbed ones. It reports the pause: the longest time in
which a stream got nothing, and the seconds from the fault until /readyz answers 200 again.
"""

import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from results import parser, write

STREAMS, MAX_TOKENS = 50, 64
TOPICS = ("the sea", "a clock", "bread", "the moon", "a train", "winter", "a garden", "music", "a letter", "iron")
READY_SECONDS = 120.0


class Said(NamedTuple):
    text: str
    finish_reason: str
    longest_gap: float  # seconds between two events


class Trial(NamedTuple):
    equal: int  # streams with the text that they have without a fault
    back_s: float  # from the fault to readiness
    gap_s: float  # the longest time without an event of any stream


def body(number: int) -> dict[str, Any]:
    """Every second request is sampled, the others are greedy."""
    topic = TOPICS[number % len(TOPICS)]
    return {
        "messages": [{"role": "user", "content": f"Write paragraph {number} of a story about {topic}."}],
        "temperature": 0.8 if number % 2 else 0.0,
        "seed": number,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }


async def read(http: aiohttp.ClientSession, url: str, number: int) -> Said:
    """Reads one stream to its end. Raises RuntimeError for an error event."""
    text, reason, last, longest = [], "", time.monotonic(), 0.0
    async with http.post(url + "/v1/chat/completions", json=body(number)) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            choice = event["choices"][0]
            text.append(choice["delta"].get("content") or "")
            reason = choice["finish_reason"] or reason
    return Said("".join(text), reason, longest)


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
    """The engine's process: the server's youngest child."""
    return max(map(int, Path(f"/proc/{server}/task/{server}/children").read_text().split()))


async def trial(
    http: aiohttp.ClientSession, url: str, server: int, fault: signal.Signals, delay: float, undisturbed: list[Said]
) -> Trial:
    streams = [asyncio.create_task(read(http, url, number)) for number in range(STREAMS)]
    await asyncio.sleep(delay)
    began = time.monotonic()
    os.kill(engine_of(server), fault)
    await until_ready(http, url, wanted=False)
    await until_ready(http, url)
    back = time.monotonic() - began
    said = await asyncio.gather(*streams)
    equal = sum((a.text, a.finish_reason) == (b.text, b.finish_reason) for a, b in zip(said, undisturbed, strict=True))
    return Trial(equal, back, max(one.longest_gap for one in said))


async def measure(url: str, server: int, trials: int) -> dict[str, Any]:
    choose = random.Random(1)
    results: dict[str, Any] = {}
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        await until_ready(http, url)
        began = time.monotonic()
        undisturbed = await asyncio.gather(*(read(http, url, number) for number in range(STREAMS)))
        seconds = time.monotonic() - began
        print(f"undisturbed: {STREAMS} streams in {seconds:.1f} s", flush=True)
        for fault in (signal.SIGKILL, signal.SIGSTOP):
            done = []
            for number in range(trials):
                delay = choose.uniform(0.05, 0.9) * seconds
                done.append(await trial(http, url, server, fault, delay, undisturbed))
                print(f"{fault.name} {number + 1}/{trials} after {delay:.1f} s: {done[-1]}", flush=True)
                await asyncio.sleep(8)  # engines that end within a minute are started with a growing delay
            results[fault.name] = {
                "passed": f"{sum(each.equal == STREAMS for each in done)}/{len(done)}",
                "streams_equal": f"{sum(each.equal for each in done)}/{STREAMS * len(done)}",
                "back_s_median": round(statistics.median(each.back_s for each in done), 2),
                "back_s_worst": round(max(each.back_s for each in done), 2),
                "gap_s_worst": round(max(each.gap_s for each in done), 2),
            }
    return {"streams": STREAMS, "max_tokens": MAX_TOKENS, "undisturbed_s": round(seconds, 1), **results}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--trials", type=int, default=20, help="of each fault")
    given = arguments.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "penstock", "serve", "smollm2-135m", "--port", str(port), "--max-num-seqs", "64"]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        results = asyncio.run(measure(f"http://127.0.0.1:{port}", server.pid, given.trials))
    finally:
        server.terminate()
        server.wait(60)
    write(results, given.json)


if __name__ == "__main__":
    main()
