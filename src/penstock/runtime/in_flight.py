"""A step that was launched: the work it does, and what comes of it."""

from collections.abc import MutableMapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.batch_arrays import ALL_BANNED, NOT_FINITE
from penstock.messages import SequenceResult, StepPlan, row_size
from penstock.runtime.device import Device, StepOutputs
from penstock.runtime.planning import StepWork
from penstock.runtime.prompt_slices import PromptSlice
from penstock.runtime.sampling.grammar_rows import GrammarRow
from penstock.runtime.sampling.sampler import StepSampling
from penstock.runtime.step import ChooseOptions

HIDDEN_NOT_FINITE = "the model's numbers overflowed (NaN or infinity) for this request"
STATUS_ERRORS = {
    NOT_FINITE: "the model's logits are not finite: NaN, +inf, or -inf for every token",
    ALL_BANNED: "no token is left to choose: the request's logit_bias, penalties, min_tokens and grammar leave none; "
    "relax them",
}


class InFlightStep(msgspec.Struct):
    plan: StepPlan
    work: StepWork
    sampling: StepSampling | None  # on the rank that samples
    options: ChooseOptions | None  # the same, for the device
    slices: Sequence[PromptSlice]
    began: float
    inputs: float  # seconds until it was launched
    marks: list[Any] = []  # moments of the device's time: at the start, with logits, with tokens
    grammar_rows: Sequence[GrammarRow] = ()
    masked: bool = False  # whether rows have masks
    late: bool = False  # tokens are chosen by a second job, when the masks of the rows are known
    logits: Tensor | None = None  # of the first of two jobs

    def results(self, outputs: StepOutputs, errors: MutableMapping[int, str]) -> tuple[SequenceResult, ...]:
        """One result for each unit of work, from the outputs of its jobs.

        `errors` are those of sequences that had failed before; those that failed in this step join them.
        """
        work = self.work
        tokens = outputs.tokens.tolist() if outputs.tokens is not None else []
        if outputs.finite is not None or (tokens and any(outputs.status.tolist())):
            self._note_failures(outputs, errors)
        if work.decodes and tokens and outputs.packed is None and not errors:
            return tuple(map(SequenceResult, work.seqs, zip(tokens)))
        if outputs.pooled is not None:
            return self._vectors(outputs.pooled, errors)
        logprobs = self._logprobs(outputs.packed)
        gained = self.gained(outputs)
        prompts: dict[int, bytes] = {}
        for part, scored in zip(self.slices, outputs.prompts or (), strict=True):
            prompts[part.row] = prompts.get(part.row, b"") + np.asarray(scored).tobytes()
        results, first = [], 0
        for i, (unit, occupant) in enumerate(zip(work.work, work.occupants, strict=True)):
            last = first + int(gained[i])
            if unit.seq in errors:
                results.append(SequenceResult(unit.seq, error=errors[unit.seq]))
            else:
                packed = b"".join(logprobs[first:last])
                prompt = prompts.get(occupant.row, b"")
                results.append(SequenceResult(unit.seq, tuple(tokens[first:last]), packed, prompt))
            first += int(work.units.logits[i])
        return tuple(results)

    def _vectors(self, pooled: Any, errors: MutableMapping[int, str]) -> tuple[SequenceResult, ...]:
        """The results of units that are pooled: the vector of each that samples."""
        vectors = iter(np.asarray(pooled))
        results = []
        for unit in self.work.work:
            vector = next(vectors).tobytes() if unit.sample else b""
            error = errors.get(unit.seq, "")
            results.append(SequenceResult(unit.seq, error=error, pooled=b"" if error else vector))
        return tuple(results)

    def _note_failures(self, outputs: StepOutputs, errors: MutableMapping[int, str]) -> None:
        """Add the sequences that failed in this step. One that had failed keeps its first error."""
        work, units = self.work.work, self.work.units
        if outputs.finite is not None:
            unit = np.arange(len(work)).repeat(units.length)
            for i, finite in zip(unit.tolist(), outputs.finite.tolist(), strict=True):
                if not finite:
                    errors.setdefault(work[i].seq, HIDDEN_NOT_FINITE)
        if outputs.status is not None:
            unit, ahead = units.logit_rows
            used = ahead < self.gained(outputs)[unit]  # rows behind a refused draft are of a text that does not exist
            for i, state, counts in zip(unit.tolist(), outputs.status.tolist(), used.tolist(), strict=True):
                if state and counts:
                    errors.setdefault(work[i].seq, STATUS_ERRORS[state])

    def gained(self, outputs: StepOutputs) -> NDArray[np.int64]:
        units = self.work.units
        if outputs.accepted is None:
            return units.logits
        first = np.minimum(units.first_logit_rows, len(outputs.accepted) - 1)
        return np.where(units.logits > 0, np.asarray(outputs.accepted)[first], 0)

    def refused(self, outputs: StepOutputs) -> list[int]:
        """How many drafts of each unit of work were counted when the step was planned, and not accepted."""
        refused: list[int] = (self.work.units.logits - self.gained(outputs)).tolist()
        return refused

    def seconds(self, device: Device) -> tuple[float, float]:
        """The time of the forward pass, and that of choosing tokens."""
        if not self.marks:
            return 0.0, 0.0
        first, *middle, last = self.marks
        if not middle:
            return device.seconds(first, last), 0.0
        return device.seconds(first, middle[0]), device.seconds(middle[0], last)

    def _logprobs(self, packed: Any) -> list[bytes]:
        """Returns packed logprobs of each row of logits; empty where no row has any."""
        if self.sampling is None or packed is None:
            return []
        return [
            words[: row_size(k) // 4].tobytes() if k >= 0 else b""
            for words, k in zip(np.asarray(packed), self.sampling.logprobs.tolist(), strict=True)
        ]
