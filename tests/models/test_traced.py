"""A decoder of torch's modules whose ops are read from a trace: what is recognised, and what must not be."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.arcee import modeling_arcee

from penstock.kernels import detect_platform
from penstock.models import transformers_decoder
from penstock.models.traced.body import TracedBody
from penstock.models.traced.graph import AttentionNode, MlpNode, Node, NormNode, ProductNode, RowsNode, SumNode
from penstock.models.traced.rotary import Rotary, rotations_of, without_rotation
from tests.checkpoints import SIZES
from tests.models.other_models import write_other
from tests.models.serving import make_runner

TOKENS, HEAD_DIM = 7, 16

needs_native = pytest.mark.skipif(not detect_platform().isa, reason="no native kernels for this machine")


def recordable(folder: Path) -> bool:
    return make_runner(folder).model.recordable


@needs_native
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        # Each product after attention, and each MLP, adds the residual.
        ("Arcee", {RowsNode: 1, NormNode: 7, AttentionNode: 3, ProductNode: 3, MlpNode: 3}),
        ("Phi", {RowsNode: 1, NormNode: 4, AttentionNode: 3, ProductNode: 3, MlpNode: 3}),
        # A norm lies between each product and the residual.
        ("Exaone4", {RowsNode: 1, NormNode: 9, AttentionNode: 4, ProductNode: 4, MlpNode: 4, SumNode: 8}),
    ],
)
def test_the_ops_of_a_model(
    name: str, counts: dict[type, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: Counter[type] = Counter()
    op = TracedBody._op

    def counted(self: TracedBody, model: nn.Module, node: Node) -> Any:
        found[type(node)] += 1
        return op(self, model, node)

    monkeypatch.setattr(TracedBody, "_op", counted)
    make_runner(write_other(name, tmp_path))
    assert {kind: found[kind] for kind in (RowsNode, NormNode, AttentionNode, ProductNode, MlpNode, SumNode)} == {
        SumNode: 0,
        **counts,
    }


def clamped(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return query.clamp(-1e6, 1e6), key


def changed_in_place(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return query, key.mul_(1.0)


def chosen_by_values(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return (query * 2, key) if query.max() > 1e6 else (query, key)


def of_another_token(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return query, torch.cat((key[:, :, 1:], key[:, :, :1]), 2)


def scaled(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return query * 1.01, key


@needs_native
@pytest.mark.parametrize("change", [clamped, changed_in_place, chosen_by_values, of_another_token, scaled])
def test_what_our_ops_do_not_compute(
    change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the numbers of the trace would be the same."""
    folder = write_other("Arcee", tmp_path)
    assert recordable(folder)
    rotated = modeling_arcee.apply_rotary_pos_emb

    def changed(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return change(*rotated(*arguments, **options))

    monkeypatch.setattr(modeling_arcee, "apply_rotary_pos_emb", changed)
    assert not recordable(folder)


@needs_native
def test_a_weight_that_cannot_be_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found before projections are packed, so all bytes are counted."""
    load = transformers_decoder._load
    held: list[int] = []

    def sharing(*arguments: Any) -> Any:
        model = load(*arguments)
        first, second, *_ = model.model.layers
        second.mlp.down_proj.weight = first.mlp.down_proj.weight
        held.append(sum(weight.nbytes for weight in model.parameters()))
        return model

    monkeypatch.setattr(transformers_decoder, "_load", sharing)
    model = make_runner(write_other("Arcee", tmp_path)).model
    assert isinstance(model, transformers_decoder.TransformersDecoder)
    assert not model.recordable
    assert model.nbytes >= held[0]


@needs_native
@pytest.mark.parametrize("tied", [False, True])
def test_unpacked_weights_are_freed(tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = transformers_decoder._load
    weights: list[weakref.ref[Tensor]] = []

    def watched(*arguments: Any) -> Any:
        model = load(*arguments)
        weights.extend(weakref.ref(weight) for weight in model.parameters() if weight.dim() == 2)
        return model

    monkeypatch.setattr(transformers_decoder, "_load", watched)
    monkeypatch.setitem(SIZES, "tie_word_embeddings", tied)
    folder = write_other("Arcee", tmp_path)
    gc.disable()  # as while an engine starts
    try:
        runner = make_runner(folder)
    finally:
        gc.enable()
    assert runner.model.recordable
    assert len(weights) == 19 + (not tied)
    assert not [weight for weight in weights if weight() is not None]


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)


@pytest.mark.parametrize("turn", [halves, neighbours])
@pytest.mark.parametrize("dims", [HEAD_DIM, 4])
def test_rotations_are_found(turn: Callable[[Tensor, Tensor, Tensor], Tensor], dims: int) -> None:
    model = nn.Module()
    model.attention_scaling = 1.25  # type: ignore[assignment]
    model.register_buffer("inv_freq", 100.0 ** -(torch.arange(0, dims, 2) / dims))
    model.register_buffer("other", torch.rand(dims // 2))
    positions, x = torch.tensor([400, 0, 3, 1, 2, 70, 9]), torch.randn(TOKENS, 3, HEAD_DIM)
    angles = positions[:, None, None] * model.get_buffer("inv_freq")
    turned = turn(x[..., :dims], 1.25 * angles.cos(), 1.25 * angles.sin())
    after = torch.cat((turned, x[..., dims:]), -1)

    def found(before: Tensor, after: Tensor) -> list[Rotary]:
        return [each for each in rotations_of(model, HEAD_DIM) if each.explains(before, after, positions)]

    (rotary,) = found(x, after)
    assert sorted(rotary.order.tolist()) == list(range(HEAD_DIM))
    assert rotary.frequencies.shape == (2, HEAD_DIM // 2)
    assert found(x, after.roll(1, 0)) == found(x, after * 1.001) == []
    assert found(x, x)[0].frequencies.equal(without_rotation(HEAD_DIM).frequencies)
