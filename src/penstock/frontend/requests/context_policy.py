"""Lets a chat that is too long for the model go on without its oldest turns."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from penstock.frontend.errors import ContextOverflow
from penstock.text.prompts import Encoded

Messages = Sequence[Mapping[str, Any]]

ANSWER_PART = 8  # one token of the context in so many is left for an answer whose length is not limited
GROUP_PART = 2  # turns go in groups of a character for so many tokens of the context: an eighth of it, in English
_SYSTEM = ("system", "developer")


async def encode_newest(
    messages: Messages, encode: Callable[[Messages], Awaitable[Encoded]], context: int, wanted: int
) -> tuple[Encoded, int]:
    """Return the prompt without as many of the oldest turns as are too many for `wanted` more tokens, and the number of
    messages that are missing. If even the last turn is too long, the whole prompt. Raises what `encode` raises."""

    async def fitting(part: Messages) -> Encoded | None:
        try:
            encoded = await encode(part)
        except ContextOverflow:
            return None
        return encoded if len(encoded.ids) + wanted <= context else None

    if (whole := await fitting(messages)) is not None:
        return whole, 0
    parts = shorter(messages, max(context // GROUP_PART, 1))
    low, high, best = 0, len(parts), None
    while low < high:
        middle = (low + high) // 2
        found = await fitting(parts[middle])
        if found is None:
            low = middle + 1
        else:
            best, high = (found, len(messages) - len(parts[middle])), middle
    return best if best is not None else (await encode(messages), 0)


def shorter(messages: Messages, quantum: int) -> list[Messages]:
    """Return a conversation without its oldest turns, fewer turns missing first.

    A turn begins at a message of a user, so calls of tools go together with their results. System prompts and the last
    turn stay. Turns go in groups of `quantum` characters or more, counted from the beginning. So the same ones are
    missing from the next requests of a conversation, and what is kept is found in the prefix cache.
    """
    head = next((place for place, each in enumerate(messages) if each["role"] not in _SYSTEM), len(messages))
    users = [place for place, each in enumerate(messages) if each["role"] == "user"]
    found, size, due = list[Messages](), 0, quantum
    for begin, end in pairwise(sorted({head, *users})):
        size += sum(len(each["content"] or "") + len(str(each.get("tool_calls", ""))) for each in messages[begin:end])
        if size >= due or end == users[-1]:
            due = size - size % quantum + quantum
            found.append([*(each for each in messages[:end] if each["role"] in _SYSTEM), *messages[end:]])
    return found
