"""Decode steps that are captured once and replayed: a launch or two instead of hundreds.

A graph is captured for a number of sequences, and a step is padded to the next larger graph. It comes in two halves:
if a row has edits or logprobs, which no graph could contain beforehand, the second half is launched eagerly.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.observe.progress import progress_bar
from penstock.runtime.device import Device, StepOutputs
from penstock.runtime.step import ChooseOptions, EagerStep, Shape
from penstock.runtime.units import Units


class DecodeGraph(NamedTuple):
    """A step in which every sequence samples after one token."""

    size: int  # sequences, padding included
    forward: Callable[[], None]  # from the step's description to hidden states or logits
    choose: Callable[[], None]  # from logits to tokens, and the rows moved on
    choose_masked: Callable[[], None]  # the same, where rows have masks
    hidden: Tensor  # [size, hidden] where there is a next stage; else [0, hidden]
    logits: Tensor  # fp32 [size, vocab] on the rank that samples; else [0, vocab]


class DecodeGraphs:
    """All graphs share what they read and write: one replays at a time."""

    def __init__(
        self, device: Device, step: EagerStep, sizes: Sequence[int], vocab_size: int, *, samples: bool, progress: bool
    ) -> None:
        """Captures a graph for each of the ascending sizes. With `progress`, shows a bar where stderr is a terminal."""
        self._step = step
        self._samples = samples
        sampled = sizes[-1] if samples else 0
        self._hidden = step.hidden_states(0 if step.last else sizes[-1])
        self._logits = torch.zeros(sampled, vocab_size, dtype=torch.float32, device=device.where)
        self._tokens = torch.zeros(sampled, dtype=torch.int64, device=device.where)
        self._status = torch.zeros(sampled, dtype=torch.int32, device=device.where)
        self._sizes = list(sizes)
        self._graphs: dict[int, DecodeGraph] = {}
        with progress_bar("capturing CUDA graphs", len(sizes), wanted=progress) as advance:
            for size in reversed(sizes):  # the largest first: the others then find room in the memory it freed
                self._graphs[size] = self._capture(device, size)
                advance(1)

    def smallest_for(self, count: int) -> DecodeGraph | None:
        """The smallest graph that has room for so many sequences."""
        place = bisect_left(self._sizes, count)
        return self._graphs[self._sizes[place]] if place < len(self._sizes) else None

    def forward(self, graph: DecodeGraph) -> Tensor:
        """Replay a step up to its logits, which the next replay overwrites."""
        graph.forward()
        self._step.send(graph.hidden)
        return graph.logits

    def choose(
        self, graph: DecodeGraph, count: int, shape: Shape, options: ChooseOptions | None, masked: bool
    ) -> StepOutputs:
        """Replay the rest of a step of so many sequences. The outputs are new tensors; there are none on ranks that do
        not sample."""
        if options is not None and not options.plain:
            # With padding, so that every rank broadcasts as many tokens as a replay would.
            return self._step.choose(graph.logits, shape, options, masked).mapped(lambda tensor: tensor[:count])
        if masked:
            graph.choose_masked()
        else:
            graph.choose()
        if not self._samples:
            return StepOutputs()
        return StepOutputs(self._tokens[:count].clone(), self._status[:count].clone())

    def _capture(self, device: Device, size: int) -> DecodeGraph:
        """Captures a step of padding alone, which leaves the batch as it is."""
        shape, change = self._step.describe(Units.none(), padding=size)
        change.write(device.upload(change.arrays))
        forward = device.capture(lambda: self._forward(shape))
        choose = device.capture(lambda: self._choose(shape, masked=False))
        masked = device.capture(lambda: self._choose(shape, masked=True))
        return DecodeGraph(size, forward, choose, masked, self._hidden[:size], self._logits[:size])

    def _forward(self, shape: Shape) -> None:
        step, count = self._step, shape.sequences
        hidden = step.forward(shape)
        if not step.last:
            self._hidden[:count].copy_(hidden.states)
            return
        logits = step.logits(hidden)
        if logits is not None and self._samples:
            self._logits[:count].copy_(logits)

    def _choose(self, shape: Shape, *, masked: bool) -> None:
        if not self._samples:
            self._step.advance(shape)
            return
        count = shape.sequences
        chosen = self._step.choose(self._logits[:count], shape, ChooseOptions(True, -1), masked)
        self._tokens[:count].copy_(chosen.tokens)
        self._status[:count].copy_(chosen.status)
