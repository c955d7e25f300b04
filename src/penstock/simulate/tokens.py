"""Simulated sequences, and tokens that follow from the sequence alone.

A token is a function of (prefix, seed, choice, index). So the output of a request is known beforehand, whatever else
was in its steps.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from penstock.messages import SamplingParams, TokenLogprobs, pack_row

VOCABULARY = 50  # sampled tokens are below this: few, so that outputs repeat and drafts are accepted


def mix(*parts: object) -> int:
    """A hash of 64 bits, the same in every process."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def prefix_hashes(tokens: Iterable[int], last: int = 0) -> list[int]:
    """For each token, the hash of it and all before it. `last`: the hash of what comes before the first."""
    hashes = []
    for token in tokens:
        last = mix(last, token)
        hashes.append(last)
    return hashes


def sample(prefix: int, sampling: SamplingParams, choice: int, index: int) -> int:
    """Output token `index` of a choice after a prefix with this hash. Stop tokens are masked before `min_tokens`."""
    token = mix(prefix, sampling.seed, choice, index) % VOCABULARY
    while index < sampling.min_tokens and token in sampling.stops():
        token = (token + 1) % VOCABULARY
    return token


def logprob_row(token: int, alternatives: int = 0) -> bytes:
    """A packed row whose log-probability depends on the token alone."""
    logprob = -(token % 64) / 8
    return pack_row(TokenLogprobs(token, logprob, 1, ((token, logprob),) * alternatives))


@dataclass
class SimulatedSequence:
    """A sequence as an executor knows it."""

    seq: int
    tokens: list[int]
    num_prompt: int
    position: int  # the first token whose keys and values are not stored
    tables: list[list[int]]  # block ids, for each KV group
    sampling: SamplingParams
    choice: int
    failed: bool = False
    _hashes: list[int] = field(default_factory=list)

    def hashes(self) -> list[int]:
        """The hash of each prefix: the last one is of all tokens."""
        known = self._hashes
        if len(known) < len(self.tokens):
            known += prefix_hashes(self.tokens[len(known) :], known[-1] if known else 0)
        return known


def hashed_token(sequence: SimulatedSequence) -> int:
    """The next token of a sequence."""
    index = len(sequence.tokens) - sequence.num_prompt
    return sample(sequence.hashes()[-1], sequence.sampling, sequence.choice, index)
