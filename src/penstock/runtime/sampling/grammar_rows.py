"""The grammars of the batch's sequences: which tokens each may get next.

A mask depends on the tokens before it. So the masks of a step are filled in when the step before has given its tokens:
on a CPU before the step is launched; with two plans outstanding while the device computes its logits.
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
        """Why it cannot go on; empty: it can."""
        ...

    def free(self, tokens: int) -> bool:
        """Returns True if every token is allowed next, and also after any `tokens` more tokens. True once the output
        has ended, and while no trigger or limit is near."""
        ...

    def take(self, token_ids: Sequence[int]) -> None:
        """Go on by these tokens of the output."""
        ...

    def forced(self) -> Sequence[int]:
        """The usual tokens of the text that must come next, as far as nothing else may."""
        ...


class Grammars(Protocol):
    """Compiles grammars and fills in masks. One thread calls."""

    def prepare(self, grammar: Grammar) -> bool:
        """Start to compile a grammar beside the caller. Returns True when that is done, also when it failed."""
        ...

    def matcher(self, grammar: Grammar, output_ids: Sequence[int]) -> Matcher:
        """A matcher after `output_ids`. Compiles the grammar if it is not prepared; see `Matcher.error`."""
        ...

    def fill(self, wanted: Sequence[tuple[Any, Sequence[int]]], words: NDArray[np.int32]) -> None:
        """Fill in the masks of what `matcher` gave, each with its drafts, in the lines of `words` [lines, vocab / 32].

        A matcher gets 1 + drafts lines: for the next token, and for those after each draft. Lines behind a draft that
        is not allowed are left as they are.
        """
        ...


@dataclass(slots=True)
class _MatchedSequence:
    matcher: Matcher
    awaited: int = 0  # its tokens in outstanding plans


class GrammarRow(NamedTuple):
    """A unit of a step that samples by a grammar."""

    seq: int
    unit: int  # its index among the plan's work
    place: int  # of its first row of logits
    state: _MatchedSequence
    drafts: tuple[int, ...] = ()


class GrammarRows:
    """The matchers of sequences, and the masks on the device."""

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
        """Start a sequence after `output_ids`. Returns why it cannot be started; empty: it can."""
        matcher = self._grammars.matcher(grammar, output_ids)
        if not matcher.error:
            self.held[seq] = _MatchedSequence(matcher)
        return matcher.error

    def remove(self, seq: int) -> None:
        self.held.pop(seq, None)

    def plan(self, work: StepWork) -> tuple[list[GrammarRow], bool]:
        """The rows of a step that sample by a grammar, and whether any waits for a token of an outstanding plan.

        Their tokens count as outstanding until `take`.
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
        """Go on by the tokens of a step."""
        for row in rows:
            row.state.awaited -= 1
            row.state.matcher.take(results[row.unit].token_ids)

    def forced(self, rows: Sequence[GrammarRow]) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The sequences of a step's rows whose next tokens are known, and these."""
        found = ((row.seq, tuple(row.state.matcher.forced())) for row in rows)
        return tuple(each for each in found if each[1])

    def fill(self, rows: Sequence[GrammarRow], errors: MutableMapping[int, str]) -> Change | None:
        """Fill in the masks of a step, whose earlier tokens `take` has got. None if no row is restricted.

        A sequence that cannot go on joins `errors`.
        """
        restricted = [row for row in rows if not row.state.matcher.free(len(row.drafts))]
        if not restricted:
            return None
        masks, count = self._masks, sum(1 + len(row.drafts) for row in restricted)
        lines = masks.lines.numpy() if self._shared else np.empty(len(masks.lines), np.int32)
        words = masks.words.numpy() if self._shared else np.empty((count, masks.words.shape[1]), np.int32)
        if count > len(restricted):
            words[:count] = -1  # lines that are not filled in belong to texts that do not exist
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
