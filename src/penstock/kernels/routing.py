"""What passes between the parts of a mixture of experts."""

from typing import NamedTuple

from torch import Tensor


class Routing(NamedTuple):
    """A token's experts, in the order of their logits: a place in that order is a slot."""

    experts: Tensor  # int64 [tokens, slots], dense
    weights: Tensor  # fp32 [tokens, slots]


class SharedExpertOutput(NamedTuple):
    """What an expert gives that every token goes through: it joins the sum of the others."""

    output: Tensor  # [tokens, hidden]
    gate: Tensor | None  # fp32 [tokens, 1]: the logits of what it is scaled by
