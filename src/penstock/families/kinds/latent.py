"""Latent attention as data: see attention.py."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from penstock.config.facts import PageShape
from penstock.families.kinds.attention import AttentionMemory, Cut, RopeSpec, TensorSplit
from penstock.families.rows import head_order
from penstock.families.spec import Parameter, TensorSource, joined, stacked

_CUTS: Mapping[str, Cut] = {
    "query_down.weight": "whole",
    "query_down.bias": "whole",
    "query_norm.weight": "whole",
    "query.weight": "rows",
    "query_rope.weight": "rows",
    "latent.weight": "whole",
    "latent.bias": "whole",
    "latent_norm.weight": "whole",
    "key_rope.weight": "whole",
    "key_rope.bias": "whole",
    "key_up.weight": "rows",
    "value_up.weight": "rows",
    "output.weight": "columns",
    "output.bias": "once",
}


@dataclass(frozen=True)
class LatentSpec:
    """Latent attention (DeepSeek-AI, "DeepSeek-V2", 2024). A token keeps a latent of `rank` values, of which each
    head's key and value are products, and a rotated key of `rope_dim` values that all heads share. A head's query has a
    part for each of the two keys.

    Parameters of layer i:
    - `query.weight` [num_heads * key_dim, query_rank] and `query_rope.weight` [num_heads * rope_dim, query_rank], of
      `query_down.weight` [query_rank, hidden] and `query_norm.weight` [query_rank]; with query_rank 0 of the hidden
      states instead;
    - `latent.weight` [rank, hidden], `latent_norm.weight` [rank], `key_rope.weight` [rope_dim, hidden];
    - `key_up.weight` [num_heads * rank, key_dim]: of each head the transpose of what makes its key;
    - `value_up.weight` [num_heads * value_dim, rank], `output.weight` [hidden, num_heads * value_dim];
    - with bias those of query_down, latent, key_rope and output.
    """

    num_heads: int
    rank: int
    query_rank: int
    key_dim: int  # of a head's key without its rotated part
    rope_dim: int
    value_dim: int
    rope: RopeSpec
    scale: float
    bias: bool = False

    causal: ClassVar[bool] = True

    @property
    def page(self) -> PageShape:
        return PageShape(1, 1, self.rank + self.rope_dim)

    @property
    def rotary(self) -> tuple[RopeSpec, int]:
        return self.rope, self.rope_dim

    @property
    def memory(self) -> AttentionMemory:
        """Queries as projected, absorbed and complete; what the heads attend to, as latents and as values; the latent
        before and after its norm."""
        head = self.key_dim + 2 * self.rope_dim + 3 * self.rank + self.value_dim
        own = 2 * self.rank + self.rope_dim + 2 * self.query_rank
        return AttentionMemory(self.num_heads * head + own, self.rank + self.rope_dim)

    @property
    def tensor_split(self) -> TensorSplit:
        return TensorSplit(
            sizes=((self.num_heads, "{} attention heads"),),
            columns=((self.num_heads * self.value_dim, "output"),),
            cuts=_CUTS,
        )

    def shard(self, ranks: int, rank: int) -> "LatentSpec":
        return replace(self, num_heads=self.num_heads // ranks)


def latent_parameters(
    ours: str, theirs: str, spec: LatentSpec, hidden: int, *, divided: bool = False
) -> list[Parameter]:
    """The parameters of a layer's attention, by the names of DeepSeek's checkpoints. `divided`: what makes keys and
    what makes values are tensors of their own, as key_up and value_up are."""
    heads, nope, rope, rank, values = spec.num_heads, spec.key_dim, spec.rope_dim, spec.rank, spec.value_dim
    order, width = head_order(spec.rope, rope), nope + values
    low = spec.query_rank or hidden
    query = f"{theirs}{'q_b_proj' if spec.query_rank else 'q_proj'}.weight"
    firsts = [i * (nope + rope) for i in range(heads)]
    plain = [TensorSource(query, 0, nope, first) for first in firsts]
    turned = [TensorSource(query, 0, rope, first + nope, order=order) for first in firsts]
    parameters = [
        joined(f"{ours}query.weight", (low,), plain, (heads * nope,)),
        joined(f"{ours}query_rope.weight", (low,), turned, (heads * rope,)),
    ]
    if spec.query_rank:
        parameters.append(stacked(f"{ours}query_norm.weight", (), (f"{theirs}q_a_layernorm.weight", low)))
    kinds = ("weight", "bias") if spec.bias else ("weight",)
    for kind in kinds:
        columns, name = (hidden,) if kind == "weight" else (), f"{theirs}kv_a_proj_with_mqa.{kind}"
        key = TensorSource(name, 0, rope, rank, order=order)
        if spec.query_rank:
            parameters.append(stacked(f"{ours}query_down.{kind}", columns, (f"{theirs}q_a_proj.{kind}", low)))
        parameters.append(stacked(f"{ours}latent.{kind}", columns, (name, rank)))
        parameters.append(joined(f"{ours}key_rope.{kind}", columns, [key]))
        columns = (heads * values,) if kind == "weight" else ()
        parameters.append(stacked(f"{ours}output.{kind}", columns, (f"{theirs}o_proj.{kind}", hidden)))
    if divided:
        keys = [TensorSource(f"{theirs}k_b_proj.weight", 0, heads * rank)]
        value = [TensorSource(f"{theirs}v_b_proj.weight", 0, heads * values)]
    else:
        up = f"{theirs}kv_b_proj.weight"
        keys = [TensorSource(up, 0, rank, first_column=i * width, columns=nope, transposed=True) for i in range(heads)]
        value = [TensorSource(up, 0, values, i * width + nope) for i in range(heads)]
    return [
        *parameters,
        stacked(f"{ours}latent_norm.weight", (), (f"{theirs}kv_a_layernorm.weight", rank)),
        joined(f"{ours}key_up.weight", (nope,), keys, (heads * rank,)),
        joined(f"{ours}value_up.weight", (rank,), value, (heads * values,)),
    ]
