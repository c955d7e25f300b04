"""Modules of torch with our products: what they compute, what they still answer, and what stays as it is."""

import pytest
import torch
from torch import nn

from penstock.kernels import Needs, detect_platform, select_kernels
from penstock.models.packed_modules import ModulePacking, PackedEmbedding, PackedLinear


class _Scaled(nn.Embedding):
    """An embedding that computes something else."""


class _Small(nn.Module):
    def __init__(self, embedding: nn.Embedding, *, tied: bool) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers = nn.ModuleList([nn.Linear(48, 37), nn.Linear(37, 48, bias=False)])
        self.head = nn.Linear(48, 101, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_model_computes_the_same(tied: bool) -> None:
    torch.manual_seed(0)
    model = _Small(nn.Embedding(101, 48), tied=tied)
    ids = torch.randint(101, (2, 5))
    kernels = select_kernels(detect_platform("cpu"), Needs(torch.float32, 16, (16,)))
    with torch.inference_mode():
        expected, weights = model(ids), [layer.weight.clone() for layer in (*model.layers, model.head)]
        nbytes = ModulePacking(model).pack(kernels)
        assert torch.allclose(model(ids), expected, atol=1e-5)
        for layer, weight in zip((*model.layers, model.head), weights, strict=True):
            assert torch.allclose(layer.weight, weight, atol=1e-6)  # for code that multiplies by itself
    assert isinstance(model.head, PackedLinear)
    assert isinstance(model.embedding, PackedEmbedding) is tied
    assert nbytes >= sum(weight.nbytes for weight in weights)
    assert sum(each.numel() for each in model.parameters()) == (0 if tied else 101 * 48)


def test_weights_that_something_else_reads_stay() -> None:
    model = _Small(_Scaled(101, 48), tied=True)
    ModulePacking(model).pack(select_kernels(detect_platform("cpu"), Needs(torch.float32, 16, (16,))))
    assert type(model.head) is nn.Linear
    assert type(model.embedding) is _Scaled
