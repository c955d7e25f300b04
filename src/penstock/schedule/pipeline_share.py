"""What a plan takes where none may build upon a token that an outstanding one has yet to sample.

So it is with a pipeline of stages: a plan is in its first stage while the one before it is in its last. A sequence that
decodes then waits for its token, and the plans divide the others among them.
"""

from collections.abc import Sequence as Line

from penstock.schedule.sequence import Sequence


def take_share(running: Line[Sequence], depth: int, outstanding: int) -> tuple[list[Sequence], int]:
    """(sequences to plan now, in order, how many of them decode) of those that run. `outstanding` of `depth` plans are.

    Chunks of a prompt follow each other at once: their tokens are known. Of those that decode, a plan takes a share of
    all that run at most, and leaves something to the plans that can still follow it. Nobody waits for long: who is left
    over was kept out by a full share, and when all outstanding plans are full they hold everybody.
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
