"""Checks that counts of tokens agree with the outstanding plans."""

from collections import Counter
from collections.abc import Iterable

from penstock.schedule.live_requests import LiveRequests
from penstock.schedule.sequence import Phase
from penstock.schedule.step import Outstanding


def check_counts(outstanding: Iterable[Outstanding], live: LiveRequests) -> None:
    """Raise RuntimeError if a sequence counts other work than the outstanding plans have, with all drafts accepted."""
    tokens, sampled = Counter[int](), Counter[int]()
    for step in outstanding:
        for sequence, work in zip(step.sequences, step.work, strict=True):
            tokens[sequence.id] += work.count
            sampled[sequence.id] += work.sample + work.drafts
    for state in live.requests.values():
        for s in state.choices.values():
            if s.phase is not Phase.RUNNING:
                continue  # a preempted sequence starts over; the results still to come bring tokens alone
            if (s.planned - s.computed, s.expected - len(s.tokens)) != (tokens[s.id], sampled[s.id]):
                raise RuntimeError(
                    f"sequence {s.id}: planned={s.planned} and expected={s.expected} are not {tokens[s.id]} beyond "
                    f"{s.computed} computed and {sampled[s.id]} beyond {len(s.tokens)} known tokens"
                )
            if s.planned > s.slots or s.expected > s.limit:
                raise RuntimeError(
                    f"sequence {s.id}: planned={s.planned} is over its {s.slots} slots, or expected={s.expected} "
                    f"over its limit of {s.limit} tokens"
                )
