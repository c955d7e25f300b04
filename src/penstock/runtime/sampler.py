"""The sampler: logits to tokens, for a whole batch at once, each row as if it were alone.

The order of processing is

    raw logits -> logit_bias -> repetition, then presence and frequency penalties -> min_tokens
               -> temperature -> top_k -> top_p -> min_p -> argmax of log p + noise

as in transformers, whose filters also see what the earlier ones left: top_p takes its share of the top_k tokens' mass.
(vLLM applies min_p before top_k and top_p. It compares with the most likely token, which every filter keeps, so the
order changes only what top_p takes its share of.) Logprobs are of the raw logits. Equal logits count as ranked by
ascending id everywhere: top_k keeps exactly k tokens, and a greedy row takes the lowest id.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.kernels.native.session import Session
from penstock.messages import SamplingParams
from penstock.runtime.native_chooser import NativeChooser
from penstock.runtime.numpy_chooser import NumPyChooser
from penstock.runtime.sampling_batch import Sampled, SamplingBatch

__all__ = ["Sampled", "Sampler"]


class Sampler:
    """Chooses the next token of each row, and remembers it as an output of that row."""

    def __init__(self, vocab_size: int, max_rows: int, session: Session | None = None) -> None:
        """Works on the session's threads; without one, in NumPy. The tokens are the same."""
        self.batch = SamplingBatch(vocab_size, max_rows)
        self.native = NativeChooser(self.batch, session) if session else None
        self._choose = self.native or NumPyChooser(self.batch)

    def add(
        self, row: int, params: SamplingParams, choice: int, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> None:
        """Start row `row` after `output_ids`, as if the sampler had chosen them. What the row was before is forgotten.

        The parameters' ranges have been checked (`messages.check_sampling`). Raises ValueError for a biased or
        penalised token id that has no logit.
        """
        self.batch.add(row, params, choice, prompt_ids, output_ids)

    def remove(self, row: int) -> None:
        self.batch.remove(row)

    def sample(self, logits: torch.Tensor, rows: Sequence[int] | NDArray[np.int64]) -> Sampled:
        """The next token of each of `rows`, which are distinct. `logits`: float32 [rows, vocab], overwritten."""
        row_ids = np.asarray(rows, np.int64)
        sampled = self._choose(logits, row_ids)
        self.batch.record(row_ids, sampled)
        return sampled
