"""The drafts of one sequence, and how many of its earlier ones were accepted."""

from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol

from penstock.schedule.drafts.index import TokenIndex
from penstock.schedule.drafts.texts import DraftCursor, OwnCursor, RecentOutputs

OWN, PREDICTION, RECENT, FORCED = range(4)
COPIED = 8  # tokens matched, from which a sequence is taken to copy
GAP = 512  # tokens without drafts after which the places of the last drafts are given up
MARGIN = 512  # tokens that an index is made for beside those that are known
LEVELS = 8  # of the number of matched tokens: 0 or 1 (after a change), 2, 3 to 4, 5 to 8, ... 65 or more
PRIOR = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.95)  # for each level, the probability at first that a draft is right
PRIOR_WEIGHT = 8.0  # drafts
OWN_WEIGHT = 4.0  # drafts, as many right as expected, beside a sequence's own
OWN_COUNTED = 4  # drafts of a step that count for the sequence: a long copy must not hide that it has ended
MEMORY = 0.8  # the weight of a sequence's earlier drafts when new ones are counted
MOST_SURE = 0.98  # a copy may differ at any token, and a step with 31 drafts takes as long as a few plain steps
MOST_COUNTED = 512.0  # drafts of a level, after which earlier ones count half


class DraftSource(Protocol):
    """A source of drafts."""

    def drafts(self, count: int) -> Items[int]:
        """At most so many tokens."""


class ForcedTokens:
    """The next tokens of an output whose grammar leaves no other text. The model may still write it in other tokens."""

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._token_ids = token_ids

    def drafts(self, count: int) -> tuple[int, ...]:
        return self._token_ids[:count]


class Candidate(NamedTuple):
    """A sequence's next drafts."""

    source: DraftSource
    kind: int  # of text and number of matched tokens: an index of `Acceptance`
    probability: float  # that a draft is right if those before it are


class Acceptance:
    """How often drafts were right, by the text they are from and the number of tokens that matched before them."""

    def __init__(self) -> None:
        self._tried = [PRIOR_WEIGHT] * (4 * LEVELS)
        self._right = [PRIOR_WEIGHT * p for p in PRIOR] * 4

    def probability(self, kind: int) -> float:
        return self._right[kind] / self._tried[kind]

    def note(self, kind: int, right: int, tried: int) -> None:
        self._right[kind] += right
        self._tried[kind] += tried
        if self._tried[kind] > MOST_COUNTED:
            self._right[kind] /= 2
            self._tried[kind] /= 2


class Drafter:
    """Follows one sequence through the texts."""

    __slots__ = (
        "_cursors",
        "_expected",
        "_index",
        "_prediction",
        "_recent",
        "_right",
        "_seen",
        "_tokens",
        "accepted_prediction",
        "copies",
        "rejected_prediction",
    )

    def __init__(
        self, tokens: Items[int], num_prompt: int, prediction: tuple[int, ...], recent: RecentOutputs | None
    ) -> None:
        """`tokens` is the sequence's own list, which grows. `prediction`: what its output is expected to be."""
        self._tokens = tokens
        self._seen = num_prompt  # tokens that the cursors have followed
        self._index = TokenIndex(len(tokens) + MARGIN)
        self._prediction = DraftCursor(prediction, TokenIndex(len(prediction)), 0) if prediction else None
        self._recent = recent
        # If two match equally many tokens, the first one is used.
        self._cursors: list[tuple[int, DraftCursor]] = []
        if self._prediction is not None:
            self._cursors.append((PREDICTION, self._prediction))
        self._cursors.append((OWN, OwnCursor(tokens, self._index)))
        if recent is not None:
            cursor = DraftCursor(recent.tokens, recent.index)
            cursor.epoch = recent.epoch
            self._cursors.append((RECENT, cursor))
        self._right = self._expected = 0.0  # of the sequence's drafts: how many were right, and should have been
        self.copies = False  # when last looked at
        self.accepted_prediction = self.rejected_prediction = 0  # drafts from the prediction

    def behind(self) -> int:
        """Tokens that are not indexed yet."""
        missing = len(self._tokens) - 1 - self._index.end
        return (
            missing if self._prediction is None else missing + len(self._prediction.tokens) - self._prediction.index.end
        )

    def catch_up(self, most: int) -> None:
        """Index at most so many tokens."""
        end = min(len(self._tokens) - 1, self._index.end + most)
        most -= max(end - self._index.end, 0)
        self._index.extend(self._tokens, end)
        if self._prediction is not None:
            index = self._prediction.index
            index.extend(self._prediction.tokens, min(len(self._prediction.tokens), index.end + most))

    def candidate(self, acceptance: Acceptance) -> Candidate | None:
        """The best place to take drafts from, if there is any. All tokens but the last must be indexed."""
        self._follow()
        best: tuple[int, int, DraftCursor] | None = None
        for text, cursor in self._cursors:
            cursor.search(self._tokens)
            if cursor.position >= 0 and (best is None or cursor.matched > best[0]):
                best = cursor.matched, text, cursor
        self.copies = best is not None and best[0] >= COPIED
        if best is None:
            return None
        matched, text, cursor = best
        kind = text * LEVELS + min(max(matched - 1, 0).bit_length(), LEVELS - 1)
        probability = acceptance.probability(kind) * (OWN_WEIGHT + self._right) / (OWN_WEIGHT + self._expected)
        return Candidate(cursor, kind, min(probability, MOST_SURE))

    @staticmethod
    def forced(token_ids: tuple[int, ...], acceptance: Acceptance) -> Candidate:
        """The tokens that a grammar forces."""
        kind = FORCED * LEVELS + LEVELS - 1
        return Candidate(ForcedTokens(token_ids), kind, min(acceptance.probability(kind), MOST_SURE))

    def note(self, kind: int, count: int, accepted: int, acceptance: Acceptance) -> None:
        """Count a step's drafts of one kind. After the first wrong one, they say nothing of the kind."""
        tried = min(accepted + 1, count)
        if kind // LEVELS != FORCED:
            self._right = self._right * MEMORY + min(accepted, OWN_COUNTED)
            self._expected = self._expected * MEMORY + min(tried, OWN_COUNTED) * acceptance.probability(kind)
        acceptance.note(kind, accepted, tried)
        if kind // LEVELS == PREDICTION:
            self.accepted_prediction += accepted
            self.rejected_prediction += count - accepted

    def _follow(self) -> None:
        tokens, end = self._tokens, len(self._tokens)
        recent = self._recent
        if recent is not None and self._cursors[-1][1].epoch != recent.epoch:
            self._cursors[-1][1].move_to(recent)
        if end - self._seen > GAP:
            for text, cursor in self._cursors:
                if text != PREDICTION:
                    cursor.lose()
            self._seen = end if self._prediction is None else self._seen
        for i in range(self._seen, end):
            token = tokens[i]
            for _, cursor in self._cursors:
                cursor.follow(token, i)
        self._seen = end
