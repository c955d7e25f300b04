"""Tensor ranks add up to the whole model, and pipeline stages continue each other, in every family."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config import RankPlace, Split
from penstock.families import ModelSpec, load_spec, shard
from penstock.families.shard import CannotSplit, tensor_sizes
from penstock.kernels import Kernels, Platform
from penstock.models import Decoder, Hidden, LayerCache, StepInput
from penstock.weights.load import load_parameters
from tests.checkpoints import DIVISIBLE
from tests.models.logits import Checkpoint, kernels_on, logits_of, make_prompts
from tests.often import often

TORCH = Platform("cpu", "AVX2")  # the native kernels' session belongs to one thread
# Between them they have what the others have: run by `make test`.
FEW = ("gemma2", "gpt2", "gpt_neox", "falcon_grouped", "cohere2", "granite", "qwen2_moe", "gpt_oss", "deepseek_v3")
FAMILIES = often(DIVISIBLE, FEW)


class Together:
    """Connects ranks that are threads of this process."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._parts: list[Tensor] = [torch.empty(0)] * ranks

    def all(self, rank: int, x: Tensor) -> list[Tensor]:
        """The parts of all ranks, in order."""
        self._parts[rank] = x.clone()
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()
        return parts


class Rank:
    """Provides Collectives for one of them."""

    def __init__(self, together: Together, rank: int) -> None:
        self._together, self._rank = together, rank

    def sum(self, x: Tensor) -> None:
        x.copy_(torch.stack(self._together.all(self._rank, x)).sum(0))

    def gather(self, x: Tensor, total: int) -> Tensor | None:
        parts = self._together.all(self._rank, x)
        return torch.cat(parts, 1) if self._rank == 0 else None


def loaded(folder: Path, spec: ModelSpec) -> dict[str, Any]:
    return load_parameters(folder, spec, torch.float32, whole=load_spec(folder), progress=False)


@pytest.mark.parametrize("variant", FAMILIES)
def test_tensor_ranks_add_up(variant: str, tiny_checkpoint: Checkpoint) -> None:
    folder, prompts = tiny_checkpoint(variant), make_prompts()[3:6]
    whole, split = load_spec(folder), Split(2)
    if 2 not in tensor_sizes(whole):
        pytest.skip("it cannot be divided by 2")
    together = Together(2)

    def run(place: RankPlace) -> list[Tensor]:
        spec = shard(whole, place)
        make = partial(Decoder, collectives=Rank(together, place.rank))
        return logits_of(spec, loaded(folder, spec), kernels_on(TORCH, spec), prompts, chunk=7, make=make)

    with ThreadPoolExecutor(2) as pool:
        got, nothing = pool.map(run, split.places)
    assert nothing == []
    compare(got, logits_of(whole, loaded(folder, whole), kernels_on(TORCH, whole), prompts))


class Stages:
    """A decoder of two stages, one after the other."""

    def __init__(self, folder: Path, spec: ModelSpec, _: Any, kernels: Kernels, **options: Any) -> None:
        specs = [shard(spec, place) for place in Split(1, 2).places]
        self._first, self._second = (Decoder(each, loaded(folder, each), kernels, **options) for each in specs)
        self._border = len(specs[0].layers)
        self.logits = self._second.logits

    def forward(self, step: StepInput, caches: Sequence[LayerCache]) -> Hidden:
        hidden = self._first.forward(step, caches[: self._border])
        return self._second.forward(replace(step, hidden=hidden.states), caches[self._border :])


@pytest.mark.parametrize("variant", FAMILIES)
def test_pipeline_stages_continue_each_other(variant: str, tiny_checkpoint: Checkpoint) -> None:
    folder, prompts = tiny_checkpoint(variant), make_prompts()[3:6]
    spec = load_spec(folder)
    if spec.whole_stages:
        with pytest.raises(CannotSplit, match="--pipeline-parallel-size is 2"):
            shard(spec, Split(1, 2).places[0])
        return
    run: Callable[..., list[Tensor]] = partial(logits_of, spec, kernels=kernels_on(TORCH, spec), prompts=prompts)
    staged = run({}, make=partial(Stages, folder))
    compare(staged, run(loaded(folder, spec)))


def compare(got: list[Tensor], want: list[Tensor]) -> None:
    for ours, right in zip(got, want, strict=True):
        torch.testing.assert_close(ours, right, rtol=0.0, atol=1e-4)
