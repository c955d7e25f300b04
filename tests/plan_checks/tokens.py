"""Simulated sequences, and the tokens that they sample.

A token is a function of (prefix, seed, choice, index). So the output of a request does not depend on the other requests
in its steps, and a test can compute it beforehand.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from penstock.messages import SamplingParams, TokenLogprobs, pack_row

VOCABULARY = 50  # sampled tokens are below this; a small number, so that outputs repeat and drafts are accepted


def mix(*parts: object) -> int:
    """Returns a 64-bit hash, the same in every process."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def prefix_hashes(tokens: Iterable[int], last: int = 0) -> list[int]:
    """Returns for each token the hash of it and all before it. `last` is the hash of the tokens before the first."""
    hashes = []
    for token in tokens:
        last = mix(last, token)
        hashes.append(last)
    return hashes


def sample(prefix: int, sampling: SamplingParams, choice: int, index: int) -> int:
    """Returns output token `index` of a choice, after a prefix with hash `prefix`. Before `min_tokens`, it is no stop
    token."""
    token = mix(prefix, sampling.seed, choice, index) % VOCABULARY
    while index < sampling.min_tokens and token in sampling.stops():
        token = (token + 1) % VOCABULARY
    return token


def logprob_row(token: int, alternatives: int = 0) -> bytes:
    """Returns a packed row of logprobs that depends on the token alone."""
    logprob = -(token % 64) / 8
    return pack_row(TokenLogprobs(token, logprob, 1, ((token, logprob),) * alternatives))


@dataclass
class SimulatedSequence:
    """A sequence in an executor."""

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
        """Returns the hash of each prefix. The last one is of all tokens."""
        known = self._hashes
        if len(known) < len(self.tokens):
            known += prefix_hashes(self.tokens[len(known) :], known[-1] if known else 0)
        return known


def hashed_token(sequence: SimulatedSequence) -> int:
    """Returns the next token of a sequence."""
    index = len(sequence.tokens) - sequence.num_prompt
    return sample(sequence.hashes()[-1], sequence.sampling, sequence.choice, index)
