"""Steps in a row that differ in little but the tokens they give.

Mostly every running sequence decodes, in the same order as in the step before. After a step on a CPU the processor's
caches are full of weights: whatever Python touches comes from memory, and to look after 32 sequences, a token each,
takes longer than all the rest of the host's work. So they are left alone, but for the one in sixteen that needs a block
for its next token, and are told of several tokens at once.
"""

from collections.abc import Sequence as Line

from penstock.messages import NextTokens, TokenDelta, Work
from penstock.schedule.sequence import Sequence

LEAST = 2  # steps: with fewer, to begin and to end it costs more than it saves


class Stretch:
    """Up to `left` more steps of `work`, while nothing else happens to the scheduler. One of them at a time is planned,
    and its tokens are taken before the next."""

    __slots__ = ("_block_size", "_choices", "_due", "_given", "_now", "_stops", "_told", "left", "sequences", "work")

    def __init__(self, running: Line[Sequence], left: int, block_size: int, incarnation: int) -> None:
        self.left = left
        self.sequences = tuple(running)
        self.work: tuple[Work, ...] = tuple([sequence.decode for sequence in running])
        self._block_size = block_size
        self._stops = frozenset().union(*(sequence.stops for sequence in running))
        self._choices = tuple([_choice(sequence, incarnation) for sequence in running])
        self._given: list[tuple[int, ...]] = []  # by step, a token for each sequence,
        self._told = [0] * len(running)  # of which each knows so many
        self._now = 0.0  # of the last of these
        self._due: dict[int, list[int]] = {}  # by step, the sequences whose room is at an end
        for index, sequence in enumerate(running):
            self._due.setdefault(sequence.slots + 1 - len(sequence.tokens), []).append(index)

    def lacking(self) -> list[Sequence]:
        """Those that need a block for the step about to be planned. They have been told of all tokens, and are taken to
        get it."""
        step = len(self._given)
        indices = self._due.pop(step, None)
        if indices is None:
            return []
        self._due.setdefault(step + self._block_size, []).extend(indices)
        for index in indices:
            self._tell(index)
        return [self.sequences[index] for index in indices]

    def take(self, token_ids: tuple[int, ...], now: float) -> NextTokens | None:
        """The tokens of the step that is planned; None where one of them may end its sequence, and nothing is taken."""
        if len(token_ids) != len(self.work) or not self._stops.isdisjoint(token_ids):
            return None
        tokens = NextTokens(self._choices, len(self._given), token_ids)
        self._given.append(token_ids)
        self._now = now
        return tokens

    def tell(self) -> None:
        """All of them, of all that was taken."""
        for index in range(len(self.sequences)):
            self._tell(index)

    def end(self, outstanding: bool) -> None:
        """Tell them also of the step that is planned and whose tokens are yet to be taken, where one is outstanding."""
        self.tell()
        if outstanding:
            for sequence in self.sequences:
                sequence.planned += 1
                sequence.expected += 1
                sequence.in_flight += 1

    def _tell(self, index: int) -> None:
        """A sequence, of the tokens it was given since the last time."""
        sequence, told = self.sequences[index], self._told[index]
        count = self._told[index] = len(self._given)
        if count > told:
            sequence.tokens += [tokens[index] for tokens in self._given[told:]]
            sequence.computed += count - told
            sequence.planned += count - told
            sequence.expected += count - told
            sequence.last_token = self._now


def stretch_of(running: Line[Sequence], block_size: int, incarnation: int) -> Stretch | None:
    """The steps that follow if nothing happens: until a sequence has all its tokens. None where they would not all be
    the same, or too few to be worth it. No plan is outstanding."""
    left = 0
    for index, sequence in enumerate(running):
        own = sequence.limit - 1 - len(sequence.tokens)
        left = min(left, own) if index else own
        if left < LEAST or not sequence.quiet or sequence.request.message.sampling.logprobs is not None:
            return None
    return Stretch(running, left, block_size, incarnation) if running else None


def _choice(sequence: Sequence, incarnation: int) -> TokenDelta:
    state = sequence.request
    return TokenDelta(
        state.message.request_id,
        sequence.choice,
        sequence.num_output,
        cached_tokens=state.cached_tokens,
        incarnation=incarnation,
    )
