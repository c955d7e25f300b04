"""A decoder block: attention and an MLP, each between its norms, composed as its LayerSpec says."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from penstock.families import LayerSpec, ModelSpec
from penstock.models.attention import Attention, AttentionKinds, GroupInput, LayerCache
from penstock.models.collectives import Collectives
from penstock.models.mlp import make_mlp
from penstock.models.parameters import LayerParameters


class Block:
    """One decoder block.

    Between blocks the residual stream is a pair (hidden, addend): the next norm adds the addend, in one kernel. The
    addend is None if it has been added already.
    """

    def __init__(
        self,
        spec: LayerSpec,
        model: ModelSpec,
        parameters: LayerParameters,
        collectives: Collectives | None,
        kinds: AttentionKinds,
    ) -> None:
        self.rotary = spec.attention.rotary
        self.group = spec.kv_group
        self._kernels = parameters.kernels
        self._collectives = collectives
        self._eps, self._offset = model.norm_eps, model.norm_offset
        self._attention_norm = parameters.vector("attention_norm")
        self._attention: Attention = kinds[type(spec.attention)](spec.attention, parameters, model)
        self._attention_post_norm = parameters.vector("attention_post_norm") if spec.post_norms else None
        self._mlp_norm = parameters.vector("mlp_norm")
        self._mlp = make_mlp(spec, parameters)
        self._mlp_post_norm = parameters.vector("mlp_post_norm") if spec.post_norms else None

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        norms = (self._attention_norm, self._attention_post_norm, self._mlp_norm, self._mlp_post_norm)
        return self._attention.nbytes + self._mlp.nbytes + sum(norm.nbytes for norm in norms if norm is not None)

    def attend(
        self, hidden: Tensor, addend: Tensor | None, rotation: Any, group: GroupInput, cache: LayerCache
    ) -> tuple[Tensor, Tensor]:
        """The block up to its attention: (hidden states with the addend, what attention gave)."""
        normed, hidden = self._enter(self._attention.input_weight, self._attention_norm, hidden, addend)
        return hidden, self._attention.attend(self._kernels, normed, rotation, group, cache)

    def finish(self, attended: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """The block after its attention: (hidden, addend)."""
        project = partial(self._attention.project, self._kernels, attended)
        hidden, addend = self._leave(project, self._attention_post_norm, hidden)
        normed, hidden = self._enter(self._mlp.input_weight, self._mlp_norm, hidden, addend)
        return self._leave(partial(self._mlp, self._kernels, normed), self._mlp_post_norm, hidden)

    def add(self, hidden: Tensor, addend: Tensor | None) -> Tensor:
        """The sum of both. A norm's kernel computes it; the norm itself, of any weight, is thrown away."""
        if addend is None:
            return hidden
        return self._kernels.rms_norm(hidden, addend, self._mlp_norm, self._eps, self._offset)[1]

    def _enter(self, reader: Any, norm: Tensor, hidden: Tensor, addend: Tensor | None) -> tuple[Any, Tensor]:
        """(the input of a sublayer, hidden states with the addend). Only `reader` multiplies the input, if given."""
        return self._kernels.norm_before(reader)(hidden, addend, norm, self._eps, self._offset)

    def _leave(
        self, sublayer: Callable[[Tensor | None], Tensor], post_norm: Tensor | None, hidden: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """(hidden, addend) after a sublayer, which is called with the residual that it is to add."""
        if post_norm is None and self._collectives is None:
            return sublayer(hidden), None
        output = sublayer(None)
        if self._collectives is not None:
            self._collectives.sum(output)
        if post_norm is None:
            return hidden, output
        return hidden, self._kernels.rms_norm(output, None, post_norm, self._eps, self._offset)[0]
