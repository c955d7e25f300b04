"""Hours of everything at once on one server of SmolLM2: right and wrong requests, clients that leave or read slowly,
bursts beyond what fits, engines that are killed or stopped."""

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.chaos.engine import Fault, fault_seed
from tests.chaos.fuzz import Found, Maker, send
from tests.chaos.place import Held, Place, place, require
from tests.chaos.proxy import Link, Proxy, proxied, reset

MODEL = "smollm2-135m"
FLAGS = ("--max-num-seqs", "32", "--kv-cache-memory", "192MiB", "--max-waiting", "48", "--max-model-len", "2048")
SAMPLE_SECONDS = 5.0
FAULT_SECONDS = 45.0  # between engines that are killed or stopped
BURST_SECONDS = 60.0
BURST = 160  # requests at once: three times what may wait
CHATS = 24  # different conversations, whose answers are known
ANSWER_SECONDS = 240.0  # for an answer, engines that end meanwhile included
SETTLED = 0.95, 1.05  # of the resident memory of the first hour
AVAILABLE = 0.999
BUSY = (429, 529)  # the second is Anthropic's

_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}}
_TOOLS = [{"type": "function", "function": {"name": "save", "parameters": _SCHEMA}}]
_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.9, "response_format": _FORMAT},
    {"temperature": 0.0, "tools": _TOOLS, "tool_choice": "required"},
)


@dataclass
class Point:
    """What the server holds at a moment."""

    seconds: float
    server_mb: float
    engine_mb: float
    files: int
    tasks: int
    blocks: float
    running: float


@dataclass
class Record:
    """What became of the requests."""

    good: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)  # as the server was busy
    left: Counter[str] = field(default_factory=Counter)  # whose clients left on purpose
    bad: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    points: list[Point] = field(default_factory=list)

    @property
    def availability(self) -> float:
        """Of the answers to requests that were accepted: the share that was neither an error of the server nor wrong.

        Requests that were refused because of the load, or whose client left, are not counted.
        """
        good = self.good.total()
        return good / max(good + len(self.bad), 1)


class Soak:
    """The traffic to one server, until `end`."""

    def __init__(self, site: Place, proxy: Proxy, end: float) -> None:
        self._site = site
        self._proxy = proxy
        self._end = end
        self._random = random.Random(32)
        self._known: dict[int, Any] = {}  # the answers without a fault, by conversation
        self.record = Record()

    async def learn(self) -> None:
        """Gets the answers to all conversations without a fault."""
        for number in range(CHATS):
            self._known[number] = await self._chat(number, stream=False)

    async def run(self) -> None:
        maker = Maker(await self._document(), self._site.model, 32)
        clients: list[Callable[[], Awaitable[None]]] = [
            *[self._chats] * 8,
            *[self._wires] * 2,
            *[self._leaving] * 3,
            *[self._slow] * 2,
            self._bursts,
            self._rows,
        ]
        tasks = [asyncio.create_task(self._repeat(client)) for client in clients]
        tasks += [asyncio.create_task(self._hostile(maker)), asyncio.create_task(self._engines())]
        sampling = asyncio.create_task(self._sample())
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in (*tasks, sampling):
                task.cancel()

    async def _repeat(self, client: Callable[[], Awaitable[None]]) -> None:
        while time.monotonic() < self._end:
            try:
                await asyncio.wait_for(client(), ANSWER_SECONDS)
            except TimeoutError:
                self.record.bad.append(f"{client.__name__}: no end within {ANSWER_SECONDS:g} s")
            except (aiohttp.ClientError, OSError, KeyError, ValueError) as error:
                self.record.bad.append(f"{client.__name__}: {error!r}")

    # -- clients ----------------------------------------------------------------------------------------------

    def _body(self, number: int, stream: bool) -> dict[str, Any]:
        return {
            "model": self._site.model,
            "messages": [{"role": "user", "content": f"Tell me about the number {number}."}],
            "max_tokens": 16 + 4 * number,
            "seed": number,
            "stream": stream,
            **_KINDS[number % len(_KINDS)],
        }

    async def _chat(self, number: int, *, stream: bool, url: str | None = None) -> Any:
        """An answer as (text, reason); None if it was refused. Raises ValueError for another error."""
        path = (url or self._site.url) + "/v1/chat/completions"
        async with self._site.http.post(path, json=self._body(number, stream)) as answer:
            if answer.status == 429:
                return None
            if answer.status != 200:
                raise ValueError(f"status {answer.status}: {(await answer.text())[:300]}")
            if not stream:
                (choice,) = (await answer.json())["choices"]
                return _text(choice["message"]), choice["finish_reason"]
            text, reason = "", ""
            async for event in _events(answer):
                (choice,) = event["choices"]
                text += _text(choice["delta"])
                reason = choice["finish_reason"] or reason
            return text, reason

    async def _chats(self) -> None:
        number, stream = self._random.randrange(CHATS), self._random.random() < 0.7
        kind = "stream" if stream else "whole"
        said = await self._chat(number, stream=stream)
        if said is None:
            self.record.refused[kind] += 1
            await asyncio.sleep(1.0)
        elif said != self._known[number]:
            self.record.bad.append(f"conversation {number}: {said} instead of {self._known[number]}")
        else:
            self.record.good[kind] += 1

    async def _wires(self) -> None:
        """Other APIs, whose answers are only counted."""
        user = {"messages": [{"role": "user", "content": "Say hello."}], "model": self._site.model}
        path, body = self._random.choice(
            (
                ("/v1/messages", {**user, "max_tokens": 24, "stream": True}),
                ("/api/chat", {**user, "options": {"num_predict": 24}}),
                ("/generate", {"inputs": "Rain", "parameters": {"max_new_tokens": 24}}),
                (f"/v2/models/{self._site.model}/generate", {"text_input": "Rain", "max_tokens": 24}),
                ("/v1/completions", {"prompt": "Rain " * 300, "max_tokens": 4, "n": 2}),
                ("/tokenize", {"prompt": "Rain " * 3000}),
                ("/v1/embeddings", {"input": "Rain"}),
            )
        )
        async with self._site.http.post(self._site.url + path, json=body) as answer:
            text = await answer.read()
            if answer.status in BUSY:
                self.record.refused[path] += 1
            elif answer.status >= 500 or b'"internal' in text:
                self.record.bad.append(f"{path}: {answer.status} {text[:300]!r}")
            else:
                self.record.good[path] += 1
        await asyncio.sleep(self._random.expovariate(1.0))

    async def _leaving(self) -> None:
        """A client that resets its connection at any time."""
        sent = json.dumps(self._body(self._random.randrange(CHATS), self._random.random() < 0.7)).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        _, writer = await asyncio.open_connection("127.0.0.1", self._site.server.port)
        part = self._random.random() < 0.1
        writer.write(f"{head}content-length: {len(sent)}\r\n\r\n".encode() + sent[: len(sent) // 2 if part else None])
        await asyncio.sleep(self._random.expovariate(1.0))
        reset(writer)
        self.record.left["reset"] += 1

    async def _slow(self) -> None:
        """A client that reads some bytes a second, and may be cut off."""
        self._proxy.link = Link(bytes_per_second=self._random.choice((200.0, 2000.0)))
        number = self._random.randrange(CHATS)
        try:
            said = await asyncio.wait_for(
                self._chat(number, stream=True, url=f"http://127.0.0.1:{self._proxy.port}"), 30.0
            )
        except TimeoutError:
            self.record.left["slow"] += 1
            return
        if said is None:
            self.record.refused["slow"] += 1
            await asyncio.sleep(1.0)
        elif said != self._known[number]:
            self.record.bad.append(f"slow conversation {number}: {said}")
        else:
            self.record.good["slow"] += 1

    async def _bursts(self) -> None:
        await asyncio.sleep(self._random.uniform(0.5, 1.5) * BURST_SECONDS)
        results = await asyncio.gather(*(self._chat(n % CHATS, stream=True) for n in range(BURST)))
        for number, said in enumerate(results):
            if said is None:
                self.record.refused["burst"] += 1
            elif said != self._known[number % CHATS]:
                self.record.bad.append(f"conversation {number % CHATS} of a burst: {said}")
            else:
                self.record.good["burst"] += 1
        self.record.faults["burst"] += 1

    async def _rows(self) -> None:
        """A request whose row is not finite: it must fail, and no other."""
        await asyncio.sleep(self._random.expovariate(1 / 20))
        seed = fault_seed(Fault.NOT_FINITE, self._random.randrange(1, 20), repeated=True)
        body = {"prompt": "Once", "max_tokens": 60, "ignore_eos": True, "seed": seed, "model": self._site.model}
        async with self._site.http.post(self._site.url + "/v1/completions", json=body) as answer:
            self.record.faults[f"row {answer.status}"] += 1
            if answer.status not in (*BUSY, 500):
                self.record.bad.append(f"a row that was not finite: {answer.status} {(await answer.text())[:300]}")

    async def _hostile(self, maker: Maker) -> None:
        found = Found()
        while time.monotonic() < self._end:
            await send(self._site, maker.request(), found)
            await asyncio.sleep(self._random.expovariate(10.0))
        self.record.bad += found.bad
        self.record.faults["hostile"] = found.statuses.total()

    async def _engines(self) -> None:
        """Kills or stops the engine from time to time."""
        while time.monotonic() + FAULT_SECONDS * 2 < self._end:
            await asyncio.sleep(self._random.uniform(0.7, 1.3) * FAULT_SECONDS)
            number = self._random.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
            os.kill(self._site.engine_pid, number)
            self.record.faults[number.name] += 1
            await self._site.until_ready(False, 120)
            await self._site.until_ready(True, 120)

    async def _document(self) -> dict[str, Any]:
        async with self._site.http.get(self._site.url + "/openapi.json") as answer:
            document: dict[str, Any] = await answer.json()
            return document

    async def _sample(self) -> None:
        began, site = time.monotonic(), self._site
        while True:
            with contextlib.suppress(Exception):  # the engine may be away
                held, own = await site.held(), site.resident(engine=False)
                self.record.points.append(
                    Point(
                        round(time.monotonic() - began, 1),
                        own / 1e6,
                        (site.resident() - own) / 1e6,
                        held.files,
                        held.tasks,
                        held.blocks,
                        held.running,
                    )
                )
                if len(self.record.points) % 12 == 0:
                    print(f"    {self.record.points[-1]}, {len(self.record.bad)} bad", flush=True)
            await asyncio.sleep(SAMPLE_SECONDS)


def _text(message: dict[str, Any]) -> str:
    """Content and calls of a message or a delta."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    named = "".join((call.get("name") or "") + (call.get("arguments") or "") for call in calls)
    return (message.get("content") or "") + named


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.content:
        if line.startswith(b"data: {"):
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise ValueError(event["error"]["message"])
            yield event


def memory(points: list[Point], minutes: float) -> dict[str, float]:
    """Resident memory at the end over that of the first hour, or of the first half of a shorter run: the medians, as
    engines that are started again are smaller for some time. The first tenth is warm-up."""
    first = min(3600.0, minutes * 30)
    settled = [point for point in points if point.seconds > minutes * 6]
    early = [point for point in settled if point.seconds <= first]
    late = [point for point in settled if point.seconds > minutes * 60 * 0.75]
    shares = {}
    for name in ("server_mb", "engine_mb"):
        start, end = (statistics.median(getattr(point, name) for point in some) for some in (early, late))
        shares |= {name: round(end, 1), f"{name.removesuffix('_mb')}_growth": round(end / start - 1, 4)}
    return shares


async def soak(folder: Path, minutes: float, plot: Path | None = None) -> dict[str, Any]:
    """Runs all traffic for some minutes. Raises Failed unless the server is available and gives all back."""
    async with place(folder, *FLAGS, model=MODEL) as site:
        async with proxied(site.server.port) as proxy:
            traffic = Soak(site, proxy, time.monotonic() + 60 * minutes)
            await traffic.learn()
            before: Held = await site.baseline()
            began = time.monotonic()
            await traffic.run()
        record = traffic.record
        (folder / "points.json").write_text(json.dumps([vars(point) for point in record.points]))
        (folder / "bad.txt").write_text("\n".join(record.bad))
        if plot is not None:
            draw(record, plot)
        figures = {
            "minutes": minutes,
            "availability": round(record.availability, 5),
            "accepted": record.good.total() + len(record.bad),
            "bad": len(record.bad),
            "first_bad": record.bad[:5],
            "refused_as_busy": record.refused.total(),
            "left": record.left.total(),
            "faults": dict(record.faults),
            "restarts": int(await site.value("penstock_engine_restarts_total")),
            **memory(record.points, minutes),
            **site.lags(began),
            **await site.require_baseline(before),
        }
        require(record.availability >= AVAILABLE, f"{figures}\n" + "\n".join(record.bad[:10]))
        growth = [1 + figures[name] for name in ("server_growth", "engine_growth")]
        require(all(SETTLED[0] <= each <= SETTLED[1] for each in growth), f"resident memory is not flat: {figures}")
        log = site.server.log.read_text(errors="replace")
        require("Traceback" not in log, "a traceback in the server's log")
        return figures


def draw(record: Record, path: Path) -> None:
    """Plots memory, files, tasks and blocks over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    minutes = [point.seconds / 60 for point in record.points]
    figure, axes = pyplot.subplots(3, 1, figsize=(8, 6), sharex=True, layout="constrained")
    axes[0].plot(minutes, [point.server_mb for point in record.points], label="server")
    axes[0].plot(minutes, [point.engine_mb for point in record.points], label="engine and grammar checker")
    axes[0].set_ylabel("resident MB")
    axes[1].plot(minutes, [point.files for point in record.points], label="open files")
    axes[1].plot(minutes, [point.tasks for point in record.points], label="tasks")
    axes[2].plot(minutes, [100 * point.blocks for point in record.points], label="KV blocks held, %")
    axes[2].plot(minutes, [point.running for point in record.points], label="running requests")
    axes[2].set_xlabel("minutes")
    for one in axes:
        one.set_ylim(bottom=0)
        one.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False, ncols=2)
    figure.savefig(path, dpi=120)
