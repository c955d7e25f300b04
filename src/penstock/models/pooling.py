"""Makes one vector of the hidden states of a text."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.config.facts import PoolingFacts


def pool(hidden: Tensor, lengths: Sequence[int], mode: str) -> Tensor:
    """Returns fp32 [texts, hidden] of the hidden states of texts that lie one after the other."""
    sizes = torch.tensor(lengths, device=hidden.device)
    ends = sizes.cumsum(0)
    if mode == "cls":
        return hidden[ends - sizes].float()
    if mode == "last":
        return hidden[ends - 1].float()
    each = hidden.float().split(list(lengths))
    return torch.stack([text.mean(0) if mode == "mean" else text.amax(0) for text in each])


def finished(pooled: Tensor, pooling: PoolingFacts) -> Tensor:
    """Returns embeddings of pooled states: of length 1, if the model has them so."""
    return F.normalize(pooled, dim=-1) if pooling.normalize else pooled
