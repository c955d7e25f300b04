"""Lets a chat that is too long for the model go on without its oldest turns, or with a summary of them."""

import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import orjson

from penstock.frontend.errors import APIError, ContextOverflow
from penstock.frontend.offload import offload_if_large
from penstock.frontend.siblings import Siblings
from penstock.text.prompts import Encoded

Messages = Sequence[Mapping[str, Any]]

ANSWER_PART = 8  # one token of the context in so many is left for an answer whose length is not limited
GROUP_PART = 2  # turns go in groups of a character for so many tokens of the context: an eighth of it, in English
SUMMARISED_PART = 2  # turns that get a summary go in groups of one token of the context in so many
SUMMARY_PART = 16  # one token of the context in so many is the most for a summary
LEAST_SUMMARY, MOST_SUMMARY = 32, 1024  # limits of that, in tokens
MOST_SUMMARIES = 1024  # that are kept
RETRY_SECONDS = 60.0  # after a summary that failed
EARLIER_CUTS = 4  # before a cut, at which an earlier summary is looked for
INSTRUCTION = (
    "Write a short summary of our conversation so far, for somebody who goes on with it and has not read it. Keep "
    "names, numbers, facts, decisions, and what is still open. Write only the summary."
)
_SYSTEM = ("system", "developer")


class LeftOut(msgspec.Struct, frozen=True):
    """Says how many of the oldest messages of a chat are missing, or have a summary in their place."""

    dropped: int = 0  # messages that are missing from the prompt
    summarised: int = 0  # messages in whose place the prompt has a summary
    failure: str = ""  # the code of the error because of which there is no summary
    prompt_tokens: int = 0  # of the summary that was written for this request; the usage of its answer has none of it
    completion_tokens: int = 0

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the answer."""
        written = f"{self.prompt_tokens}, {self.completion_tokens}" if self.prompt_tokens else ""
        named = {
            "x-dropped-messages": str(self.dropped or ""),
            "x-summarised-messages": str(self.summarised or ""),
            "x-summary-tokens": written,
            "x-summary-failed": self.failure,
        }
        return {name: value for name, value in named.items() if value}

    @property
    def usage(self) -> dict[str, Any]:
        """The fields of the usage in OpenAI's chat completions."""
        fields: dict[str, Any] = {"dropped_messages": self.dropped} if self.dropped else {}
        if self.summarised or self.failure:
            fields["summary"] = {
                "messages": self.summarised,
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.completion_tokens,
                "failed": self.failure or None,
            }
        return fields


class Summary(NamedTuple):
    """A summary, or why there is none."""

    text: str = ""
    dropped: int = 0  # older messages that it does not cover: they were too many for the model that wrote it
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failure: str = ""  # the code of an error


class Summaries:
    """The summaries of oldest turns, by these turns: the next requests of a conversation use the same ones. One that
    failed is not tried again for RETRY_SECONDS. Several API processes have those of all, by their supervisor."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._found: dict[bytes, tuple[Summary, float]] = {}  # with its end; the least recently used one first
        self._clock = clock
        self.siblings: Siblings | None = None  # None: this is the only API process, or the supervisor

    async def find(self, key: bytes) -> Summary | None:
        """Returns the summary of a key. Raises EngineError if the supervisor has ended."""
        summary, until = self._found.pop(key, (None, 0.0))
        if summary is not None and self._clock() < until:
            self._found[key] = summary, until
            return summary
        if self.siblings is None:
            return None
        if (summary := _decode(await self.siblings.ask(f"summary {key.hex()}"))) is not None:
            self._keep(key, summary)
        return summary

    def add(self, key: bytes, summary: Summary) -> None:
        """Keeps a summary, whose tokens count for the request that it was written for."""
        self._keep(key, summary._replace(prompt_tokens=0, completion_tokens=0))
        if self.siblings is not None:
            self.siblings.notify(f"summary {key.hex()} {msgspec.json.encode(summary).decode()}")

    async def answer(self, argument: str) -> str:
        """Returns the reply to a message of an API process."""
        key, _, text = argument.partition(" ")
        if (summary := _decode(text)) is not None:
            self.add(bytes.fromhex(key), summary)
            return ""
        found = await self.find(bytes.fromhex(key))
        return "" if found is None else msgspec.json.encode(found).decode()

    def _keep(self, key: bytes, summary: Summary) -> None:
        until = self._clock() + RETRY_SECONDS if summary.failure else math.inf
        self._found[key] = summary, until
        if len(self._found) > MOST_SUMMARIES:
            del self._found[next(iter(self._found))]


def _decode(text: str) -> Summary | None:
    return msgspec.json.decode(text, type=Summary) if text else None


class ContextRoom(NamedTuple):
    """How much of a chat fits."""

    encode: Callable[[Messages], Awaitable[Encoded]]  # raises ContextOverflow
    context: int  # tokens
    wanted: int  # tokens, for the answer

    async def fitting(self, part: Messages, more: int = 0) -> Encoded | None:
        """Returns the prompt; None if it and `more` tokens are too many."""
        try:
            encoded = await self.encode(part)
        except ContextOverflow:
            return None
        return encoded if len(encoded.ids) + self.wanted + more <= self.context else None

    async def newest(self, parts: Sequence[Messages], more: int = 0) -> tuple[Encoded, Messages] | None:
        """Returns the first of `parts` that fits with `more` tokens. They become shorter."""
        low, high, best = 0, len(parts), None
        while low < high:
            middle = (low + high) // 2
            found = await self.fitting(parts[middle], more)
            if found is None:
                low = middle + 1
            else:
                best, high = (found, parts[middle]), middle
        return best


def check_summariser(policy: str, names: Collection[str]) -> None:
    """Raises ValueError if the policy names a model that is not among `names`, all that the server has."""
    name = policy.partition(":")[2]
    if name and name not in names:
        raise ValueError(f"--context-policy is {policy}, but there is no model {name!r}; name one that is served")


async def encode_newest(
    messages: Messages, encode: Callable[[Messages], Awaitable[Encoded]], context: int, wanted: int
) -> tuple[Encoded, int]:
    """Return the prompt without as many of the oldest turns as are too many for `wanted` more tokens, and the number of
    messages that are missing. If even the last turn is too long, the whole prompt. Raises what `encode` raises."""
    room = ContextRoom(encode, context, wanted)
    if (whole := await room.fitting(messages)) is not None:
        return whole, 0
    return await _encode_shorter(messages, room, shorter(messages, max(context // GROUP_PART, 1)))


async def _encode_shorter(messages: Messages, room: ContextRoom, parts: Sequence[Messages]) -> tuple[Encoded, int]:
    """As `encode_newest`, for messages that are too many, and their `shorter` parts."""
    best = await room.newest(parts)
    return (await room.encode(messages), 0) if best is None else (best[0], len(messages) - len(best[1]))


async def encode_summarised(
    messages: Messages,
    room: ContextRoom,
    write: Callable[[Messages, int], Awaitable[Summary]],
    summaries: Summaries,
    owner: str,
) -> tuple[Encoded, LeftOut]:
    """As `encode_newest`, with a summary in the place of the turns that are missing, if there is room for one.

    `write` summarises messages in at most so many tokens. The `owner` is a text of all that a summary depends on
    besides its turns: no other owner finds it.
    """
    if (whole := await room.fitting(messages)) is not None:
        return whole, LeftOut()
    most = min(max(room.context // SUMMARY_PART, LEAST_SUMMARY), MOST_SUMMARY)
    small = shorter(messages, max(room.context // GROUP_PART, 1))
    parts = await _large_cuts(messages, small, room)
    best = await room.newest(parts, most)
    if best is None:
        best = await room.newest(parts := small, most)
    failure = "no_room"
    if best is not None:
        kept = best[1]
        begin = _begin(messages, kept)
        key = await _key(owner, messages[:begin])
        if (summary := await summaries.find(key)) is None:
            cuts = [cut for part in parts if (cut := _begin(messages, part)) < begin]
            old, dropped = await _old_turns(messages[:begin], cuts, summaries, owner)
            summary = await write(old, most)
            summaries.add(key, summary := summary._replace(dropped=summary.dropped + dropped))
        failure = summary.failure or failure
        if summary.text and (encoded := await room.fitting(_with_summary(kept, summary.text))) is not None:
            gone = len(messages) - len(kept)
            dropped = min(summary.dropped, gone)
            return encoded, LeftOut(dropped, gone - dropped, "", *summary[2:4])
    encoded, dropped = await _encode_shorter(messages, room, small)
    return encoded, LeftOut(dropped, failure=failure)


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
        size += _size(messages[begin:end])
        if size >= due or end == users[-1]:
            due = size - size % quantum + quantum
            found.append([*(each for each in messages[:end] if each["role"] in _SYSTEM), *messages[end:]])
    return found


async def _large_cuts(messages: Messages, small: Sequence[Messages], room: ContextRoom) -> list[Messages]:
    """Returns the parts of a conversation that lack turns in large groups, so that few summaries are written. How many
    characters a token has is measured with the first turns, which are the same in the next requests."""
    if not small:
        return []
    first = messages[: _begin(messages, small[0])]
    try:
        tokens = len((await room.encode(first)).ids)
    except APIError:  # they are too many, or no whole chat for the template
        return []
    parts = shorter(messages, max(_size(first) * room.context // (SUMMARISED_PART * tokens), 1))
    return parts[:-1]  # the last one has the last turn alone, which is another one next time


def _size(messages: Messages) -> int:
    """The characters of messages."""
    return sum(len(each["content"] or "") + len(str(each.get("tool_calls", ""))) for each in messages)


async def _old_turns(messages: Messages, cuts: Sequence[int], summaries: Summaries, owner: str) -> tuple[Messages, int]:
    """Returns messages to summarise. If there is a summary of those before one of `cuts`, it is in their place, and the
    prefix cache has most of it: it was the prompt. Also returns how many messages that summary does not cover."""
    for cut in cuts[: -EARLIER_CUTS - 1 : -1]:
        summary = await summaries.find(await _key(owner, messages[:cut]))
        if summary is not None and summary.text:
            systems = [each for each in messages[:cut] if each["role"] in _SYSTEM]
            return _with_summary([*systems, *messages[cut:]], summary.text), summary.dropped
    return messages, 0


def _begin(messages: Messages, kept: Messages) -> int:
    """The place of the first message that a part of a conversation keeps, apart from system prompts."""
    first = next(each for each in kept if each["role"] not in _SYSTEM)
    return next(place for place, each in enumerate(messages) if each is first)


def _with_summary(kept: Messages, summary: str) -> Messages:
    """The messages with a summary before the first message of a user: it has no more weight than what users say, and
    templates that take users and assistants only in turn take it."""
    place = next(place for place, each in enumerate(kept) if each["role"] == "user")
    text = f"[Earlier in this conversation: {summary}]\n\n{kept[place]['content']}"
    return [*kept[:place], {**kept[place], "content": text}, *kept[place + 1 :]]


async def _key(owner: str, messages: Messages) -> bytes:
    return await offload_if_large(lambda: sha256(orjson.dumps((owner, messages))).digest(), _size(messages))
