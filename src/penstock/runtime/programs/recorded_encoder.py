"""Runs an encoder's layers as one recorded program, on a part of the step's texts at a time.

The hidden states of all texts are larger than the L2 cache, and each layer reads and writes them several times. So each
part goes through all layers before the next one. The weights are then read once per part, which takes less time than
moving the hidden states through memory.
"""

from collections.abc import Iterator, Sequence
from ctypes import c_int64

import torch
from torch import Tensor

from penstock.kernels.native.attention import AttentionWork
from penstock.kernels.native.session import Session
from penstock.models.encoder import BLOCK, Encoder, LayerInput, TextLayout, Texts, window_of

TOKENS_PER_THREAD = 256  # in a part: their hidden states and the results of products stay in the L2 cache


class RecordedEncoder:
    """Computes what Encoder.forward computes."""

    def __init__(self, model: Encoder, session: Session, width: int, dtype: torch.dtype, longest: int) -> None:
        """`width` and `dtype` are those of hidden states. `longest` is the number of tokens of the longest text."""
        self._model = model
        self._part_tokens = TOKENS_PER_THREAD * session.team.threads
        most = max(longest, self._part_tokens)
        self._rows = c_int64()
        self._x = torch.zeros(most, width, dtype=dtype)
        # A text that is longer than `_part_tokens` is a part by itself.
        texts, blocks = self._part_tokens, -(-longest // BLOCK)
        self._attention = {
            reach: AttentionWork(texts, most, blocks, window_of(reach), causal=False) for reach in model.reaches
        }
        keys, values = model.pages(max(blocks, -(-self._part_tokens // BLOCK) + texts), dtype)
        with session.record() as self._program:
            x = self._program.input(self._x, self._rows)
            where = [self._program.input(torch.zeros(most, dtype=torch.int64), self._rows) for _ in range(3)]
            self._inputs = LayerInput(where[0], where[1], where[2], self._attention, keys, values)
            self._out = model.layers(x, self._inputs)

    def forward(self, texts: Texts) -> Tensor:
        """Returns the hidden states [tokens, hidden] in new memory."""
        layout = TextLayout.of(texts.lengths)
        x = self._model.embed(texts, layout)
        for first, end in _parts(texts.lengths, self._part_tokens):
            part = x[layout.starts[first] : layout.starts[end]]
            part.copy_(self._run(part, layout.part(first, end)))
        return x

    def _run(self, x: Tensor, layout: TextLayout) -> Tensor:
        """Runs the program on one part. Returns hidden states that the next run overwrites."""
        count = self._rows.value = len(x)
        self._x[:count] = x
        inputs = self._inputs
        for tensor, values in (
            (inputs.positions, layout.positions),
            (inputs.blocks, layout.blocks),
            (inputs.offsets, layout.offsets),
        ):
            tensor.numpy()[:count] = values
        for reach, work in self._attention.items():
            work.fill(layout.batch(reach))
        self._program.run()
        return self._out[:count]


def _parts(lengths: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Divides texts into parts of neighbours, each with at most `most` tokens or with one text. Yields the indices
    (first, end) of each part."""
    first, tokens = 0, 0
    for i, length in enumerate(lengths):
        if tokens and tokens + length > most:
            yield first, i
            first, tokens = i, 0
        tokens += length
    yield first, len(lengths)
