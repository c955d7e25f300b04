"""What the ranks of a model hand to each other in a step, in bytes: a function of the spec, as their memory is."""

from dataclasses import dataclass

from penstock.config import Place, Split
from penstock.config.split import part
from penstock.families.shard import stage_layers
from penstock.families.spec import ModelSpec

LOGIT_BYTES = 4  # logits are fp32 in every dtype


@dataclass(frozen=True)
class StepTraffic:
    """Bytes of tensors that one rank hands over in a step. What it gives to several others counts once."""

    sum: int = 0  # to the tensor ranks of its stage, each of which adds them all
    gather: int = 0  # parts of logits, to the first tensor rank of the last stage
    send: int = 0  # hidden states, to the rank with its tensor rank in the next stage

    @property
    def total(self) -> int:
        return self.sum + self.gather + self.send


def step_traffic(spec: ModelSpec, place: Place, tokens: int, sampled: int, element_size: int) -> StepTraffic:
    """What the rank at `place` of a model hands over in a step of `tokens` tokens after `sampled` of which another is
    chosen (with prompt logprobs: or would be). `element_size` is an activation's, in bytes.

    A sum follows the embedding, and in every layer attention's output and the MLP's: in the last layer of all, for the
    tokens alone after which another is chosen.
    """
    split = place.split
    row = spec.hidden_size * element_size
    layers = len(stage_layers(len(spec.layers), split.pipeline, place.stage))
    summed = tokens * (place.first + 2 * (layers - place.last)) + sampled * 2 * place.last if split.tensor > 1 else 0
    columns = len(part(spec.vocab_size, split.tensor, place.tensor_rank))
    return StepTraffic(
        sum=summed * row,
        gather=sampled * columns * LOGIT_BYTES if place.last and place.tensor_rank > 0 else 0,
        send=0 if place.last else tokens * row,
    )


def link_bytes(spec: ModelSpec, split: Split, tokens: int, sampled: int, element_size: int) -> int:
    """What passes links one after the other in such a step, those of a stage at once: in a sum a rank's part goes to
    each other rank of its stage, while as much comes; parts of logits all come to one."""
    total = 0
    for stage in range(split.pipeline):
        step = step_traffic(spec, Place(split, stage * split.tensor), tokens, sampled, element_size)
        total += step.sum * (split.tensor - 1) + step.send
    others = spec.vocab_size - len(part(spec.vocab_size, split.tensor, 0))
    return total + sampled * others * LOGIT_BYTES
