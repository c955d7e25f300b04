"""Measures the perplexity of a model by its engine's own log-probabilities of prompts.

The scripts in benchmarks/peers score by the same rules:

- The text becomes token ids at once, without special tokens, and is cut into windows of equal length. A rest that is
  shorter than a window is left out.
- If the tokenizer begins every prompt with BOS, every window begins with it, and it counts as a token of the window.
- Each window is a prompt of its own, from position 0. Every token but the first is scored, from the tokens before it in
  its window.
- The perplexity is exp of the mean of -log p over the scored tokens of all windows. The unit of -log p is the nat.
"""

import asyncio
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.engine.processors import keep_off
from penstock.messages import EngineClient, GenerateRequest, SamplingParams, unpack_rows
from penstock.text import Tokenizer

Window = list[int]

SENT_AT_ONCE = 4  # windows that the engine holds; more would only take memory
LARGEST_NATS = 700.0  # exp of more overflows


class Score(msgspec.Struct, frozen=True):
    """The log-probabilities of windows, summed."""

    window_nats: tuple[float, ...]  # sum of -log p over a window's scored tokens
    scored: tuple[int, ...]  # tokens of each window that were scored
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(self.scored)

    @property
    def nats(self) -> float:
        """The mean of -log p over all scored tokens."""
        return math.fsum(self.window_nats) / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats) if self.nats < LARGEST_NATS else math.inf

    @property
    def window_means(self) -> list[float]:
        return [nats / count for nats, count in zip(self.window_nats, self.scored, strict=True)]

    def percent_over(self, dense: "Score") -> float:
        """By how many per cent this perplexity is above that of `dense`, over the same windows."""
        return 100 * math.expm1(min(self.nats - dense.nats, LARGEST_NATS))

    def margin_over(self, dense: "Score") -> float | None:
        """Half the 95% interval of `percent_over`, from how much windows differ; None for a single window."""
        changes = [ours - theirs for ours, theirs in zip(self.window_means, dense.window_means, strict=True)]
        if len(changes) < 2:
            return None
        return (100 + self.percent_over(dense)) * 1.96 * statistics.stdev(changes) / math.sqrt(len(changes))


def english() -> str:
    """The help texts that come with Python: half a million characters of English, with some code.

    They differ between versions of Python. Raises ValueError where Python was installed without them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError("this Python has no pydoc_data.topics, the default text: name a TEXT file") from None
    return "\n\n".join(topics[name] for name in sorted(topics))


def cut_windows(tokenizer: Tokenizer, text: str, window_tokens: int, most: int) -> list[Window]:
    """Returns the first windows of a text, at most `most`; fewer, or none, if the text is short."""
    bos = tokenizer.bos_token_id
    begin = [bos] if bos is not None and tokenizer.encode("a")[0] == bos else []
    own = window_tokens - len(begin)
    ids = tokenizer.encode(text, add_special_tokens=False)
    starts = range(0, min(len(ids) - own + 1, most * own), own)
    return [[*begin, *ids[start : start + own]] for start in starts]


def read_windows(path: str) -> list[Window]:
    """Reads windows that `windows_json` made. Raises ValueError that names the file and what is wrong."""
    try:
        windows = msgspec.json.decode(Path(path).read_bytes(), type=list[list[int]])
    except OSError as error:
        raise ValueError(
            f"--tokens-in {path!r} cannot be read: {str(error.strerror).lower()}; name a file of --tokens-out"
        ) from None
    except msgspec.DecodeError as error:
        raise ValueError(f"--tokens-in {path} is not a JSON list of lists of token ids: {error}") from None
    if not windows:
        raise ValueError(f"--tokens-in {path} has no windows; write one with --tokens-out")
    for i, window in enumerate(windows):
        if len(window) < 2:
            raise ValueError(f"--tokens-in {path}: window {i} has {len(window)} tokens; a window needs 2 or more")
        if min(window) < 0:
            raise ValueError(f"--tokens-in {path}: window {i} has token id {min(window)}; ids begin at 0")
    return windows


def windows_json(windows: Sequence[Window]) -> str:
    """Returns windows as JSON, a list of lists of token ids, as the scripts in benchmarks/peers read them."""
    return json.dumps(windows) + "\n"


def scored_bytes(tokenizer: Tokenizer, windows: Sequence[Window]) -> int:
    """Bytes of text that the scored tokens stand for."""
    return sum(len(tokenizer.token_bytes(token_id)) for window in windows for token_id in window[1:])


async def score(client: EngineClient, windows: Sequence[Window], advance: Callable[[int], None]) -> Score:
    """Scores windows, and calls `advance(1)` after each. Raises ValueError with the engine's message if it refuses
    one."""
    slots = asyncio.Semaphore(SENT_AT_ONCE)

    async def one(index: int) -> float:
        async with slots:
            nats = await _window_nats(client, windows[index], f"window-{index}")
            advance(1)
            return nats

    start = time.perf_counter()
    with keep_off(client.info.cpu):
        nats = await asyncio.gather(*(one(index) for index in range(len(windows))))
    return Score(tuple(nats), tuple(len(window) - 1 for window in windows), time.perf_counter() - start)


async def _window_nats(client: EngineClient, window: Window, name: str) -> float:
    sampling = SamplingParams(seed=0, max_tokens=0, temperature=0.0, prompt_logprobs=0)
    rows = bytearray()
    async for delta in client.generate(GenerateRequest(request_id=name, prompt_ids=tuple(window), sampling=sampling)):
        if delta.error:
            raise ValueError(f"{name}: {delta.error}")
        rows += delta.prompt_logprobs
    return -math.fsum(row.logprob for row in unpack_rows(bytes(rows), 0))


def figures(result: Score, dense: Score | None, text_bytes: int) -> dict[str, Any]:
    """Returns a score's figures for a table or for JSON. `dense` is the score to compare with."""
    return {
        "perplexity": round(result.perplexity, 4),
        "change_percent": None if dense is None else round(result.percent_over(dense), 3),
        "change_margin": None if dense is None else _rounded(result.margin_over(dense)),
        "nats": round(result.nats, 6),
        "bits_per_byte": round(result.nats * result.tokens / math.log(2) / text_bytes, 4) if text_bytes else None,
        "tokens": result.tokens,
        "seconds": round(result.seconds, 2),
        "tokens_s": round(result.tokens / result.seconds, 1),
        "windows": [round(mean, 6) for mean in result.window_means],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
