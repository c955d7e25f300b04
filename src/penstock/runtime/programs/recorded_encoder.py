"""An encoder's layers, recorded once and run for some of a step's texts at a time.

A step's hidden states are larger than a processor's L2 cache, and products read and write them several times in each
layer. So its texts go through all layers a few at a time: the weights are read more often, which takes less.
"""

from collections.abc import Iterator, Sequence
from ctypes import c_int64

import torch
from torch import Tensor

from penstock.kernels.native.attention import AttentionWork
from penstock.kernels.native.session import Session
from penstock.models.encoder import BLOCK, Encoder, LayerInput, Places, Texts, window_of

TOGETHER = 256  # tokens of a thread whose hidden states, and what products make of them, stay in the L2 cache


class RecordedEncoder:
    """Computes what Encoder.forward computes."""

    def __init__(self, model: Encoder, session: Session, width: int, dtype: torch.dtype, longest: int) -> None:
        """`width` is that of hidden states, `longest` the tokens of the longest text."""
        self._model = model
        self._together = TOGETHER * session.team.threads
        most = max(longest, self._together)
        self._rows = c_int64()
        self._x = torch.zeros(most, width, dtype=dtype)
        # A text that is longer than `_together` is alone.
        texts, blocks = self._together, -(-longest // BLOCK)
        self._attention = {
            reach: AttentionWork(texts, most, blocks, window_of(reach), causal=False) for reach in model.reaches
        }
        keys, values = model.pages(max(blocks, -(-self._together // BLOCK) + texts), dtype)
        with session.record() as self._program:
            x = self._program.input(self._x, self._rows)
            where = [self._program.input(torch.zeros(most, dtype=torch.int64), self._rows) for _ in range(3)]
            self._inputs = LayerInput(where[0], where[1], where[2], self._attention, keys, values)
            self._out = model.layers(x, self._inputs)

    def forward(self, texts: Texts) -> Tensor:
        """Returns the hidden states [tokens, hidden], in memory of their own."""
        places = Places.of(texts.lengths)
        x = self._model.embed(texts, places)
        for first, end in _parts(texts.lengths, self._together):
            part = x[places.starts[first] : places.starts[end]]
            part.copy_(self._run(part, places.part(first, end)))
        return x

    def _run(self, x: Tensor, places: Places) -> Tensor:
        count = self._rows.value = len(x)
        self._x[:count] = x
        inputs = self._inputs
        for tensor, values in (
            (inputs.positions, places.positions),
            (inputs.blocks, places.blocks),
            (inputs.offsets, places.offsets),
        ):
            tensor.numpy()[:count] = values
        for reach, work in self._attention.items():
            work.fill(places.batch(reach))
        self._program.run()
        return self._out[:count]


def _parts(lengths: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Divides texts into (first, end) of neighbours that have at most so many tokens together, or of one text."""
    first, tokens = 0, 0
    for i, length in enumerate(lengths):
        if tokens and tokens + length > most:
            yield first, i
            first, tokens = i, 0
        tokens += length
    yield first, len(lengths)
