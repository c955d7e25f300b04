"""What one row changes in its logits before a token is chosen: biases, penalties, and the ban of stops.

Sparse: the cost goes by the number of distinct tokens seen, not by the vocabulary.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.native.structs import SampleEdits
from penstock.messages import SamplingParams

Row = NDArray[np.float32]  # the logits of one row, [vocab]


class LogitEdits:
    """The edits of one row, in the order bias, penalties, min_tokens. They follow the row's outputs by `record`."""

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int], vocab_size: int
    ) -> None:
        """ValueError for a biased or penalised token that has no logit."""
        self._bias_ids = np.array(list(params.logit_bias), np.int64)
        self._biases = np.array(list(params.logit_bias.values()), np.float32)
        check_ids("logit_bias", self._bias_ids, vocab_size)
        self._penalties = _Penalties.of(params, prompt_ids, output_ids, vocab_size)
        self._stops = np.array(banned_ids(params, vocab_size), np.int64)
        self._banned_steps = max(0, params.min_tokens - len(output_ids)) if self._stops.size else 0
        # The same for the native kernels: it points to this object's arrays, and is kept up to date.
        self.struct = SampleEdits(
            bias_count=self._bias_ids.size,
            banned_count=self._stops.size if self._banned_steps else 0,
            bias_ids=self._bias_ids.ctypes.data,
            biases=self._biases.ctypes.data,
            banned_ids=self._stops.ctypes.data,
        )
        if self._penalties:
            self._penalties.describe(self.struct)

    @property
    def needed(self) -> bool:
        """False where the logits stay as they are, now and for good."""
        return bool(self._bias_ids.size or self._penalties or self._banned_steps)

    @np.errstate(over="ignore")  # a logit at float32's limit may become -inf: banned, which is what it was
    def apply(self, logits: Row) -> None:
        """Edit in place."""
        if self._bias_ids.size:
            logits[self._bias_ids] += self._biases
        if self._penalties:
            self._penalties.apply(logits)
        if self._banned_steps:
            logits[self._stops] = -np.inf

    def record(self, token: int) -> None:
        """The row's next output is `token`."""
        self._banned_steps = max(0, self._banned_steps - 1)
        if not self._banned_steps:
            self.struct.banned_count = 0
        if self._penalties:
            self._penalties.record(token)
            self._penalties.describe(self.struct)


class _Penalties:
    """Repetition penalty (Keskar et al., CTRL, 2019) over prompt and output; presence and
    frequency penalties, as in the OpenAI API, over output."""

    def __init__(self, params: SamplingParams, prompt_ids: NDArray[np.int64], output_ids: NDArray[np.int64]) -> None:
        self._repetition = np.float32(params.repetition_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        # Tokens of the prompt that never came out matter to the repetition penalty alone.
        seen = np.concatenate([prompt_ids, output_ids]) if self._repetition != 1 else output_ids
        self._token_ids = np.unique(seen)  # the first _size entries; capacity doubles as new tokens come out
        self._size = len(self._token_ids)
        self._slots = {token: slot for slot, token in enumerate(self._token_ids.tolist())}
        self._counts = np.zeros(self._size, np.float32)  # in the output, of each distinct token
        self._described: NDArray[np.int64] | None = None
        np.add.at(self._counts, np.searchsorted(self._token_ids, output_ids), 1)

    @staticmethod
    def of(
        params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int], vocab_size: int
    ) -> "_Penalties | None":
        if not has_penalties(params):
            return None
        prompt, output = np.array(prompt_ids, np.int64), np.array(output_ids, np.int64)
        check_ids("the prompt", prompt, vocab_size)
        check_ids("the output", output, vocab_size)
        return _Penalties(params, prompt, output)

    def apply(self, logits: Row) -> None:
        token_ids, counts = self._token_ids[: self._size], self._counts[: self._size]
        penalised = logits[token_ids]
        if self._repetition != 1:
            penalised = np.where(penalised < 0, penalised * self._repetition, penalised / self._repetition)
        penalised -= self._frequency * counts + self._presence * (counts > 0)
        logits[token_ids] = penalised

    def describe(self, struct: SampleEdits) -> None:
        """Bring its fields up to date."""
        if self._described is not self._token_ids:  # which moves, and the counts with it, when capacity doubles
            self._described = self._token_ids
            struct.seen_ids, struct.seen_counts = self._token_ids.ctypes.data, self._counts.ctypes.data
            struct.repetition, struct.presence, struct.frequency = self._repetition, self._presence, self._frequency
        struct.seen_count = self._size

    def record(self, token: int) -> None:
        slot = self._slots.setdefault(token, self._size)
        if slot == self._size:
            if slot == len(self._token_ids):
                self._token_ids = np.concatenate([self._token_ids, np.zeros(max(64, slot), np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(max(64, slot), np.float32)])
            self._token_ids[slot] = token
            self._size += 1
        self._counts[slot] += 1


def has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def banned_ids(params: SamplingParams, vocab_size: int) -> tuple[int, ...]:
    """Tokens that are not to come while there are fewer outputs than min_tokens."""
    # A stop id beyond the logits can never be chosen, so it needs no ban.
    return tuple(token for token in params.stops() if token < vocab_size)


def check_ids(what: str, token_ids: NDArray[np.int64], vocab_size: int) -> None:
    """ValueError, in which `what` names them, where any has no logit."""
    if token_ids.size and not 0 <= token_ids.min() <= token_ids.max() < vocab_size:
        raise ValueError(
            f"{what} names token ids from {token_ids.min()} to {token_ids.max()}; the logits are of ids 0 to "
            f"{vocab_size - 1}: send ids of this model's vocabulary"
        )
