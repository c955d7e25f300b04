"""Decode steps captured once and replayed: a launch or two instead of hundreds.

A graph is of a number of sequences, so a step is padded to the next one there is. It comes in two halves: between them
the logits of rows that ask for it are edited, which no graph could know beforehand.
"""

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from penstock.runtime.device import Device
from penstock.runtime.device_sampler import DeviceSampler
from penstock.runtime.inputs import Segments
from penstock.runtime.resident_step import ResidentStep, Shape


class DecodeGraph(NamedTuple):
    """A step in which every sequence samples after one token."""

    size: int  # sequences, padding included
    forward: Callable[[], None]  # from the step's description to logits
    choose: Callable[[], None]  # from logits to tokens, and the rows moved on


class DecodeGraphs:
    """All share what they read and give: one replays at a time."""

    def __init__(
        self,
        device: Device,
        step: ResidentStep,
        sampler: DeviceSampler,
        sizes: Sequence[int],
        vocab_size: int,
        *,
        progress: bool,
    ) -> None:
        """Captures one for each of the ascending sizes. With `progress`, a bar is shown where stderr is a terminal."""
        self._step = step
        self._sampler = sampler
        most = sizes[-1]
        self.logits = torch.zeros(most, vocab_size, dtype=torch.float32, device=device.where)
        self.tokens = torch.zeros(most, dtype=torch.int64, device=device.where)
        self.chosen = torch.zeros(2, most, dtype=torch.int32, device=device.where)  # tokens and their status
        self._sizes = list(sizes)
        self._graphs: dict[int, DecodeGraph] = {}
        with _progress_bar(len(sizes), progress) as advance:
            for size in reversed(sizes):  # the largest first: the others then find room in what it has freed
                self._graphs[size] = self._capture(device, size)
                advance()

    def of(self, count: int) -> DecodeGraph | None:
        """The least that has room for so many sequences."""
        place = bisect_left(self._sizes, count)
        return self._graphs[self._sizes[place]] if place < len(self._sizes) else None

    def _capture(self, device: Device, size: int) -> DecodeGraph:
        """Of padding alone, which leaves the batch as it is."""
        shape, change = self._step.describe(Segments.none(), padding=size)
        change.write(device.upload(change.arrays))
        forward = device.capture(lambda: self._forward(shape))
        return DecodeGraph(size, forward, device.capture(lambda: self._choose(shape)))

    def _forward(self, shape: Shape) -> None:
        step = self._step
        self.logits[: shape.sequences].copy_(step.logits(step.forward(shape)))

    def _choose(self, shape: Shape) -> None:
        count = shape.sequences
        tokens, chosen = self._sampler.choose(self.logits[:count], self._step.rows(count), filtered=True)
        self._step.advance(shape, tokens)
        self.tokens[:count].copy_(tokens)
        self.chosen[:, :count].copy_(chosen)


@contextmanager
def _progress_bar(total: int, wanted: bool) -> Iterator[Callable[[], None]]:
    """A function to call when a graph is done."""
    if not wanted or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("capturing CUDA graphs", total=total)
        yield lambda: bar.advance(task)
