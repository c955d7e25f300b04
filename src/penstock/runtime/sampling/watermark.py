"""Watermarks: the choice of tokens depends on a secret key, and with the key a text shows that it has the mark.

Both schemes derive a hash of every token from the key and the tokens before it, with the functions of noise.py:

    stream:      at(key, t) for each of the tokens t before the last one
    hash(token): as in noise.py, with the key at(stream, last token before it)

- green-list (Kirchenbauer et al. 2023, "A watermark for large language models"): after one token, those whose hash is
  small are green, a quarter of the vocabulary. Their logits are raised.
- gumbel (Aaronson 2022): after four tokens, the hash is the noise of sampling. Noise that repeated would make texts
  repeat themselves, so where the same four tokens came before in the output, the noise is the ordinary one.

Only tokens of the output count, so that a text can be tested without its prompt. Its first tokens are not marked.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.sampling import noise

Scheme = Literal["green-list", "gumbel"]

CONTEXT = {"green-list": 1, "gumbel": 4}  # tokens before a token that its hash depends on
GREEN_SHARE = 0.25
GREEN_BELOW = int(GREEN_SHARE * 2**32)  # hashes below this one are green
GREEN_BIAS = 1.5  # what is added to the logit of a green token


class Watermark(NamedTuple):
    """A scheme and its key, of 64 bits."""

    scheme: Scheme
    key: int

    @classmethod
    def of(cls, scheme: Scheme, secret: str) -> "Watermark":
        """A secret text gives different keys to the schemes."""
        digest = hashlib.sha256(f"penstock watermark\0{scheme}\0{secret}".encode()).digest()
        return cls(scheme, int.from_bytes(digest[:8], "little"))

    @property
    def context(self) -> int:
        return CONTEXT[self.scheme]

    def keys(self, contexts: NDArray[np.int64]) -> noise.Keys:
        """The keys of the hashes after contexts [n, context]: uint64 [n]."""
        keys = np.full(len(contexts), self.key, np.uint64)
        for column in contexts.T:
            keys = noise.keys(keys, column)
        return keys

    def key_after(self, outputs: NDArray[np.int32]) -> noise.Keys | None:
        """The key [1] after the tokens of an output; None where the next token is not marked."""
        size = self.context
        if len(outputs) < size:
            return None
        context = outputs[-size:]
        if self.scheme == "gumbel" and len(outputs) > size:
            earlier = np.lib.stride_tricks.sliding_window_view(outputs[:-1], size)
            if (earlier == context).all(axis=1).any():
                return None
        return self.keys(context[None].astype(np.int64))

    def raise_green(self, line: NDArray[np.float32], outputs: NDArray[np.int32]) -> None:
        """Add to the logits [vocab] of the green tokens after an output, in place."""
        key = self.key_after(outputs)
        if key is not None:
            line[noise.hash_tokens(np.arange(len(line)), key)[0] < GREEN_BELOW] += np.float32(GREEN_BIAS)


class Evidence(NamedTuple):
    """How strong the mark in a text is."""

    tokens: int  # that were scored; each context, or with green-list each pair of tokens, once
    score: float  # green-list: how many are green; gumbel: the sum of -log u, each 1 on average
    z: float  # standard deviations by which the score exceeds that of a text without a mark
    p: float  # the probability of such a score, or a higher one, without a mark


def detect(watermark: Watermark, token_ids: Sequence[int]) -> Evidence:
    """Returns the evidence in the tokens of a text.

    A hash is the same wherever the same tokens come again, so repetitions are no further evidence: they are left out.
    """
    size = watermark.context
    if len(token_ids) <= size:
        return Evidence(0, 0.0, 0.0, 1.0)
    ids = np.array(token_ids, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(ids, size + 1)
    same = windows if watermark.scheme == "green-list" else windows[:, :-1]
    _, first = np.unique(same, axis=0, return_index=True)
    windows = windows[np.sort(first)]
    hashes = noise.hash_tokens(windows[:, -1:], watermark.keys(windows[:, :-1]))[:, 0]
    count = len(windows)
    if watermark.scheme == "green-list":
        green = int((hashes < GREEN_BELOW).sum())
        z = (green - GREEN_SHARE * count) / math.sqrt(count * GREEN_SHARE * (1 - GREEN_SHARE))
        return Evidence(count, green, z, _binomial_tail(green, count, GREEN_SHARE))
    score = float(-np.log((hashes + 0.5) * 2.0**-32).sum())
    return Evidence(count, score, (score - count) / math.sqrt(count), _gamma_tail(count, score))


def _binomial_tail(least: int, count: int, share: float) -> float:
    """The probability of `least` successes or more in `count` trials."""
    if least <= 0:
        return 1.0
    steps = np.arange(1, count + 1, dtype=np.float64)
    log_choose = np.concatenate([[0.0], np.cumsum(np.log(count - steps + 1) - np.log(steps))])
    wins = np.arange(count + 1)
    return _sum_exp((log_choose + wins * math.log(share) + (count - wins) * math.log1p(-share))[least:])


def _gamma_tail(count: int, score: float) -> float:
    """The probability that the sum of `count` standard exponentials is `score` or more: a Poisson's of fewer events."""
    steps = np.arange(1, count, dtype=np.float64)
    return _sum_exp(np.concatenate([[0.0], np.cumsum(math.log(score) - np.log(steps))]) - score)


def _sum_exp(logs: NDArray[np.float64]) -> float:
    top = float(logs.max())
    return min(1.0, math.exp(top) * float(np.exp(logs - top).sum()))
