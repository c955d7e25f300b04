"""Decode steps captured once and replayed: a launch or two instead of hundreds.

A graph is of a number of sequences, so a step is padded to the next one there is. It comes in two halves: between them
the logits of rows that ask for it are edited, which no graph could know beforehand.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.observe.progress import progress_bar
from penstock.runtime.device import Device
from penstock.runtime.device_sampler import DeviceSampler
from penstock.runtime.inputs import Segments
from penstock.runtime.resident_step import ResidentStep, Shape


class DecodeGraph(NamedTuple):
    """A step in which every sequence samples after one token."""

    size: int  # sequences, padding included
    forward: Callable[[], None]  # from the step's description to hidden states or logits
    choose: Callable[[], None]  # from logits to tokens, and the rows moved on
    hidden: Tensor  # [size, hidden] where there is a next stage; else [0, hidden]
    logits: Tensor  # fp32 [size, vocab] on the rank that samples, as are the next two; else [0, vocab]
    tokens: Tensor  # int64 [size]
    chosen: Tensor  # int32 [2, size]: tokens and their status


class DecodeGraphs:
    """All share what they read and give: one replays at a time."""

    def __init__(
        self,
        device: Device,
        step: ResidentStep,
        sampler: DeviceSampler | None,
        sizes: Sequence[int],
        vocab_size: int,
        *,
        progress: bool,
    ) -> None:
        """Captures one for each of the ascending sizes. `sampler` is None on ranks that do not sample. With `progress`,
        a bar is shown where stderr is a terminal."""
        self._step = step
        self._sampler = sampler
        drawn = 0 if sampler is None else sizes[-1]
        self._hidden = step.hidden_states(0 if step.last else sizes[-1])
        self._logits = torch.zeros(drawn, vocab_size, dtype=torch.float32, device=device.where)
        self._tokens = torch.zeros(drawn, dtype=torch.int64, device=device.where)
        self._chosen = torch.zeros(2, drawn, dtype=torch.int32, device=device.where)
        self._sizes = list(sizes)
        self._graphs: dict[int, DecodeGraph] = {}
        with progress_bar("capturing CUDA graphs", len(sizes), wanted=progress) as advance:
            for size in reversed(sizes):  # the largest first: the others then find room in what it has freed
                self._graphs[size] = self._capture(device, size)
                advance(1)

    def of(self, count: int) -> DecodeGraph | None:
        """The least that has room for so many sequences."""
        place = bisect_left(self._sizes, count)
        return self._graphs[self._sizes[place]] if place < len(self._sizes) else None

    def _capture(self, device: Device, size: int) -> DecodeGraph:
        """Of padding alone, which leaves the batch as it is."""
        shape, change = self._step.describe(Segments.none(), padding=size)
        change.write(device.upload(change.arrays))
        into = self._hidden[:size], self._logits[:size], self._tokens[:size], self._chosen[:, :size]
        forward = device.capture(lambda: self._forward(shape))
        return DecodeGraph(size, forward, device.capture(lambda: self._choose(shape)), *into)

    def _forward(self, shape: Shape) -> None:
        step, count = self._step, shape.sequences
        hidden = step.forward(shape)
        if not step.last:
            self._hidden[:count].copy_(hidden.states)
            return
        logits = step.logits(hidden)
        if logits is not None:
            self._logits[:count].copy_(logits)

    def _choose(self, shape: Shape) -> None:
        count = shape.sequences
        if self._sampler is None:
            self._step.advance(shape, count)
            return
        tokens, chosen = self._sampler.choose(self._logits[:count], self._step.rows(count), filtered=True)
        self._step.advance(shape, count, tokens)
        self._tokens[:count].copy_(tokens)
        self._chosen[:, :count].copy_(chosen)
