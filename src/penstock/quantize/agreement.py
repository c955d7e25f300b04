"""How far a model's next tokens are from those of another: perplexity, KL divergence, equal greedy tokens."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from penstock.quantize.stream import HEAD_ROWS, Windows
from penstock.quantize.workers import Workers


@dataclass(frozen=True)
class WindowScore:
    """The sums over a window's tokens but the first, in nats where not counted."""

    tokens: int
    nats: float  # -log p of the tokens, by the model
    base_nats: float  # by the one that it is compared with
    divergence: float  # KL(base || model)
    agreed: int  # tokens for which both have the same most likely token


Logits = Callable[[Tensor], Tensor]


def compare_windows(
    hidden: Tensor,
    logits: Logits,
    base_hidden: Tensor,
    base_logits: Logits,
    windows: Windows,
    workers: Workers,
    advance: Callable[[int], None] = lambda windows: None,
) -> list[WindowScore]:
    """Returns the scores of windows, from the last hidden states [tokens, hidden] of two models and their heads. Calls
    `advance` with the number of windows that are done since its last call."""

    def score(part: tuple[int, Sequence[int]]) -> WindowScore:
        (first, window), sums = part, [0.0, 0.0, 0.0, 0.0]
        count = len(window) - 1
        for begin in range(0, count, HEAD_ROWS):
            rows = slice(first + begin, first + min(begin + HEAD_ROWS, count))
            ours, base = (
                head(states[rows]).log_softmax(-1) for head, states in ((logits, hidden), (base_logits, base_hidden))
            )
            targets = torch.tensor(window[begin + 1 : begin + 1 + len(ours)])[:, None]
            sums[0] -= ours.gather(1, targets).sum(dtype=torch.float64).item()
            sums[1] -= base.gather(1, targets).sum(dtype=torch.float64).item()
            sums[2] += (base.exp() * (base - ours)).sum(dtype=torch.float64).item()
            sums[3] += (ours.argmax(-1) == base.argmax(-1)).sum().item()
        return WindowScore(count, sums[0], sums[1], sums[2], int(sums[3]))

    starts = accumulate((len(window) for window in windows[:-1]), initial=0)
    scores = []
    for one in workers.map(score, zip(starts, windows, strict=True)):
        scores.append(one)
        advance(1)
    return scores


def figures(scores: Sequence[WindowScore]) -> dict[str, Any]:
    """Returns the figures of windows: perplexities, the change and its 95% interval in per cent, the mean KL divergence
    in nats with its interval, and the share of equal greedy tokens."""
    tokens = sum(score.tokens for score in scores)
    nats, base = (math.fsum(sums) / tokens for sums in ([s.nats for s in scores], [s.base_nats for s in scores]))
    changes = [(score.nats - score.base_nats) / score.tokens for score in scores]
    divergences = [score.divergence / score.tokens for score in scores]
    change = 100 * math.expm1(min(nats - base, 700.0))
    return {
        "tokens": tokens,
        "base_perplexity": round(math.exp(min(base, 700.0)), 4),
        "perplexity": round(math.exp(min(nats, 700.0)), 4),
        "change_percent": round(change, 3),
        "change_margin": _rounded(_margin(changes), (100 + change), 3),
        "kl": round(math.fsum(score.divergence for score in scores) / tokens, 6),
        "kl_margin": _rounded(_margin(divergences), 1.0, 6),
        "agreement": round(sum(score.agreed for score in scores) / tokens, 4),
    }


def by_class(scores: Mapping[str, Sequence[WindowScore]]) -> list[dict[str, Any]]:
    """Returns a row for each class of text, and one for all."""
    rows = [{"class": name, **figures(each)} for name, each in scores.items()]
    if len(rows) > 1:
        rows.append({"class": "all", **figures([score for each in scores.values() for score in each])})
    return rows


def _margin(values: Sequence[float]) -> float | None:
    """Half the width of the mean's 95% interval; None for a single value."""
    return None if len(values) < 2 else 1.96 * statistics.stdev(values) / math.sqrt(len(values))


def _rounded(value: float | None, factor: float, digits: int) -> float | None:
    return None if value is None else round(value * factor, digits)
