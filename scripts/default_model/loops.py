"""Teaching a small model to leave a loop.

Greedy decoding of a small model repeats itself: each copy makes the next more likely. Here the model completes
functions of the training text greedily, and the tokens by which it repeats itself are made less likely (unlikelihood
training on the model's own words: Welleck et al., "Neural Text Generation with Unlikelihood Training", 2020).
"""

import random

import torch
from torch import Tensor

from .lines import Lines
from .network import Network

PROMPTS, WRITTEN = (256, 768, 1408), 128  # tokens; loops are more frequent after long prompts
BATCH_TOKENS = 4096
GRAM = 6  # this many tokens that occurred before are a repetition: a short line
WEIGHT = 4.0


class LoopBreaker:
    """Draws functions of the training text and lets the network complete them."""

    def __init__(self, documents: list[Tensor], lines: Lines, rng: random.Random) -> None:
        self._documents, self._lines, self._rng = documents, lines, rng
        self._headers = [
            (number, place, indent)
            for number, document in enumerate(documents)
            for place, indent in lines.headers(document.tolist())
            if place >= max(PROMPTS)
        ]
        self.share = 0.0  # moving average of the share of written tokens that repeat

    def loss(self, network: Network) -> Tensor:
        """The unlikelihood of repeated tokens, per written token."""
        prompt = self._rng.choice(PROMPTS)
        rows = BATCH_TOKENS // (prompt + WRITTEN)
        drawn = [self._rng.choice(self._headers) for _ in range(rows)]
        prompts = torch.stack([self._documents[n][place - prompt : place] for n, place, _ in drawn]).long()
        ids = network.complete(prompts, WRITTEN)
        repeated = torch.zeros(rows, WRITTEN, dtype=torch.bool)
        count = 0
        for row, (_, _, indent) in enumerate(drawn):
            written = ids[row, prompt:].tolist()
            end = self._lines.end(written, indent)
            count += end
            repeated[row, repetitions(written[:end])] = True
        self.share = 0.9 * self.share + 0.1 * repeated.sum().item() / count
        logits = network(ids[:, :-1])[:, prompt - 1 :]
        chosen = torch.log_softmax(logits, -1).gather(-1, ids[:, prompt:, None])[..., 0]
        unlikelihood = -torch.log1p(-chosen.exp().clamp(max=1 - 1e-5))
        return WEIGHT * (unlikelihood * repeated).sum() / count


def repetitions(written: list[int]) -> list[int]:
    """Where the last GRAM tokens have stood before."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for i in range(GRAM, len(written) + 1):
        gram = tuple(written[i - GRAM : i])
        if gram in seen:
            found.append(i - 1)
        seen.add(gram)
    return found
