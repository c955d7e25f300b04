"""Kinds of attention that only this file knows run in a Decoder: latent, with a state, and an encoder's."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from penstock.config import EngineConfig, RankPlace, Split
from penstock.config.facts import PageShape
from penstock.config.memory import blocks_bytes, states_bytes
from penstock.families import ModelSpec, UnsupportedModel, model_facts, shard
from penstock.families.hf_config import HFConfig
from penstock.families.kinds.attention import AttentionMemory, GroupedQuerySpec, TensorSplit
from penstock.families.llama_like import decoder_spec, grouped_query_parameters, layer_spec
from penstock.families.registry import check_layers
from penstock.families.spec import Parameter, stacked
from penstock.kernels import AttentionBatch, Kernels, Platform
from penstock.kernels.attention import ReferenceAttention
from penstock.kernels.batch_arrays import BATCH_ROW, CONTEXT, FIRST, LENGTH
from penstock.messages import Window
from penstock.models import GroupInput, LayerCache, LayerParameters
from penstock.models.attention import ATTENTION_KINDS
from penstock.runtime.pages import KVPages
from tests.checkpoints import tiny_model
from tests.models.logits import kernels_on, logits_of, make_prompts

WIDTH = 24


@dataclass(frozen=True)
class ToySpec:
    """Heads that all read the same vector of each token, `value`; the page holds what the kind says."""

    page: PageShape
    causal: bool = True
    num_heads: int = 4
    rotary: ClassVar[None] = None
    memory: AttentionMemory = field(default_factory=AttentionMemory)

    @property
    def tensor_split(self) -> TensorSplit:
        cuts = {"query.weight": "rows", "value.weight": "whole", "output.weight": "columns"}
        return TensorSplit(((self.num_heads, "{} heads"),), ((self.num_heads * WIDTH, "output"),), cuts)

    def shard(self, ranks: int, rank: int) -> "ToySpec":
        return replace(self, num_heads=self.num_heads // ranks)


class LatentSpec(ToySpec): ...


class RecurrentSpec(ToySpec): ...


class EncoderSpec(ToySpec): ...


LATENT = LatentSpec(PageShape(1, 1, WIDTH))
RECURRENT = RecurrentSpec(PageShape(1, 1, WIDTH, state=True))
ENCODER = EncoderSpec(PageShape(1, 1, 0), causal=False)


def toy_parameters(ours: str, theirs: str, spec: Any, hidden: int) -> list[Parameter]:
    if isinstance(spec, GroupedQuerySpec):
        return grouped_query_parameters(ours, theirs, spec, hidden)
    width = spec.num_heads * WIDTH
    shapes = {"query": (width, hidden), "value": (WIDTH, hidden), "output": (hidden, width)}
    return [stacked(f"{ours}{n}.weight", (k,), (f"{theirs}{n}.weight", rows)) for n, (rows, k) in shapes.items()]


class Toy:
    """Executes a ToySpec in plain torch, sequence by sequence."""

    input_product = None

    def __init__(self, spec: ToySpec, parameters: LayerParameters, model: ModelSpec) -> None:
        self._heads = spec.num_heads
        self._query, self._value, self._output = map(parameters.matrix, ("query", "value", "output"))
        self.nbytes = self._query.nbytes + self._value.nbytes + self._output.nbytes

    def attend(self, kernels: Kernels, x: Tensor, rotation: None, group: GroupInput, cache: LayerCache) -> Tensor:
        query = self._query(x).view(-1, self._heads, WIDTH)
        value, (kept,) = self._value(x), cache.planes
        seen = self.read(value, kept if kept.dim() == 2 else kept[:, 0], group)
        return torch.cat([self.mix(q, s) for q, s in zip(query.split([len(s) for s in seen]), seen, strict=True)])

    def project(self, attended: Tensor, residual: Tensor | None = None) -> Tensor:
        return self._output(attended, residual)

    def mix(self, query: Tensor, seen: list[Tensor]) -> Tensor:
        """Softmax attention of each token's query over the vectors [context, WIDTH] that it sees."""
        rows = [((q @ each.T).softmax(-1) @ each).flatten() for q, each in zip(query, seen, strict=True)]
        return torch.stack(rows)

    def read(self, value: Tensor, pages: Tensor, group: GroupInput) -> list[list[Tensor]]:
        """What each token sees, per sequence."""
        raise NotImplementedError


class Latent(Toy):
    def read(self, value: Tensor, pages: Tensor, group: GroupInput) -> list[list[Tensor]]:
        pages[group.blocks, group.offsets] = value
        seen = []
        for _, count, context, table in sequences(group.attention):
            kept = pages[table].flatten(0, 1)
            seen.append([kept[: at + 1] for at in range(context - count, context)])
        return seen


class Recurrent(Toy):
    def read(self, value: Tensor, pages: Tensor, group: GroupInput) -> list[list[Tensor]]:
        seen = []
        for unit in group.attention.tolist():
            start, count, row = unit[FIRST], unit[LENGTH], unit[BATCH_ROW]
            state, states = torch.zeros(WIDTH) if unit[CONTEXT] == count else pages[row], []
            for each in value[start : start + count]:
                state = 0.9 * state + each
                states.append(state[None])
            pages[row] = state
            seen.append(states)
        return seen


class Encoder(Toy):
    def read(self, value: Tensor, pages: Tensor, group: GroupInput) -> list[list[Tensor]]:
        assert pages.numel() == 0
        return [[value[start : start + count]] * count for start, count, _, _ in sequences(group.attention)]


KINDS = {**ATTENTION_KINDS, LatentSpec: Latent, RecurrentSpec: Recurrent, EncoderSpec: Encoder}


def sequences(batch: AttentionBatch) -> list[tuple[int, int, int, Tensor]]:
    """(first row, tokens of the step, tokens in all, block table) of each."""
    lens = batch.query_start[:-1].tolist(), batch.query_lens.tolist(), batch.context_lens.tolist()
    return list(zip(*lens, torch.from_numpy(batch.block_tables), strict=True))


def toy_model(*kinds: ToySpec) -> ModelSpec:
    """A tiny Llama whose first layer is as it is, and then one of each kind."""
    config = HFConfig(
        tiny_model("llama3").config.to_dict() | {"num_hidden_layers": 1 + len(kinds), "num_key_value_heads": 2}
    )
    layer = layer_spec(config)
    layers = [layer, *(replace(layer, attention=kind) for kind in kinds)]
    return decoder_spec(config, "toy", layers, attention_parameters=toy_parameters)


def logits(spec: ModelSpec, prompts: list[list[int]], chunk: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    parameters = {p.name: torch.randn(p.shape, generator=generator) / 8 for p in spec.parameters}
    kernels = replace(kernels_on(Platform("cpu", "", True), spec), attention=ReferenceAttention())
    return logits_of(spec, parameters, kernels, prompts, chunk=chunk, kinds=KINDS)


@pytest.mark.parametrize("kinds", [(LATENT,), (RECURRENT,), (LATENT, RECURRENT, LATENT)])
def test_what_a_kind_keeps_in_pages_stands_for_earlier_tokens(kinds: tuple[ToySpec, ...]) -> None:
    spec, prompts = toy_model(*kinds), make_prompts()
    whole, chunked = logits(spec, prompts), logits(spec, prompts, chunk=7)
    for one, other in zip(whole, chunked, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-4)
    changed = [[(prompt[0] + 1) % 307, *prompt[1:]] for prompt in prompts]
    assert all((a[-1] != b[-1]).any() for a, b in zip(whole, logits(spec, changed), strict=True))


def test_an_encoder_sees_later_tokens_and_keeps_nothing() -> None:
    spec, prompts = toy_model(ENCODER), [[1, 2, 3], [5, 6, 7, 8]]
    changed = [[*prompt[:-1], 9] for prompt in prompts]
    assert all((a[0] != b[0]).any() for a, b in zip(logits(spec, prompts), logits(spec, changed), strict=True))
    assert KVPages(spec, (9, 9), 16, torch.float32).groups[1].numel() == 0
    with pytest.raises(UnsupportedModel, match="not causal"):
        check_layers(spec)


def test_layers_that_keep_different_things_are_different_groups() -> None:
    spec = toy_model(LATENT, RECURRENT, LATENT, ENCODER)
    assert spec.windows == (Window(),) * 3 and [layer.kv_group for layer in spec.layers] == [0, 1, 3, 1, 2]
    assert spec.state_layers == [2] and spec.state_width == WIDTH


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_memory_is_planned_as_it_is_allocated(dtype: torch.dtype) -> None:
    spec, blocks = toy_model(LATENT, RECURRENT, LATENT, ENCODER), (5, 6, 7)
    pages = KVPages(spec, blocks, 16, dtype, rows=3)
    config = EngineConfig(model="", name="", kv_cache_dtype="auto" if dtype == torch.bfloat16 else "int8")
    assert pages.bytes == blocks_bytes(model_facts(spec), config, blocks)
    assert pages.groups[1].shape[-2:] == (16, WIDTH if dtype == torch.bfloat16 else WIDTH + 4)
    assert pages.states.nbytes == states_bytes(model_facts(spec), 3) == 3 * WIDTH * 4


def test_ranks_divide_a_kind_as_it_says() -> None:
    spec = toy_model(LATENT)
    parts = [shard(spec, place) for place in Split(2).places]
    assert [part.layers[1].attention.num_heads for part in parts] == [2, 2]
    shapes = {p.name: p.shape for p in parts[1].parameters}
    hidden = spec.hidden_size
    assert shapes["layers.1.query.weight"] == (2 * WIDTH, hidden)
    assert shapes["layers.1.value.weight"] == (WIDTH, hidden)
    assert shapes["layers.1.output.weight"] == (hidden, 2 * WIDTH)
    assert parts[1].group_page(1) == spec.group_page(1)
    assert shard(spec, RankPlace()) == spec
