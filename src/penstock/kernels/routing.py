"""The tensors that pass between the parts of a mixture of experts."""

from typing import NamedTuple

from torch import Tensor


class Routing(NamedTuple):
    """Each token's experts, in the order of their logits. A place in that order is called a slot."""

    experts: Tensor  # int64 [tokens, slots], dense
    weights: Tensor  # fp32 [tokens, slots]


class SharedExpertOutput(NamedTuple):
    """The output of the shared expert, which every token goes through. It is added to the sum of the routed experts."""

    output: Tensor  # [tokens, hidden]
    gate: Tensor | None  # fp32 [tokens, 1]: the logits of what it is scaled by
