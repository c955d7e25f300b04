"""Compares what two versions of a language model answer: how much worse is the candidate, in [-1, 1]."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

PHRASE = 4  # words: a phrase of so many that comes again is a repetition


class TextOutcome(NamedTuple):
    """The answer of a version to a request."""

    failed: bool
    seconds: float
    text: str = ""
    tokens: int = 0
    calls: bool = False  # it calls tools


class TextPair(NamedTuple):
    """The answers of both versions to a request, and how likely each version finds the incumbent's."""

    request: Mapping[str, Any]
    incumbent: TextOutcome
    candidate: TextOutcome
    likelihoods: tuple["Likelihood", "Likelihood"] | None = None  # of the incumbent and the candidate; None: not scored


class Likelihood(NamedTuple):
    """How likely a version finds a text."""

    nats: float  # minus the log-probability of a token, the mean
    misses: float  # the part of the tokens that are not the version's most likely ones


Judge = Callable[[TextPair], float | None]  # None: the pair says nothing


def errors(pair: TextPair) -> float:
    """1 if only the candidate failed."""
    return float(pair.candidate.failed) - float(pair.incumbent.failed)


def latency(pair: TextPair) -> float | None:
    """The difference of the times of a token, of the longer one."""
    if not (pair.incumbent.tokens and pair.candidate.tokens):
        return None
    ours, theirs = (each.seconds / each.tokens for each in (pair.candidate, pair.incumbent))
    return (ours - theirs) / max(ours, theirs, 1e-9)


def length(pair: TextPair) -> float | None:
    """The difference of the numbers of tokens, of the larger one."""
    if pair.candidate.failed or pair.incumbent.failed:
        return None
    counts = pair.candidate.tokens, pair.incumbent.tokens
    return abs(counts[0] - counts[1]) / max(*counts, 1)


def repetition(pair: TextPair) -> float | None:
    """The difference of the parts of the text that are repetitions."""
    if pair.candidate.failed or pair.incumbent.failed:
        return None
    return _repeated(pair.candidate.text) - _repeated(pair.incumbent.text)


def validity(pair: TextPair) -> float | None:
    """1 if only the candidate's answer is no JSON, or calls no tool, though the request demands it."""
    wanted = pair.request.get("response_format") or {}
    if wanted.get("type", "text") != "text":
        valid = [_is_json(each.text) for each in (pair.incumbent, pair.candidate)]
    elif pair.request.get("tools"):
        valid = [each.calls for each in (pair.incumbent, pair.candidate)]
    else:
        return None
    return float(valid[0]) - float(valid[1])


def likelihood(pair: TextPair) -> float | None:
    """By how many nats a token of the incumbent's answer is less likely for the candidate; at most 1."""
    if pair.likelihoods is None:
        return None
    ours, theirs = pair.likelihoods
    return max(-1.0, min(1.0, theirs.nats - ours.nats))


def agreement(pair: TextPair) -> float | None:
    """How many more tokens of the incumbent's answer are not the most likely ones for the candidate, of all."""
    return None if pair.likelihoods is None else pair.likelihoods[1].misses - pair.likelihoods[0].misses


TEXT_JUDGES: Mapping[str, Judge] = {
    each.__name__: each for each in (errors, latency, length, repetition, validity, likelihood, agreement)
}
# The default tolerances. They are wide, because a version with other weights answers in other words.
TEXT_TOLERANCES: Mapping[str, float] = {
    "errors": 0.01,
    "latency": 0.2,
    "length": 0.5,
    "repetition": 0.1,
    "validity": 0.05,
    "likelihood": 0.3,
    "agreement": 0.2,
}


def likelihood_of(rows: Sequence[Mapping[str, Any] | None], text: str, tokens: int) -> Likelihood | None:
    """Returns how likely a text is, which ends a prompt. `rows` are vLLM's `prompt_logprobs`, `tokens` the number of
    tokens of the text in the version that wrote it. None if the rows do not cover it."""
    left, nats, misses, count = len(text), 0.0, 0, 0
    for row in reversed(rows):
        if left <= 0 or row is None:
            break
        each = next(iter(row.values()))
        left -= max(len(each["decoded_token"]), 1)
        nats, misses, count = nats - each["logprob"], misses + (each["rank"] != 1), count + 1
    if left > 0 or not count or not tokens:
        return None
    return Likelihood(nats / tokens, misses / count)


def _repeated(text: str) -> float:
    words = text.split()
    counts = Counter(tuple(words[i : i + PHRASE]) for i in range(len(words) - PHRASE + 1))
    return sum(count - 1 for count in counts.values()) / max(sum(counts.values()), 1)


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True
