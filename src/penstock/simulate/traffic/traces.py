"""Readers of recorded traffic. Each gives when a request came, its prompt, and the length of its output."""

import calendar
import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.schedule.log import Added, Applied, Finished, read_events
from penstock.simulate.traffic.request import Runs, TokenIds, TokenRun, runs_of

MOONCAKE_BLOCK = 512  # prompt tokens for which a trace of Mooncake has one hash id
BYTES_A_TOKEN = 4  # of a text that no tokenizer has read: English has about four bytes a token
MAX_ROWS = 1_000_000

_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d(?:\.\d+)?)")


class TraceRow(NamedTuple):
    """One request of a trace. `at` is in seconds, from any origin."""

    at: float
    prompt: Runs
    output: int


def read_trace(path: Path, ids: TokenIds) -> list[TraceRow]:
    """Returns the requests of a file, in order of time, the first at second 0. The format is found by the first line.

    Raises ValueError for a file that cannot be read, of another format, or with a wrong line, which it names.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = [line for _, line in zip(range(MAX_ROWS + 1), file, strict=False)]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the trace {path} cannot be read: {error}; name a file with --trace") from None
    if not lines or len(lines) > MAX_ROWS:
        count = f"more than {MAX_ROWS} lines" if lines else "no line"
        raise ValueError(f"the trace {path} has {count}: give 1 to {MAX_ROWS}")
    reader = _reader(lines[0])
    if reader is None:
        raise ValueError(
            f"the trace {path} begins with {lines[0][:60]!r}, which no reader knows: give a trace of Mooncake (JSON "
            "lines with hash_ids), Azure or BurstGPT (CSV), the JSON or JSON lines of vllm bench, or what penstock "
            "serve --event-log or --log-format json has written"
        )
    try:
        rows = sorted(reader(lines, ids), key=lambda row: row.at)
    except (ValueError, LookupError, TypeError, msgspec.MsgspecError) as error:
        what = f"there is no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"the trace {path} is wrong: {what}") from None
    begin = rows[0].at if rows else 0.0
    return [row._replace(at=row.at - begin) for row in rows if row.output > 0 and row.prompt]


def _reader(first: str) -> Callable[[list[str], TokenIds], Iterable[TraceRow]] | None:
    if '"type":"start"' in first and '"capacity"' in first:
        return _event_log
    if '"hash_ids"' in first:
        return _mooncake
    if first.startswith('{"ts"'):
        return _request_log
    if first.startswith(("{", "[")):
        return _vllm_bench
    heading = first.strip().lower()
    if "contexttokens" in heading:
        return _azure
    return _burst_gpt if "request tokens" in heading else None


def _mooncake(lines: list[str], ids: TokenIds) -> Iterator[TraceRow]:
    """JSON lines: timestamp in ms, input_length, output_length, hash_ids. Equal ids mean an equal prefix."""
    known: dict[int, int] = {}
    for _, row in _json_lines(lines):
        length, tokens = int(row["input_length"]), []
        for start, hashed in zip(range(0, length, MOONCAKE_BLOCK), row["hash_ids"], strict=False):
            token = known.get(hashed)
            if token is None:
                token = known[hashed] = ids.take()
            tokens.append(TokenRun(token, min(MOONCAKE_BLOCK, length - start)))
        if missing := length - sum(run.length for run in tokens):
            tokens.append(TokenRun(ids.take(), missing))
        yield TraceRow(float(row["timestamp"]) / 1e3, tuple(tokens), int(row["output_length"]))


def _azure(lines: list[str], ids: TokenIds) -> Iterator[TraceRow]:
    """CSV: TIMESTAMP, ContextTokens, GeneratedTokens."""
    for number, row in _table(lines):
        at, prompt = _seconds(number, row["timestamp"]), ids.run(int(row["contexttokens"]))
        yield TraceRow(at, prompt, int(row["generatedtokens"]))


def _burst_gpt(lines: list[str], ids: TokenIds) -> Iterator[TraceRow]:
    """CSV: Timestamp in seconds, Model, Request tokens, Response tokens, Total tokens, Log Type. A response of 0 tokens
    has failed, and is left out."""
    for _, row in _table(lines):
        yield TraceRow(float(row["timestamp"]), ids.run(int(row["request tokens"])), int(row["response tokens"]))


def _vllm_bench(lines: list[str], ids: TokenIds) -> Iterator[TraceRow]:
    """The result of `vllm bench serve --save-detailed` (input_lens, output_lens, start_times), a dataset of ShareGPT,
    or its custom dataset: JSON lines with `prompt` and `output_tokens`. Texts have four bytes a token."""
    known: dict[str, int] = {}

    def text(value: str) -> Runs:
        size = max(len(value.encode()) // BYTES_A_TOKEN, 1)
        if value not in known:
            known[value] = ids.take()
        return (TokenRun(known[value], size),)

    if '"prompt"' in lines[0] and lines[0].rstrip().endswith("}"):
        for _, row in _json_lines(lines):
            yield TraceRow(float(row.get("timestamp", 0.0)), text(row["prompt"]), int(row["output_tokens"]))
        return
    whole = json.loads("".join(lines))
    if isinstance(whole, list):
        for talk in whole:
            turns = talk["conversations"]
            if len(turns) > 1:
                yield TraceRow(0.0, text(turns[0]["value"]), text(turns[1]["value"])[0].length)
        return
    inputs, outputs = whole["input_lens"], whole["output_lens"]
    starts = whole.get("start_times") or [0.0] * len(inputs)
    for at, prompt, output in zip(starts, inputs, outputs, strict=True):
        yield TraceRow(float(at), ids.run(int(prompt)), int(output))


def _event_log(lines: list[str], ids: TokenIds) -> Iterator[TraceRow]:
    """A log of `penstock serve --event-log`. Prompts have their own token ids, so equal prefixes are shared."""
    choices: dict[int, int] = {}  # sequence -> place in `asked`
    places: dict[tuple[str, int], int] = {}
    asked: list[tuple[float, Runs]] = []
    outputs: list[int] = []
    following = 1  # the number of the scheduler's next sequence
    for event in read_events(line.encode() for line in lines if line.endswith("\n")):
        match event:
            case Added(request, now):
                runs = runs_of(request.prompt_ids)
                for choice in range(request.first_choice, request.first_choice + request.n):
                    choices[following] = places[request.request_id, choice] = len(asked)
                    asked.append((request.arrival or now, runs))
                    outputs.append(0)
                    following += 1
            case Applied(result):
                for given in result.results:
                    outputs[choices[given.seq]] += len(given.token_ids)
            case Finished(request_id, choice, _, keep):
                outputs[places[request_id, choice]] = keep
    for (at, runs), output in zip(asked, outputs, strict=True):
        yield TraceRow(at, runs, output)


def _request_log(lines: list[str], ids: TokenIds) -> Iterator[TraceRow]:
    """A log of `penstock serve --log-format json`: the lines of requests that have tokens. Prompts share no prefix,
    since the log has no tokens."""
    for number, row in _json_lines(lines):
        if row.get("message") == "request" and row.get("completion_tokens"):
            at = _seconds(number, row["ts"]) - float(row["seconds"])
            yield TraceRow(at, ids.run(int(row["prompt_tokens"])), int(row["completion_tokens"]))


def _json_lines(lines: list[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield number, msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ValueError(f"line {number} is no JSON object: {error}") from None


def _table(lines: list[str]) -> Iterator[tuple[int, Mapping[str, str]]]:
    names = [name.strip().lower() for name in next(csv.reader(lines[:1]))]
    for number, values in enumerate(csv.reader(lines[1:]), 2):
        if len(values) != len(names):
            raise ValueError(f"line {number} has {len(values)} values, and the heading has {len(names)}")
        yield number, dict(zip(names, values, strict=True))


def _seconds(number: int, text: str) -> float:
    """Returns the seconds of a date such as "2023-11-16 18:15:46.68" from 1970 on, or of a number."""
    match = _DATE.match(text)
    if match is not None:
        return calendar.timegm((*map(int, match.groups()[:5]), 0)) + float(match[6])
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"line {number} has the time {text!r}: write 2023-11-16 18:15:46.68, or seconds") from None
