"""Teaching a small model to leave a loop.

Greedy decoding of a small model repeats itself: each copy makes the next more likely. Here some pieces of the training
text are repeated. At the beginning of each copy the target is not the copy but what truly follows, up to the first
token in which they differ; the rest of the copy is shown and not learnt (after Xu et al., "Learning to Break the Loop",
2022).
"""

import random

import torch
from tokenizers import Tokenizer
from torch import Tensor

REPEATED_WINDOWS = 0.9  # the share of the windows to give repeats to
SPACING = 128  # tokens between two repeats, about
LINE_SHARE = 0.7  # of the repeats are whole lines, the rest a few tokens
WAY_OUT = 8.0  # the weight of the targets in a copy: they are few, and against the model's habit
MOST_LINES, MOST_TOKENS, MOST_COPIES = 2, 6, 5


def line_starts(tokenizer: Tokenizer) -> Tensor:
    """Return for each token id whether its text begins with a line end."""
    starts = torch.zeros(tokenizer.get_vocab_size(), dtype=torch.bool)
    for token, index in tokenizer.get_vocab().items():
        starts[index] = token.startswith("Ċ")  # the byte-level alphabet's newline
    return starts


def as_it_is(window: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, targets and the targets' weights, each one token shorter than ``window``."""
    return window[:-1].long(), window[1:].long(), torch.ones(len(window) - 1)


def with_repeats(window: Tensor, starts: Tensor, rng: random.Random) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, targets and the targets' weights, each one token shorter than ``window``, with repeated pieces.

    What no longer fits is cut off at the end.
    """
    window = window.long()
    lines = starts[window].nonzero().flatten().tolist()
    shown, wanted, weights = [], [], []
    done = 0
    while done < len(window):
        begin, end = _piece(lines, done + rng.randrange(2 * SPACING), rng)
        end = min(end, len(window))
        shown.append(window[done:end])
        wanted.append(window[done:end])
        weights.append(torch.ones(end - done))
        if begin < end:
            copies = rng.randint(1, MOST_COPIES)
            shown.append(window[begin:end].repeat(copies))
            targets, learnt = _targets_in_copy(window[begin:end], window[end:])
            wanted.append(targets.repeat(copies))
            weights.append(WAY_OUT * learnt.repeat(copies))
        done = end
    ids, targets, weight = (torch.cat(column)[: len(window)] for column in (shown, wanted, weights))
    return ids[:-1], targets[1:], weight[1:]


def _targets_in_copy(piece: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    """Return the targets within a copy of ``piece`` and which of them are learnt (1, else 0).

    The target is what follows the piece, as far as the copy agrees with it.
    """
    targets, learnt = piece.clone(), torch.zeros(len(piece))
    for i in range(min(len(piece), len(following))):
        targets[i], learnt[i] = following[i], 1.0
        if piece[i] != following[i]:
            break
    return targets, learnt


def _piece(lines: list[int], position: int, rng: random.Random) -> tuple[int, int]:
    """Return begin and end of a piece at or after ``position``: whole lines, or a few tokens."""
    if rng.random() >= LINE_SHARE:
        return position, position + rng.randint(1, MOST_TOKENS)
    later = [line for line in lines if line >= position][: 1 + rng.randint(1, MOST_LINES)]
    if len(later) < 2:
        return position, position + 1
    return later[0], later[-1]
