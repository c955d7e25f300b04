"""Sends a workload to a running server and measures what its users see. The server needs /v1/models and
/v1/completions of the OpenAI API; for one-shot models see `penstock.bench.one_shot`."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import aiohttp
import orjson

from penstock.bench.timeline import Timeline
from penstock.bench.workload import WorkloadRequest

LIST_SECONDS = 20.0  # the longest time for a server to list its models
# Sends a request, and returns the times of its answer. An error is in the timeline.
Send = Callable[[aiohttp.ClientSession, WorkloadRequest], Awaitable[Timeline]]


async def first_model(url: str, api_key: str | None) -> str:
    """Returns the id of the first model that the server lists. Raises aiohttp.ClientError and TimeoutError."""
    timeout = aiohttp.ClientTimeout(total=LIST_SECONDS)
    async with (
        aiohttp.ClientSession(headers=authorization(api_key), timeout=timeout) as session,
        session.get(f"{url}/v1/models") as answer,
    ):
        answer.raise_for_status()
        return str((await answer.json())["data"][0]["id"])


def authorization(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


async def stream_item(session: aiohttp.ClientSession, url: str, model: str, item: WorkloadRequest) -> Timeline:
    """Sends one request, and records the times of its chunks. See Send."""
    line = Timeline(time.perf_counter())
    body = {
        "model": model,
        "prompt": list(item.prompt_ids),
        "max_tokens": item.output_len,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    tokens = 0
    try:
        async with session.post(f"{url}/v1/completions", data=orjson.dumps(body)) as answer:
            if answer.status != 200:
                line.error = f"status {answer.status}: {error_of(await answer.read())}"
                return line
            async for raw in answer.content:
                if not raw.startswith(b"data: ") or raw.startswith(b"data: [DONE]"):
                    continue
                chunk = orjson.loads(raw[6:])
                if "error" in chunk:
                    line.error = error_of(raw[6:])
                elif chunk["choices"]:
                    line.stamps.append((time.perf_counter(), 1))
                if chunk.get("usage"):
                    tokens = chunk["usage"]["completion_tokens"]
    except (aiohttp.ClientError, TimeoutError) as error:
        line.error = f"{type(error).__name__}: {error}"
    # A chunk may have several tokens. Only the usage says how many there were: the last chunk gets those not seen.
    if line.stamps and tokens > len(line.stamps):
        time_last, count = line.stamps[-1]
        line.stamps[-1] = (time_last, count + tokens - len(line.stamps))
    return line


def error_of(body: bytes) -> str:
    """Returns the message of an error answer of any wire, on one line."""
    try:
        error = orjson.loads(body)["error"]
        text = error if isinstance(error, str) else str(error["message"])
    except (ValueError, LookupError, TypeError):
        text = body.decode(errors="replace")
    return " ".join(text.split())[:200]


async def run_load(
    url: str,
    model: str,
    items: Sequence[WorkloadRequest],
    *,
    concurrency: int | None = None,
    api_key: str | None = None,
    say: Callable[[str], None] = lambda text: None,
    send: Send | None = None,
) -> tuple[list[Timeline], float]:
    """Sends all items when they are due, at most `concurrency` at once, and passes the progress to `say`. Without
    `send`, they are completions. Returns their timelines and the seconds that all of them took."""
    send = send or (lambda session, item: stream_item(session, url, model, item))
    gate = asyncio.Semaphore(concurrency or len(items))
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=3600)
    headers = {**authorization(api_key), "Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        start = time.perf_counter()
        ended: list[Timeline] = []

        def show() -> None:
            failed = sum(1 for line in ended if line.error)
            say(f"{len(ended)} of {len(items)} requests finished" + (f", {failed} failed" if failed else ""))

        show()

        async def one(item: WorkloadRequest) -> Timeline:
            async with gate:
                await asyncio.sleep(max(0.0, start + item.arrival - time.perf_counter()))
                line = await send(session, item)
            ended.append(line)
            show()
            return line

        lines = await asyncio.gather(*(one(item) for item in items))
        return list(lines), time.perf_counter() - start
