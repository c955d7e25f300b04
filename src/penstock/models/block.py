"""Implements a decoder block: norms, attention and MLP. A LayerSpec selects their kinds and their order."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from penstock.families import LayerSpec, ModelSpec
from penstock.models.attention import Attention, AttentionKinds, GroupInput, LayerCache
from penstock.models.collectives import Collectives
from penstock.models.experts_beside import ExpertsBeside
from penstock.models.mlp import make_mlp
from penstock.models.norm import Norm
from penstock.models.parameters import LayerParameters
from penstock.models.per_layer import PerLayerInput
from penstock.models.product import Product


class Block:
    """Executes one decoder block.

    Between blocks the residual stream is a pair (hidden, addend), and its value is the sum of the two. The addend is
    the output of the last sublayer (attention or MLP) if it was not added yet, or None. The kernel of the next norm
    computes the sum too, so that the addition needs no kernel of its own. The norm after a block also multiplies the
    sum by the block's `output_scale`.
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

        def norm(name: str, wanted: bool) -> Norm | None:
            return parameters.norm(name, model) if wanted else None

        self._attention_norm = norm("attention_norm", spec.pre_norms)
        self._attention: Attention = kinds[type(spec.attention)](spec.attention, parameters, model)
        self._attention_post_norm = norm("attention_post_norm", spec.post_norms)
        self._mlp_norm = norm("mlp_norm", spec.pre_norms and spec.has_mlp and not spec.shared_norm)
        self._mlp = make_mlp(spec, parameters, model.residual_scale) if spec.has_mlp else None
        self._mlp_post_norm = norm("mlp_post_norm", spec.post_norms)
        self._experts = ExpertsBeside.make(spec, parameters, model)
        self.per_layer = PerLayerInput.make(spec, parameters, model)
        self._parallel = spec.parallel
        self.output_scale = parameters.vector("output_scale").item() if spec.output_scale else 1.0

    @property
    def nbytes(self) -> int:
        norms = (self._attention_norm, self._attention_post_norm, self._mlp_norm, self._mlp_post_norm)
        others = (*norms, self._mlp, self._experts, self.per_layer)
        return self._attention.nbytes + sum(part.nbytes for part in others if part is not None)

    def attend(
        self,
        hidden: Tensor,
        addend: Tensor | None,
        rotation: Any,
        group: GroupInput,
        cache: LayerCache,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Runs the first part of the block: the norm and attention, without its output projection. Writes keys and
        values to `cache`. `scale` is the output scale of the block before. Returns ((hidden + addend) * scale, the
        output of attention)."""
        normed, hidden = self._enter(self._attention.input_product, self._attention_norm, hidden, addend, scale)
        return hidden, self._attention.attend(self._kernels, normed, rotation, group, cache)

    def finish(self, attended: Tensor, hidden: Tensor, own: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Runs the rest of the block on what `attend` returned: the output projection, the second norm and the MLP.
        `own` is the rows' embedding for this layer, if it has one. Returns the residual stream as (hidden, addend)."""
        if self._parallel:
            return self._finish_parallel(attended, hidden)
        project = partial(self._attention.project, attended)
        hidden, addend = self._leave(project, self._attention_post_norm, hidden)
        if self._mlp is None:
            return hidden, addend
        normed, hidden = self._enter(self._mlp.input_product, self._mlp_norm, hidden, addend)
        mlp = partial(self._mlp, normed)
        if self._experts is None:
            hidden, addend = self._leave(mlp, self._mlp_post_norm, hidden)
        else:
            addend = self._with_experts(self._experts, mlp, hidden)
        if self.per_layer is None or own is None:
            return hidden, addend
        hidden = self.add(hidden, addend)
        return hidden, self.per_layer(self._kernels, hidden, own)

    def add(self, hidden: Tensor, addend: Tensor | None, scale: float = 1.0) -> Tensor:
        """Returns (hidden + addend) * scale, or hidden without an addend. A norm's kernel computes this sum; its other
        result, the normed sum, is not used."""
        if addend is None:
            return hidden
        norm = self._mlp_norm or self._mlp_post_norm or self._attention_norm
        assert norm is not None, "a block has a norm"
        return norm(self._kernels, hidden, addend, scale=scale)[1]

    def _with_experts(self, experts: ExpertsBeside, mlp: Callable[[Tensor | None], Tensor], hidden: Tensor) -> Tensor:
        """Returns what the MLP and the mixture beside it, which read `hidden`, add to the residual."""
        _, dense = self._leave(mlp, experts.dense_post_norm, hidden)
        _, routed = self._leave(partial(experts, self._kernels, hidden), experts.post_norm, hidden)
        assert self._mlp_post_norm is not None and dense is not None
        normed: Tensor = self._mlp_post_norm(self._kernels, dense, routed)[0]
        return normed

    def _finish_parallel(self, attended: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """`finish` where the MLP reads what attention read. The ranks' partial outputs of both are added first, so they
        are summed once."""
        assert self._mlp is not None, "a parallel block has an MLP"
        normed, _ = self._enter(self._mlp.input_product, self._mlp_norm or self._attention_norm, hidden, None)
        alone = self._collectives is None
        output = self._attention.project(attended, hidden if alone else None)
        output = self._mlp(normed, output)
        if self._collectives is None:
            return output, None
        self._collectives.sum(output)
        return hidden, output

    def _enter(
        self, reader: Product | None, norm: Norm | None, hidden: Tensor, addend: Tensor | None, scale: float = 1.0
    ) -> tuple[Any, Tensor]:
        """Returns (the input of a sublayer, the sum (hidden + addend) * scale). The input is the normed sum, or without
        a norm the sum.

        `reader` is the only product that reads the input, or None if several do. If it takes quantised rows, the norm
        returns the input quantised.
        """
        if norm is None:
            hidden = self.add(hidden, addend, scale)
            return hidden, hidden
        return norm(self._kernels, hidden, addend, before=reader, scale=scale)

    def _leave(
        self, sublayer: Callable[[Tensor | None], Tensor], post_norm: Norm | None, hidden: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Runs a sublayer and returns the residual stream as (hidden, addend).

        `sublayer` takes a tensor that its last product adds to the output, or None. It gets `hidden` if its output
        needs no sum over ranks and no norm: the result then has no addend. Else it gets None, and its output, summed
        and normed, is the addend.
        """
        if post_norm is None and self._collectives is None:
            return sublayer(hidden), None
        output = sublayer(None)
        if self._collectives is not None:
            self._collectives.sum(output)
        if post_norm is None:
            return hidden, output
        return hidden, post_norm(self._kernels, output)[0]
