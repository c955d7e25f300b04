"""The grammars of the batch's sequences, and the masks of the tokens that each may get next.

A mask depends on the tokens before it, so the masks of a step are filled in when the step before has its tokens. On a
CPU this is before the step is launched. With two plans outstanding, it is while the device computes the step's logits.
"""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.batch_arrays import MaskRows
from penstock.messages import Grammar, SequenceResult
from penstock.runtime.device import Change
from penstock.runtime.planning import StepWork


class Matcher(Protocol):
    """Follows the output of one sequence through its grammar."""

    @property
    def error(self) -> str:
        """Why the output cannot continue; empty if it can."""

    def free(self, tokens: int) -> bool:
        """Returns True if no mask is needed: every token is allowed next, and also after `tokens` further tokens,
        whatever these are. Always True after the output's end. False if these tokens may complete a trigger or spend a
        thinking budget."""

    def take(self, token_ids: Sequence[int]) -> None:
        """Advance by the next tokens of the output."""

    def forced(self) -> Sequence[int]:
        """Returns the tokens of the only text that the grammar allows next; empty if there is a choice."""


class Grammars(Protocol):
    """Compiles grammars and fills in masks. Used from one thread."""

    def prepare(self, grammar: Grammar) -> bool:
        """Start to compile a grammar on another thread. Returns True once that has ended, also with an error."""

    def matcher(self, grammar: Grammar, output_ids: Sequence[int]) -> Matcher:
        """Returns a matcher that has taken `output_ids`. Blocks until the grammar is compiled. See `Matcher.error`."""

    def fill(self, wanted: Sequence[tuple[Any, Sequence[int]]], words: NDArray[np.int32]) -> None:
        """Write masks into the lines of `words` [lines, vocab / 32]. `wanted` has matchers and their drafts.

        A matcher gets 1 + drafts lines: for the next token, and for the one after each draft. Lines after a draft that
        is not allowed are not written.
        """

    def close(self) -> None:
        """End the threads. Nothing is called after it."""


@dataclass(slots=True)
class _MatchedSequence:
    matcher: Matcher
    awaited: int = 0  # outstanding steps that sample tokens for it


class GrammarRow(NamedTuple):
    """A unit of work that samples with a grammar."""

    seq: int
    unit: int  # its index among the plan's work
    place: int  # the index of its first row of logits
    state: _MatchedSequence
    drafts: tuple[int, ...] = ()


class GrammarRows:
    """Holds the matchers of sequences, and fills in their masks on the device."""

    def __init__(self, grammars: Grammars, masks: MaskRows, *, shared: bool) -> None:
        """With `shared`, the device is this machine's processor and reads the host's arrays."""
        self._grammars = grammars
        self._masks = masks
        self._shared = shared
        self.held: dict[int, _MatchedSequence] = {}  # by sequence number

    def prepare(self, grammar: Grammar) -> bool:
        """See Grammars."""
        return self._grammars.prepare(grammar)

    def add(self, seq: int, grammar: Grammar, output_ids: Sequence[int]) -> str:
        """Start a sequence after `output_ids`. Returns why it cannot start; empty if it can."""
        matcher = self._grammars.matcher(grammar, output_ids)
        if not matcher.error:
            self.held[seq] = _MatchedSequence(matcher)
        return matcher.error

    def remove(self, seq: int) -> None:
        self.held.pop(seq, None)

    def close(self) -> None:
        """Forget the sequences and end the threads."""
        self.held.clear()
        self._grammars.close()

    def plan(self, work: StepWork) -> tuple[list[GrammarRow], bool]:
        """Returns the rows of a step that sample with a grammar, and whether masks need tokens of an outstanding plan.

        The tokens of these rows are awaited until `take`.
        """
        rows: list[GrammarRow] = []
        late = False
        first = work.units.first_logit_rows
        for unit, each in enumerate(work.work):
            state = self.held.get(each.seq)
            if state is not None and each.sample:
                rows.append(GrammarRow(each.seq, unit, int(first[unit]), state, each.draft_ids))
                late = late or (state.awaited > 0 and not state.matcher.free(state.awaited + each.drafts))
                state.awaited += 1
        return rows, late

    def take(self, rows: Sequence[GrammarRow], results: Sequence[SequenceResult]) -> None:
        """Advance the matchers by the tokens of a step."""
        for row in rows:
            row.state.awaited -= 1
            row.state.matcher.take(results[row.unit].token_ids)

    def forced(self, rows: Sequence[GrammarRow]) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Returns (sequence, tokens) for each row whose grammar leaves no choice of the next tokens."""
        found = ((row.seq, tuple(row.state.matcher.forced())) for row in rows)
        return tuple(each for each in found if each[1])

    def fill(self, rows: Sequence[GrammarRow], errors: MutableMapping[int, str]) -> Change | None:
        """Fill in the masks of a step, after `take` of all steps before it. Returns the write that sends them to the
        device, or None if every token is allowed in all rows. Sequences that cannot continue are added to `errors`."""
        restricted = [row for row in rows if not row.state.matcher.free(len(row.drafts))]
        if not restricted:
            return None
        masks, count = self._masks, sum(1 + len(row.drafts) for row in restricted)
        lines = masks.lines.numpy() if self._shared else np.empty(len(masks.lines), np.int32)
        words = masks.words.numpy() if self._shared else np.empty((count, masks.words.shape[1]), np.int32)
        if count > len(restricted):
            words[:count] = -1  # `fill` skips lines after a refused draft, whose tokens are not used
        self._grammars.fill([(row.state.matcher, row.drafts) for row in restricted], words)
        lines[:] = -1
        line = 0
        for row in restricted:
            if row.state.matcher.error:
                errors.setdefault(row.seq, row.state.matcher.error)
            else:
                lines[row.place : row.place + 1 + len(row.drafts)] = range(line, line + 1 + len(row.drafts))
            line += 1 + len(row.drafts)
        return Change((), _nothing) if self._shared else Change((lines, words), self._write)

    def _write(self, sent: Sequence[Tensor]) -> None:
        lines, words = sent
        self._masks.lines.copy_(lines)
        self._masks.words[: len(words)] = words


def _nothing(sent: Sequence[Tensor]) -> None:
    pass
