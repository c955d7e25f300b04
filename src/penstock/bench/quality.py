"""Measures the perplexity of a model from the prompt log-probabilities that its engine returns.

The scripts in benchmarks/peers measure other engines by the same rules:

- The whole text is tokenised once, without special tokens, and cut into windows of equal length. A remainder that is
  shorter than a window is left out.
- If the tokenizer puts BOS before every prompt, every window starts with BOS. It counts as a token of the window.
- Each window is a separate prompt that starts at position 0. The first token is not scored. Every other token is
  scored given the tokens before it in its window.
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
from penstock.quantize.texts import help_texts
from penstock.text import Tokenizer

Window = list[int]

SENT_AT_ONCE = 4  # windows in the engine at a time; more would only use more memory
LARGEST_NATS = 700.0  # math.exp of a larger number would overflow


class Score(msgspec.Struct, frozen=True):
    """The score of a list of windows: for each window the sum of its negative log-probabilities."""

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
        """By how many per cent this perplexity is above that of `dense`, on the same windows.

        `dense` is the score to compare with, mostly that of the model without quantisation.
        """
        return 100 * math.expm1(min(self.nats - dense.nats, LARGEST_NATS))

    def margin_over(self, dense: "Score") -> float | None:
        """Half the width of the 95% confidence interval of `percent_over`, or None for a single window.

        It is estimated from the spread of the change between windows.
        """
        changes = [ours - theirs for ours, theirs in zip(self.window_means, dense.window_means, strict=True)]
        if len(changes) < 2:
            return None
        return (100 + self.percent_over(dense)) * 1.96 * statistics.stdev(changes) / math.sqrt(len(changes))


def english() -> str:
    """Returns the help texts that come with Python: half a million characters of English, with some code.

    They differ between versions of Python. Raises ValueError if Python was installed without them.
    """
    return "\n\n".join(help_texts())


def cut_windows(tokenizer: Tokenizer, text: str, window_tokens: int, most: int) -> list[Window]:
    """Returns the first `most` windows of a text. A short text gives fewer, or none.

    `window_tokens` is the length of a window, with BOS.
    """
    bos = tokenizer.bos_token_id
    begin = [bos] if bos is not None and tokenizer.encode("a")[0] == bos else []
    own = window_tokens - len(begin)
    ids = tokenizer.encode(text, add_special_tokens=False)
    starts = range(0, min(len(ids) - own + 1, most * own), own)
    return [[*begin, *ids[start : start + own]] for start in starts]


def read_windows(path: str) -> list[Window]:
    """Returns the windows in a file that `windows_json` wrote. Raises ValueError with the file and the problem."""
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
    """Returns windows as a JSON list of lists of token ids, the format that the scripts in benchmarks/peers read."""
    return json.dumps(windows) + "\n"


def scored_bytes(tokenizer: Tokenizer, windows: Sequence[Window]) -> int:
    """Returns the number of bytes of text in the scored tokens."""
    return sum(len(tokenizer.token_bytes(token_id)) for window in windows for token_id in window[1:])


async def score(client: EngineClient, windows: Sequence[Window], advance: Callable[[int], None]) -> Score:
    """Returns the score of windows. Calls `advance(1)` after each window.

    Raises ValueError with the engine's message if the engine refuses a window.
    """
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
    """Returns a score's figures for a table or for JSON.

    `dense` is the score to compare with. `text_bytes` is the result of `scored_bytes`.
    """
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
