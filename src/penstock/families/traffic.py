"""Bytes that the ranks of a model send to each other in a step, computed from the spec."""

from dataclasses import dataclass

from penstock.config import RankPlace, Split
from penstock.config.split import part
from penstock.families.shard import stage_layers
from penstock.families.spec import ModelSpec

LOGIT_BYTES = 4  # logits are fp32 in every dtype


@dataclass(frozen=True)
class StepTraffic:
    """Bytes of tensors that one rank sends in a step. A tensor sent to several ranks counts once."""

    sum: int = 0  # to the tensor ranks of its stage, which each add them all
    gather: int = 0  # parts of logits, to the first tensor rank of the last stage
    send: int = 0  # hidden states, to the rank with its tensor rank in the next stage

    @property
    def total(self) -> int:
        return self.sum + self.gather + self.send


def step_traffic(spec: ModelSpec, place: RankPlace, tokens: int, sampled: int, element_size: int) -> StepTraffic:
    """The bytes that the rank at `place` sends in a step of `tokens` tokens. For `sampled` of them logits are computed,
    to sample or for prompt logprobs. `element_size`: bytes of an activation.

    Ranks sum after the embedding and, in every layer, after attention, the MLP and a mixture beside it, or once if
    attention and MLP are parallel. The sums of the model's last layer are of the `sampled` tokens only.
    """
    split = place.split
    row = spec.hidden_size * element_size
    sums = [spec.layers[i].sums for i in stage_layers(len(spec.layers), split.pipeline, place.stage)]
    last = sums.pop() if place.last else 0
    summed = tokens * (place.first + sum(sums)) + sampled * last if split.tensor > 1 else 0
    columns = len(part(spec.vocab_size, split.tensor, place.tensor_rank))
    return StepTraffic(
        sum=summed * row,
        gather=sampled * columns * LOGIT_BYTES if place.last and place.tensor_rank > 0 else 0,
        send=0 if place.last else tokens * row,
    )


def link_bytes(spec: ModelSpec, split: Split, tokens: int, sampled: int, element_size: int) -> int:
    """Bytes that pass links one after the other in such a step; the links of a stage work in parallel. In a sum a rank
    sends its part to each other rank of its stage and receives as much. Parts of logits all go to one rank."""
    total = 0
    for stage in range(split.pipeline):
        step = step_traffic(spec, RankPlace(split, stage * split.tensor), tokens, sampled, element_size)
        total += step.sum * (split.tensor - 1) + step.send
    others = spec.vocab_size - len(part(spec.vocab_size, split.tensor, 0))
    return total + sampled * others * LOGIT_BYTES
