"""A plan that was launched on a device: its work, how its tokens are chosen, and what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.messages import SequenceResult, StepPlan, Work, row_size
from penstock.runtime.device import Arrays
from penstock.runtime.device_sampler import Draw
from penstock.runtime.graphs import DecodeGraph
from penstock.runtime.inputs import Segments
from penstock.runtime.resident import Change, Occupant
from penstock.runtime.resident_step import Shape
from penstock.runtime.results import NOT_FINITE, PromptSlice, sequence_results
from penstock.runtime.sampling_batch import ALL_BANNED
from penstock.runtime.sampling_batch import NOT_FINITE as LOGITS_NOT_FINITE


class Planned(NamedTuple):
    """A plan's work, as the batch sees it and as the device was told."""

    work: tuple[Work, ...]
    occupants: list[Occupant]  # of each
    units: Segments
    sampled: NDArray[np.int64]  # rows
    samplers: list[Occupant]  # of these
    decodes: bool  # every one samples after one token: should the next plan be of the same work, so will it
    shape: Shape
    graph: DecodeGraph | None
    attention: Sequence[Any]  # what it planned on the host, of each KV group; nothing: it looks on the device


@dataclass
class Drawing:
    """How a step's tokens are chosen."""

    draw: Draw
    which: Tensor | None = None  # on the device: the places of rows that are edited

    def changes(self) -> list[Change]:
        """What the device is to be told of it."""
        return [Change((self.draw.edited,), self._take)] if len(self.draw.edited) else []

    def _take(self, sent: Sequence[Tensor]) -> None:
        (self.which,) = sent


@dataclass
class Launched:
    """A plan that is outstanding. `note_failures` and `results` take what its job gave, on the rank that samples."""

    plan: StepPlan
    planned: Planned
    drawing: Drawing | None  # on the rank that samples
    slices: list[PromptSlice]
    began: float
    inputs: float  # seconds until it was launched
    marks: list[Any]  # moments of the device's time: at first, with logits, with tokens

    def note_failures(self, found: Arrays) -> None:
        """Sequences that have failed keep the first error they got."""
        planned = self.planned
        if "finite" in found and not found["finite"].all():
            unit = np.arange(len(planned.occupants)).repeat(planned.units.length)
            for i in unit[~found["finite"]].tolist():
                planned.occupants[i].error = planned.occupants[i].error or NOT_FINITE
        if self.drawing is None or "chosen" not in found or not found["chosen"][1].any():
            return
        sound = dict(zip(self.drawing.draw.edited.tolist(), found.get("sound", ()), strict=True))
        for i in np.flatnonzero(found["chosen"][1]).tolist():
            message = ALL_BANNED if sound.get(i) else LOGITS_NOT_FINITE
            planned.samplers[i].error = planned.samplers[i].error or message

    def results(self, found: Arrays) -> tuple[SequenceResult, ...]:
        """One for each unit of work."""
        planned = self.planned
        prompts: dict[int, bytes] = {}
        for i, part in enumerate(self.slices):
            prompts[part.row] = prompts.get(part.row, b"") + found[f"prompt {i}"].tobytes()
        return sequence_results(
            planned.work,
            planned.units.rows.tolist(),
            planned.sampled.tolist(),
            found["chosen"][0].tolist() if "chosen" in found else [],
            self._logprobs(found),
            prompts,
            {occupant.row: occupant.error for occupant in planned.occupants if occupant.error},
            decodes=planned.decodes,
        )

    def _logprobs(self, found: Arrays) -> list[bytes]:
        """Packed, of each row sampled."""
        if self.drawing is None or "logprobs" not in found:
            return [b""] * len(self.planned.sampled)
        wanted = self.drawing.draw.logprobs.tolist()
        return [
            words[: row_size(k) // 4].tobytes() if k >= 0 else b""
            for words, k in zip(found["logprobs"], wanted, strict=True)
        ]
