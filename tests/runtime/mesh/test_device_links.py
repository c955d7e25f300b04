"""Exchanges between ranks on devices, over gloo and over a fake NCCL. With `ordered`, sums are exact to the bit."""

import re
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store

from penstock.config import Split
from penstock.config.split import part
from penstock.runtime.mesh.device_links import ExchangeLimits
from penstock.runtime.mesh.mesh import Mesh, MeshError
from penstock.runtime.mesh.process_groups import BACKENDS
from tests.runtime.mesh.test_mesh import drawn, together

HERE = torch.device("cpu")


def limits_of(*, ordered: bool = True, dtype: torch.dtype = torch.float32, vocabulary: int = 307) -> ExchangeLimits:
    return ExchangeLimits(HERE, 40, 24, dtype, 16, vocabulary, ordered)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_in_rank_order_where_that_is_asked_for(dtype: torch.dtype) -> None:
    parts = [drawn(rank, 40, 24).to(dtype) for rank in range(3)]
    expected = parts[0] + parts[1] + parts[2]
    assert not torch.equal(expected, parts[2] + parts[1] + parts[0])

    def act(mesh: Mesh) -> list[Tensor]:
        sums = []
        for rows in (1, 40, 7):
            x = parts[mesh.place.rank][:rows].clone()
            mesh.sum(x)
            sums.append(x)
        return sums

    for sums in together(Split(3), act, limits=limits_of(dtype=dtype)):
        assert all(torch.equal(x, expected[: len(x)]) for x in sums)
    for sums in together(Split(3), act, limits=limits_of(dtype=dtype, ordered=False)):
        for x in sums:
            assert torch.allclose(x, expected[: len(x)], rtol=0, atol=1e-5 if dtype is torch.float32 else 0.1)


@pytest.mark.parametrize("vocabulary", [307, 4, 309])
def test_parts_of_a_vocabulary_come_together_on_the_first_rank(vocabulary: int) -> None:
    whole = drawn(0, 16, vocabulary)

    def act(mesh: Mesh) -> list[Tensor | None]:
        columns = part(vocabulary, 4, mesh.place.tensor_rank)
        return [mesh.gather(whole[:rows, columns.start : columns.stop].contiguous(), vocabulary) for rows in (3, 16, 1)]

    first, *others = together(Split(4), act, limits=limits_of(vocabulary=vocabulary))
    assert all(torch.equal(got, whole[: len(got)]) for got in first)
    assert others == [[None] * 3] * 3


def test_tokens_are_the_first_ranks_of_each_stage() -> None:
    def act(mesh: Mesh) -> Tensor:
        tokens = torch.full((3,), mesh.place.rank, dtype=torch.int64)
        mesh.broadcast(tokens)
        return tokens

    assert [got.tolist() for got in together(Split(2, 2), act, limits=limits_of())] == [
        [0] * 3,
        [0] * 3,
        [2] * 3,
        [2] * 3,
    ]
    alone, _ = together(Split(1, 2), act, limits=limits_of())
    assert alone.tolist() == [0] * 3
    for error in together(Split(2), act):
        assert isinstance(error, ValueError) and "ranks on CPUs get them with a plan" in str(error)


def test_all_know_the_least_that_any_has() -> None:
    def act(mesh: Mesh) -> list[int]:
        return [mesh.minimum("blocks", 7 - mesh.place.rank), mesh.minimum("others", mesh.place.rank)]

    assert together(Split(2, 2), act, limits=limits_of()) == [[4, 0]] * 4


def test_hidden_states_go_down_the_pipeline() -> None:
    """Senders may overwrite messages that are not received yet, and be as many messages ahead as there are stages."""

    def act(mesh: Mesh) -> list[float]:
        x, got = torch.zeros(40, 24), []
        for step in range(5):
            rows = x[: 1 + 13 * step % 40]
            if mesh.place.first:
                rows.fill_(step)
            else:
                mesh.receive(rows)
            if not mesh.place.last:
                mesh.send(rows)
            got.append(float(rows.mean()))
            rows.fill_(-1.0)
        return got

    assert together(Split(1, 3), act, limits=limits_of()) == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 3


@pytest.mark.parametrize("what", ["sum", "broadcast"])
def test_who_waits_in_vain_over_gloo_says_for_whom(what: str) -> None:
    given_up = threading.Event()

    def act(mesh: Mesh) -> Any:
        if mesh.place.rank:
            given_up.wait()
            return
        try:
            getattr(mesh, what)(torch.ones(3, 5))
        finally:
            given_up.set()

    error, _ = together(Split(2), act, limits=limits_of(), timeout=0.5)
    assert isinstance(error, MeshError)
    assert re.match(
        rf"rank 0 \(stage 0, tensor rank 0\): {what} of 3 x 5 numbers with rank 1 failed after ", str(error)
    )


class Nccl:
    """Replaces torch's ProcessGroupNCCL. Like NCCL, its work has a `wait` without a timeout; gloo does the exchange."""

    class Options:
        _timeout = timedelta()

    def __init__(self, store: Store, rank: int, size: int, options: Options) -> None:
        assert options._timeout == timedelta(seconds=1800)
        self._group: ProcessGroupGloo = BACKENDS["gloo"].join(store, rank, size, "127.0.0.1", 60.0, 60.0)

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._group, name)

        def launch(*arguments: Any) -> Any:
            if name not in ("send", "recv"):
                assert arguments[-1].asyncOp is False  # else it would not go to the current stream
            work = operation(*arguments)
            return SimpleNamespace(wait=lambda: work.wait())  # takes no timeout: with one, NCCL would block the host

        return launch


def test_over_nccl_the_host_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.ProcessGroupNCCL", Nccl, raising=False)
    whole = drawn(0, 3, 307)

    def act(mesh: Mesh) -> tuple[Tensor, Tensor | None, list[int]]:
        place, x = mesh.place, torch.ones(2, 24)
        if not place.first:
            mesh.receive(x)
        mesh.sum(x)
        for _ in range(3 if not place.last else 0):  # more than may be on their way at once
            mesh.send(x)
        for _ in range(2 if place.last else 0):
            mesh.receive(x)
        columns = part(307, 2, place.tensor_rank)
        tokens = torch.full((2,), 5 + place.rank)
        mesh.broadcast(tokens)
        return x, mesh.gather(whole[:, columns.start : columns.stop].contiguous(), 307), tokens.tolist()

    for ordered in (False, True):
        given = together(Split(2, 2), act, backend="nccl", limits=limits_of(ordered=ordered))
        for rank, (x, logits, tokens) in enumerate(given):
            assert (x == 2.0).all() and tokens == [5 + rank // 2 * 2] * 2
            assert logits is None if rank % 2 else torch.equal(logits, whole)
