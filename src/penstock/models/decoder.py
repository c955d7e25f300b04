"""A decoder-only transformer that executes a ModelSpec."""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.families import ModelSpec
from penstock.kernels import Kernels
from penstock.models.attention import ATTENTION_KINDS, AttentionKinds, GroupInput, LayerCache
from penstock.models.block import Block
from penstock.models.collectives import Collectives
from penstock.models.parameters import LayerParameters
from penstock.models.rope import inverse_frequencies


@dataclass(frozen=True)
class StepInput:
    token_ids: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens]
    groups: tuple[GroupInput, ...]  # one per KV group of the spec
    hidden: Tensor | None = None  # [tokens, hidden] from the stage before, for a stage without the embedding


@dataclass(frozen=True)
class Hidden:
    """The hidden states that `forward` returns, for all tokens of a step or for some of them.

    On the rank with the head, the last block has only run up to its attention, which has stored all keys and values.
    `logits` runs the rest of it, for the requested tokens only: that saves a fiftieth of a prompt's work."""

    states: Tensor  # [tokens, hidden]
    attended: Tensor | None = None  # [tokens, width] the last block's attention, on the rank with the head

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, rows: slice | Tensor) -> "Hidden":
        return self.mapped(lambda tensor: tensor[rows])

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Hidden":
        """The function applied to both tensors."""
        return Hidden(function(self.states), None if self.attended is None else function(self.attended))

    @property
    def latest(self) -> Tensor:
        """The tensor that was computed last: a token's row has a NaN or infinity if one of its keys or values does."""
        return self.states if self.attended is None else self.attended


class Decoder:
    """Executes a spec. `parameters` are those of `spec.parameters`, by name. Vectors have the dtype of the activations;
    matrices have it too, or are packed by `select_packing` of the kernels' platform. They are removed from the mapping
    one by one and packed if they are not yet, so that none is in memory twice.

    The spec may be one rank's (see families/shard.py). If the rank shares its layers with others, `collectives` adds
    what each computes. A pipeline stage without the embedding takes hidden states; one without the head returns them.

    `kinds` makes the attention of each layer from its spec."""

    def __init__(
        self,
        spec: ModelSpec,
        parameters: MutableMapping[str, Any],
        kernels: Kernels,
        collectives: Collectives | None = None,
        kinds: AttentionKinds = ATTENTION_KINDS,
    ) -> None:
        self._spec = spec
        self._kernels = kernels
        self._collectives = collectives
        vector = parameters["layers.0.attention_norm.weight"]
        self._dtype, device = vector.dtype, vector.device

        def packed(name: str) -> Any:
            return kernels.linear.pack(parameters.pop(name)) if name in parameters else None

        self._embedding = packed("embedding.weight")
        self._norm: Tensor | None = parameters.pop("norm.weight", None)
        self._head = self._embedding if spec.tie_embeddings else packed("head.weight")
        self._blocks = tuple(
            Block(layer, spec, LayerParameters(parameters, f"layers.{i}.", kernels), collectives, kinds)
            for i, layer in enumerate(spec.layers)
        )
        self._frequencies = {
            block.rotary: inverse_frequencies(*block.rotary).to(device) for block in self._blocks if block.rotary
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all weights; a tied one counts once."""
        tensors = [self._embedding, self._norm, None if self._head is self._embedding else self._head, *self._blocks]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def forward(self, step: StepInput, caches: Sequence[LayerCache]) -> Hidden:
        """The hidden states of a step's tokens. Writes to `caches`, one per layer."""
        rotations = {
            rotary: self._kernels.attention.rotation(step.positions, frequencies, self._dtype)
            for rotary, frequencies in self._frequencies.items()
        }
        hidden, addend = self._embed(step), None
        last = self._blocks[-1]
        for block, cache in zip(self._blocks, caches, strict=True):
            rotation = rotations[block.rotary] if block.rotary else None
            hidden, attended = block.attend(hidden, addend, rotation, step.groups[block.group], cache)
            if self._norm is not None and block is last:
                return Hidden(hidden, attended)
            hidden, addend = block.finish(attended, hidden)
        return Hidden(last.add(hidden, addend))

    def logits(self, hidden: Hidden) -> Tensor | None:
        """fp32 [rows, vocab] of rows that `forward` returned. None on a rank that only contributed its part of them."""
        spec = self._spec
        if hidden.attended is None or self._norm is None:
            raise ValueError("this pipeline stage has no head: logits are computed in the last stage")
        states, addend = self._blocks[-1].finish(hidden.attended, hidden.states)
        norm = self._kernels.norm_before(self._head)
        normed, _ = norm(states, addend, self._norm, spec.norm_eps, spec.norm_offset)
        logits = self._kernels.linear.logits(normed, self._head)
        return logits if self._collectives is None else self._collectives.gather(logits, spec.vocab_total)

    def _embed(self, step: StepInput) -> Tensor:
        if step.hidden is not None:
            return step.hidden
        spec, linear, collectives = self._spec, self._kernels.linear, self._collectives
        if collectives is None:
            return linear.rows(step.token_ids, self._embedding, spec.embedding_scale, self._dtype)
        part = linear.rows(step.token_ids, self._embedding, spec.embedding_scale, self._dtype, first=spec.vocab_start)
        collectives.sum(part)
        return part
