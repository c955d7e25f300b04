"""Implements `penstock bench quality`: perplexity over a text, beside that of the model without quantisation."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.bench.quality import (
    Score,
    Window,
    cut_windows,
    english,
    figures,
    read_windows,
    score,
    scored_bytes,
    windows_json,
)
from penstock.cli.bench.sizes import BenchSizes, with_sizes
from penstock.cli.options import Flags
from penstock.cli.output import show_table, write_file, write_json
from penstock.config import format_bytes
from penstock.families import model_facts
from penstock.messages import MemoryRow
from penstock.observe.reporting import reporting
from penstock.prepare.engine import own_engine
from penstock.prepare.files import check_file
from penstock.prepare.model import FoundModel, PreparedModel, find_model, prepare_found
from penstock.text import Tokenizer

WINDOWS, WINDOW_TOKENS = 32, 512

COLUMNS = (
    ("weights", "weights"),
    ("memory", "weights_memory"),
    ("KV cache", "kv_cache"),
    ("perplexity", "perplexity"),
    ("change", "change"),
    ("bits/byte", "bits_per_byte"),
    ("seconds", "seconds"),
)


@dataclass(frozen=True)
class QualityOptions:
    """Holds the flags of `penstock bench quality` that are not the engine's."""

    text: str | None
    windows: int | None
    window_tokens: int | None
    dense: bool  # also score the model without quantisation
    tokens_in: str | None
    tokens_out: str | None
    against: str | None = None  # a model to compare with, in place of the figures of one model


def quality(model: str | None, options: QualityOptions, json_file: str | None, flags: Flags) -> None:
    """Scores a text with a new engine, and before it with a dense one if weights or KV cache are quantised."""
    check_file("--json", json_file)
    check_file("--tokens-out", options.tokens_out)
    given = _given_windows(options)
    longest = options.window_tokens or (max(map(len, given)) if given else WINDOW_TOKENS)
    sizes = BenchSizes(f"--tokens-in {options.tokens_in}" if given else f"--window-tokens {longest}", longest, 4)
    found = find_model(model, flags)
    prepared = [prepare_found(with_sizes(found, sizes))]
    tokenizer = Tokenizer.load(found.path)
    if options.against is not None:
        _compare(found, prepared[0], options, given, sizes, json_file)
        return
    with reporting("cutting the text into windows"):
        windows = given or _text_windows(tokenizer, options)
    _check_vocabulary(windows, found)
    write_file("--tokens-out", options.tokens_out, windows_json(windows))
    if options.dense and _quantises(found):
        dense = found.changed("to compare", quantization=None, quantization_group=None, kv_cache_dtype=None)
        prepared.insert(0, prepare_found(with_sizes(dense, sizes)))
    with reporting("counting the text's bytes") as say:
        rows = asyncio.run(_score_all(prepared, windows, scored_bytes(tokenizer, windows), say))
    name, text = prepared[0].resolved.engine.name, options.tokens_in or options.text or "pydoc_data.topics"
    title = f"{name}: {rows[0]['tokens']:,} tokens of {text}, in windows of {longest}"
    show_table(title, COLUMNS, [_for_people(row) for row in rows])
    write_json(json_file, {"model": name, "text": text, "window_tokens": longest, "results": rows})


def _compare(
    found: FoundModel,
    prepared: PreparedModel,
    options: QualityOptions,
    given: list[Window],
    sizes: BenchSizes,
    json_file: str | None,
) -> None:
    """Compares the model with that of --against, on the given windows or text, or on four classes of text."""
    from penstock.cli.bench.against import check_pair, compare  # imports torch
    from penstock.cli.models.quantize import CHECKED, class_windows

    try:
        other = find_model(options.against, {})
    except ValueError as error:
        raise ValueError(f"--against: {error}") from None
    check_pair(found, other)
    tokenizer, length = Tokenizer.load(found.path), options.window_tokens or WINDOW_TOKENS
    if given:
        windows = {"given tokens": given}
    elif options.text is not None:
        windows = {options.text: _text_windows(tokenizer, options)}
    else:
        windows = class_windows(tokenizer, length, options.windows or CHECKED)
    every = [window for each in windows.values() for window in each]
    _check_vocabulary(every, found)
    write_file("--tokens-out", options.tokens_out, windows_json(every))
    compare(prepared, prepare_found(with_sizes(other, sizes)), windows, json_file)


def _given_windows(options: QualityOptions) -> list[Window]:
    """Returns the windows of --tokens-in; none without that flag. Raises ValueError for flags that contradict it."""
    if options.tokens_in is None:
        return []
    for flag, value in (("TEXT", options.text), ("--window-tokens", options.window_tokens)):
        if value is not None:
            raise ValueError(f"{flag} {value} has no effect with --tokens-in {options.tokens_in}: leave one out")
    windows = read_windows(options.tokens_in)
    return windows[: options.windows]


def _text_windows(tokenizer: Tokenizer, options: QualityOptions) -> list[Window]:
    text = english() if options.text is None else _read_text(options.text)
    length = options.window_tokens or WINDOW_TOKENS
    windows = cut_windows(tokenizer, text, length, options.windows or WINDOWS)
    if len(windows) < (options.windows or 1):
        has = len(tokenizer.encode(text, add_special_tokens=False))
        asked = f"--windows {options.windows} of {length} tokens need" if options.windows else "a window needs"
        raise ValueError(
            f"{options.text or 'the default text'} has {has} tokens, but {asked} {(options.windows or 1) * length}: "
            "give a longer text, or lower --window-tokens"
        )
    return windows


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"TEXT {path} cannot be read: {str(error.strerror).lower()}; name a text file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"TEXT {path} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _check_vocabulary(windows: Sequence[Window], found: FoundModel) -> None:
    highest, size = max(map(max, windows)), model_facts(found.spec).vocab_size
    if highest >= size:
        raise ValueError(f"the windows have token id {highest}, but the model's ids are 0 to {size - 1}: use its own")


def _quantises(found: FoundModel) -> bool:
    settings = found.given.settings
    return settings.quantization not in (None, "none") or settings.kv_cache_dtype not in (None, "auto")


class _Scored:
    """Counts the windows that have been scored, and says how many."""

    def __init__(self, weights: str, windows: int, say: Callable[[str], None]) -> None:
        self._text = f"of {windows} windows scored, weights in {weights}"
        self._say = say
        self._count = 0
        self(0)

    def __call__(self, more: int) -> None:
        self._count += more
        self._say(f"{self._count} {self._text}")


async def _score_all(
    prepared: Sequence[PreparedModel], windows: Sequence[Window], text_bytes: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Returns each engine's figures. If there are two, the first is the dense one."""
    rows: list[dict[str, Any]] = []
    dense: Score | None = None
    for each in prepared:
        engine = each.resolved.engine
        say(f"starting the engine for {engine.name}")
        async with own_engine(engine) as client:
            weights = next((row for row in client.info.memory if row.name == "weights"), MemoryRow("weights", 0))
            stored = weights.note.rpartition(" parameters, ")[2]
            result = await score(client, windows, _Scored(stored.partition(",")[0], len(windows), say))
        rows.append(
            {
                "weights": stored,
                "quantization": engine.quantization,
                "kv_cache": engine.kv_dtype,
                **figures(result, dense, text_bytes),
                "weights_bytes": weights.bytes,
            }
        )
        dense = result
    return rows


def _for_people(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row's figures as the table shows them: fewer digits, and the change as "+0.41% ±0.05"."""
    change = None
    if row["change_percent"] is not None:
        margin = "" if row["change_margin"] is None else f" ±{row['change_margin']:.2f}"
        change = f"{row['change_percent']:+.2f}%{margin}"
    return {
        **row,
        "perplexity": f"{row['perplexity']:,.3f}",
        "change": change,
        "seconds": f"{row['seconds']:.1f}",
        "weights_memory": format_bytes(row["weights_bytes"]),
    }
