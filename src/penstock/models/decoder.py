"""Implements a decoder-only transformer that a ModelSpec describes."""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from penstock.families import ModelSpec
from penstock.kernels import Kernels
from penstock.models.attention import ATTENTION_KINDS, AttentionKinds, GroupInput, LayerCache
from penstock.models.block import Block
from penstock.models.collectives import Collectives
from penstock.models.norm import Norm
from penstock.models.parameters import LayerParameters
from penstock.models.product import Product
from penstock.models.rope import rotary_frequencies


@dataclass(frozen=True)
class StepInput:
    """Holds what the decoder reads in one step."""

    token_ids: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens]
    groups: tuple[GroupInput, ...]  # one per KV group of the spec, and one for layers with a state
    hidden: Tensor | None = None  # [tokens, hidden] from the previous pipeline stage; None on the first stage


@dataclass(frozen=True)
class Hidden:
    """Holds the hidden states that `forward` returns, for all tokens of a step or for some of them.

    On a rank with the head, `forward` stops in the last block after attention: all keys and values are stored by then.
    `logits` runs the rest of this block for the requested tokens only. So most tokens of a prompt skip the last layer's
    output projection and MLP."""

    states: Tensor  # [tokens, hidden]
    attended: Tensor | None = None  # [tokens, width] of the last block's attention; None on a rank without the head
    own: Tensor | None = None  # [tokens, width] embedding of the tokens for the last block, if it has one

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, rows: slice | Tensor) -> "Hidden":
        return self.mapped(lambda tensor: tensor[rows])

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Hidden":
        """Returns new hidden states: `function` is applied to all tensors."""
        attended, own = (None if each is None else function(each) for each in (self.attended, self.own))
        return Hidden(function(self.states), attended, own)

    @property
    def latest(self) -> Tensor:
        """Returns the tensor that was computed last. A NaN or infinity in a token's keys or values also makes the
        token's row of this tensor not finite."""
        return self.states if self.attended is None else self.attended


class LanguageModel(Protocol):
    """Executes a decoder: Decoder, or TransformersDecoder."""

    @property
    def nbytes(self) -> int: ...

    @property
    def recordable(self) -> bool:
        """Whether the ops of `forward` and `logits` are those of our kernels alone, so that they can be recorded."""

    def forward(self, step: StepInput, caches: Sequence[LayerCache]) -> Hidden: ...

    def logits(self, hidden: Hidden) -> Tensor | None: ...

    def vectors(self, hidden: Hidden) -> Tensor: ...


class Decoder:
    """Executes a spec.

    `parameters` maps the names in `spec.parameters` to tensors. Vectors have the dtype of the activations. A matrix has
    this dtype too, or `select_packing` of the kernels' platform has packed it already. The constructor removes each
    parameter from the mapping and packs it if needed, so that no matrix is in memory both packed and unpacked.

    The spec may describe one rank's part of a model (see families/shard.py). If tensor ranks share the layers,
    `collectives` sums their partial results. A pipeline stage without the embedding takes hidden states as input, and a
    stage without the head returns them.

    `kinds` maps the type of an attention spec to the function that makes the attention. `context` is the most tokens of
    a sequence, by default the model's: "longrope" depends on it."""

    def __init__(
        self,
        spec: ModelSpec,
        parameters: MutableMapping[str, Any],
        kernels: Kernels,
        collectives: Collectives | None = None,
        kinds: AttentionKinds = ATTENTION_KINDS,
        *,
        context: int = 0,
    ) -> None:
        self._spec = spec
        self._kernels = kernels
        self._collectives = collectives
        names = ("layers.0.attention_norm.weight", "layers.0.attention_post_norm.weight")  # every rank has one of them,
        vector = next(parameters[name] for name in names if name in parameters)  # and all vectors have its dtype
        self._dtype, device = vector.dtype, vector.device

        outer = LayerParameters(parameters, "", kernels)

        def product(name: str) -> Product | None:
            return outer.matrix(name) if f"{name}.weight" in parameters else None

        self._embedding, self._positions = product("embedding"), product("embedding.positions")
        self._norm = outer.norm("norm", spec) if "norm.weight" in parameters else None
        self._head = product("head")
        if spec.tie_embeddings and self._embedding is not None:
            self._head = replace(self._embedding, name="head")
        self._blocks = tuple(
            Block(layer, spec, LayerParameters(parameters, f"layers.{i}.", kernels), collectives, kinds)
            for i, layer in enumerate(spec.layers)
        )
        self._frequencies = {
            block.rotary: rotary_frequencies(*block.rotary, context or spec.max_position).to(device)
            for block in self._blocks
            if block.rotary
        }

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all weights. Tied embeddings count once."""
        head = None if self._spec.tie_embeddings else self._head
        tensors = [self._embedding, self._positions, self._norm, head, *self._blocks]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def recordable(self) -> bool:
        return True

    def forward(self, step: StepInput, caches: Sequence[LayerCache]) -> Hidden:
        """Returns the hidden states of a step's tokens. Writes keys and values to `caches`, one per layer."""
        rotations = {
            rotary: self._kernels.attention.rotation(step.positions, frequencies, self._dtype, rotary[0].temperature)
            for rotary, frequencies in self._frequencies.items()
        }
        hidden, addend = self._embed(step)
        last, scale, embedded = self._blocks[-1], 1.0, hidden
        for block, cache in zip(self._blocks, caches, strict=True):
            rotation = rotations[block.rotary] if block.rotary else None
            hidden, attended = block.attend(hidden, addend, rotation, step.groups[block.group], cache, scale)
            layer = block.per_layer
            own = None if layer is None else layer.embed(self._kernels, step.token_ids, embedded)
            if self._norm is not None and block is last:  # this rank has the head: `logits` finishes the block
                return Hidden(hidden, attended, own)
            hidden, addend = block.finish(attended, hidden, own)
            scale = block.output_scale
        return Hidden(last.add(hidden, addend, scale))

    def logits(self, hidden: Hidden) -> Tensor | None:
        """Returns fp32 logits [rows, vocab] for rows of what `forward` returned. All tensor ranks of the last stage
        must call this; those other than tensor rank 0 get None. Raises ValueError on a stage without the head."""
        spec = self._spec
        if hidden.attended is None or self._norm is None or self._head is None:
            raise ValueError("this pipeline stage has no head: only the last stage computes logits")
        normed = self._normed(hidden, hidden.attended, self._norm, self._head)
        logits = self._head.logits(normed, scale=spec.logit_scale, softcap=spec.logit_softcap)
        return logits if self._collectives is None else self._collectives.gather(logits, spec.vocab_total)

    def vectors(self, hidden: Hidden) -> Tensor:
        """Returns the last hidden states, normed, [rows, hidden] for rows of what `forward` returned. Raises ValueError
        on a stage without the head."""
        if hidden.attended is None or self._norm is None:
            raise ValueError("this pipeline stage has no head: only the last stage computes vectors")
        normed: Tensor = self._normed(hidden, hidden.attended, self._norm)
        return normed

    def _normed(self, rows: Hidden, attended: Tensor, norm: Norm, before: Product | None = None) -> Any:
        """Returns the normed output of the last block."""
        last = self._blocks[-1]
        hidden, addend = last.finish(attended, rows.states, rows.own)
        return norm(self._kernels, hidden, addend, before=before, scale=last.output_scale)[0]

    def _embed(self, step: StepInput) -> tuple[Tensor, Tensor | None]:
        """Returns the first block's input as (hidden, addend). The addend is that of learned positions."""
        if step.hidden is not None:
            return step.hidden, None
        assert self._embedding is not None, "the first stage has the embedding"
        spec, collectives = self._spec, self._collectives
        first = None if collectives is None else spec.vocab_start
        hidden = self._embedding.rows(step.token_ids, spec.embedding_scale, self._dtype, first=first)
        if collectives is not None:
            collectives.sum(hidden)
        if self._positions is None:
            return hidden, None
        return hidden, self._positions.rows(step.positions, 1.0, self._dtype)
