"""A step that was launched: the work it does, and what comes of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.batch_arrays import ALL_BANNED, NOT_FINITE
from penstock.messages import SequenceResult, StepPlan, Work, row_size
from penstock.runtime.batch import Occupant
from penstock.runtime.device import Arrays
from penstock.runtime.programs.cuda_graphs import DecodeGraph
from penstock.runtime.prompt_slices import PromptSlice
from penstock.runtime.sampling.sampler import StepSampling
from penstock.runtime.step import RowsToChoose, Shape
from penstock.runtime.units import Units

HIDDEN_NOT_FINITE = "the model's numbers overflowed (NaN or infinity) for this request"
STATUS_ERRORS = {
    NOT_FINITE: "the model's logits are not finite: NaN, +inf, or -inf for every token",
    ALL_BANNED: "no token is left to choose: the request's logit_bias, penalties and min_tokens ban every one; relax "
    "them",
}


class StepWork(NamedTuple):
    """A plan's work as the batch and the device know it. A plan that repeats it is executed from the same object."""

    work: tuple[Work, ...]
    occupants: list[Occupant]  # of each unit
    units: Units
    logit_rows: NDArray[np.int64]  # the row of the batch of each row of logits
    ahead: NDArray[np.int64]  # how many drafts lie before each
    shape: Shape
    graph: DecodeGraph | None
    attention: Sequence[Any]  # what attention planned on the host for each KV group; empty: it reads the device
    repeatable: int  # how many more steps may do the same work, each sequence a token further


@dataclass
class InFlightStep:
    """A plan that is outstanding."""

    plan: StepPlan
    work: StepWork
    sampling: StepSampling | None  # on the rank that samples
    rows: RowsToChoose | None  # the same, on the device
    slices: list[PromptSlice]
    began: float
    inputs: float  # seconds until it was launched
    marks: list[Any]  # moments of the device's time: at the start, with logits, with tokens

    def note_failures(self, found: Arrays) -> None:
        """Record errors. A sequence that has failed keeps its first error."""
        occupants, units = self.work.occupants, self.work.units
        if "finite" in found and not found["finite"].all():
            unit = np.arange(len(occupants)).repeat(units.length)
            for i in unit[~found["finite"]].tolist():
                occupants[i].error = occupants[i].error or HIDDEN_NOT_FINITE
        if "status" in found and found["status"].any():
            unit = np.arange(len(occupants)).repeat(units.logits)
            for i in np.flatnonzero(found["status"]).tolist():
                occupant = occupants[unit[i]]
                occupant.error = occupant.error or STATUS_ERRORS[int(found["status"][i])]

    def results(self, found: Arrays) -> tuple[SequenceResult, ...]:
        """One result for each unit of work, from what its job gave."""
        work = self.work
        tokens = found["tokens"].tolist() if "tokens" in found else []
        logprobs = self._logprobs(found)
        failed = any(occupant.error for occupant in work.occupants)
        if work.shape.in_place and len(tokens) == len(work.work) and not logprobs and not failed:
            return tuple([SequenceResult(unit.seq, (token,)) for unit, token in zip(work.work, tokens, strict=True)])
        gained = self.gained(found)
        prompts: dict[int, bytes] = {}
        for i, part in enumerate(self.slices):
            prompts[part.row] = prompts.get(part.row, b"") + found[f"prompt {i}"].tobytes()
        results, first = [], 0
        for i, (unit, occupant) in enumerate(zip(work.work, work.occupants, strict=True)):
            last = first + int(gained[i])
            if occupant.error:
                results.append(SequenceResult(unit.seq, error=occupant.error))
            else:
                packed = b"".join(logprobs[first:last])
                prompt = prompts.get(occupant.row, b"")
                results.append(SequenceResult(unit.seq, tuple(tokens[first:last]), packed, prompt))
            first += int(work.units.logits[i])
        return tuple(results)

    def gained(self, found: Arrays) -> NDArray[np.int64]:
        """How many tokens each unit of work gained."""
        logits = self.work.units.logits
        if "accepted" not in found:
            return logits
        first = np.cumsum(logits) - logits
        return np.where(logits > 0, found["accepted"][np.minimum(first, len(found["accepted"]) - 1)], 0)

    def _logprobs(self, found: Arrays) -> list[bytes]:
        """Packed logprobs of each row of logits; empty where no row asks for any."""
        if self.sampling is None or "packed" not in found:
            return []
        return [
            words[: row_size(k) // 4].tobytes() if k >= 0 else b""
            for words, k in zip(found["packed"], self.sampling.logprobs.tolist(), strict=True)
        ]
