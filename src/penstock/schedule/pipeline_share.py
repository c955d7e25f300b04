"""Divides the running sequences among the plans of a pipeline.

A plan cannot use a token that an outstanding plan has yet to sample: one plan is in the first stage while the one
before is in the last. So a decoding sequence is in one outstanding plan at a time.
"""

from collections.abc import Sequence as Items

from penstock.schedule.sequence import Sequence


def take_share(running: Items[Sequence], depth: int, outstanding: int) -> tuple[list[Sequence], int]:
    """Return the sequences to plan now, in order, and how many of them decode. `outstanding` of `depth` plans are out.

    Chunks of a prompt follow each other at once, as their tokens are known. A plan takes at most 1 / `depth` of the
    running sequences as decodes, and leaves some for the plans that can still follow. No sequence waits for long: one
    is left over only by a full share, and `depth` full shares hold all sequences.
    """
    known = [s for s in running if s.expected == len(s.tokens) and s.planned < s.target]
    due = sum(s.planned + 1 == s.expected for s in known)
    share = decodes = min(-(-len(running) // depth), -(-due // (depth - outstanding)))
    taken = []
    for sequence in known:
        if sequence.planned + 1 == sequence.expected:
            if not share:
                continue
            share -= 1
        taken.append(sequence)
    return taken, decodes
