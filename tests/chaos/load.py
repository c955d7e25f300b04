"""Clients: streams that are read to their end, and what they were told."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiohttp

from tests.chaos.place import Failed, Place, require

TOPICS = ("import os\n", "def add(a, b):\n", "class Tree:\n", "for i in range(", "# sort a list\n", "try:\n    ")


class Told(NamedTuple):
    """The whole of an answer."""

    status: int
    text: str = ""
    reason: str = ""  # it ended; empty: it did not
    error: str = ""


def request(number: int, max_tokens: int = 64, **fields: Any) -> dict[str, Any]:
    """A completion. Every second one is sampled."""
    return {
        "prompt": f"# {number}\n" + TOPICS[number % len(TOPICS)],
        "max_tokens": max_tokens,
        "temperature": 0.9 if number % 2 else 0.0,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        **fields,
    }


async def ask(place: Place, body: dict[str, Any], url: str | None = None, path: str = "/v1/completions") -> Told:
    """The answer to a completion, streamed or whole."""
    async with place.http.post((url or place.url) + path, json={"model": place.model, **body}) as answer:
        if answer.status != 200:
            return Told(answer.status, error=await answer.text())
        if not body.get("stream"):
            choice = (await answer.json())["choices"][0]
            return Told(200, choice["text"], choice["finish_reason"])
        text, reason, error = [], "", ""
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                error = event["error"]["message"]
                continue
            for choice in event["choices"]:
                text.append(choice["text"])
                reason = choice["finish_reason"] or reason
        return Told(200, "".join(text), reason, error)


async def ask_all(place: Place, bodies: Sequence[dict[str, Any]]) -> list[Told]:
    return await asyncio.gather(*(ask(place, body) for body in bodies))


def require_same(told: Sequence[Told], undisturbed: Sequence[Told]) -> None:
    """Requires every answer to be whole and as it is without a fault."""
    for number, (one, before) in enumerate(zip(told, undisturbed, strict=True)):
        require(not before.error and before.reason, f"stream {number} is not whole even without a fault: {before}")
        require(one == before, f"stream {number} differs:\n  {one}\n  {before}")


async def quietly(client: Any) -> None:
    """Ignores what becomes of a client that breaks off."""
    try:
        await client
    except (aiohttp.ClientError, OSError, TimeoutError, Failed):
        pass
