"""Types of a mixture of experts: the rule by which tokens choose experts, and the tensors between its parts."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Scoring:
    """How a token's experts are chosen and weighted by its logits. Scores are the softmax of the logits, or with
    `sigmoid` that of each. The experts form `groups` equal groups, and only the best `kept_groups` take part: those
    with the largest score, or with `by_pairs` the largest sum of two scores. The weights are the scores times
    `scale`."""

    sigmoid: bool = False
    groups: int = 1
    kept_groups: int = 1
    by_pairs: bool = False
    scale: float = 1.0


SOFTMAX = Scoring()


class Routing(NamedTuple):
    """Each token's experts, in the order of their logits. A place in that order is called a slot."""

    experts: Tensor  # int64 [tokens, slots], dense
    weights: Tensor  # fp32 [tokens, slots]


class SharedExpertOutput(NamedTuple):
    """The output of the shared expert, which every token goes through. It is added to the sum of the routed experts."""

    output: Tensor  # [tokens, hidden]
    gate: Tensor | None  # fp32 [tokens, 1]: the output is scaled by the sigmoid of these logits
