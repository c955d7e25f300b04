"""Exchanges between ranks on CPUs: exact to the bit, counted in bytes, and with an error when a rank is missing."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config import RankPlace, Split
from penstock.config.split import part
from penstock.runtime.mesh.mesh import Mesh, MeshError, Traffic
from tests.ports import free_port


def together(split: Split, act: Callable[[Mesh], Any], **settings: Any) -> list[Any]:
    """Returns what `act` returns or raises on each rank. Ranks are threads: a mesh has no process-wide state."""
    rendezvous, given, meshes = f"127.0.0.1:{free_port()}", [None] * split.world, []
    met = threading.Barrier(split.world, timeout=600.0)

    def be(place: RankPlace) -> None:
        try:
            mesh = Mesh(place, rendezvous, message_bytes=256, **settings)
            meshes.append(mesh)  # keeps every mesh open until all ranks are done
            met.wait()
            given[place.rank] = act(mesh)
        except Exception as error:
            given[place.rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=be, args=(place,)) for place in split.places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return given


@pytest.fixture(params=["memory", "gloo"])
def link(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which kind of link ranks use."""
    if request.param == "gloo":
        monkeypatch.setattr("penstock.runtime.mesh.mesh.open_shared_memory", lambda *_: None)
    return str(request.param)


def drawn(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_in_rank_order_for_any_number_of_rows(dtype: torch.dtype, link: str) -> None:
    """A sum of 640 rows or more takes several exchanges."""
    ranks, width, most = 3, 203, 700

    def act(mesh: Mesh) -> list[Tensor]:
        sums = []
        for rows in (1, 5, most, 2):
            x = drawn(mesh.place.rank, most, width).to(dtype)[:rows].clone()
            mesh.sum(x)
            sums.append(x)
        assert mesh.traffic == Traffic(sum=(1 + 5 + most + 2) * width * dtype.itemsize)
        return sums

    parts = [drawn(rank, most, width).to(dtype) for rank in range(ranks)]
    expected = parts[0] + parts[1] + parts[2]
    other = parts[2] + parts[1] + parts[0]
    assert not torch.equal(expected, other)  # the order matters
    for sums in together(Split(ranks), act):
        for x in sums:
            assert torch.equal(x, expected[: len(x)])


@pytest.mark.parametrize(("rows", "vocabulary"), [(3, 307), (1, 4), (11, 1_000_003)])
def test_parts_of_a_vocabulary_come_together_on_the_first_rank(rows: int, vocabulary: int, link: str) -> None:
    """With a vocabulary of a million tokens, two rows fit into an exchange."""
    whole = drawn(0, rows, vocabulary)

    def act(mesh: Mesh) -> tuple[Tensor | None, int]:
        columns = part(vocabulary, 4, mesh.place.tensor_rank)
        got = mesh.gather(whole[:, columns.start : columns.stop].contiguous(), vocabulary)
        return got, mesh.traffic.gather

    first, *others = together(Split(4), act)
    assert torch.equal(first[0], whole) and first[1] == 0
    assert others == [(None, rows * len(part(vocabulary, 4, rank)) * 4) for rank in (1, 2, 3)]


def test_hidden_states_go_down_the_pipeline_in_order(link: str) -> None:
    """Each tensor rank has its own link to the next stage. A sender may overwrite messages not received yet."""
    steps, split = 7, Split(2, 3)

    def act(mesh: Mesh) -> list[Tensor]:
        place, x, got = mesh.place, torch.empty(4, 8), []
        for step in range(steps):
            rows = x[: 1 + step % 4]
            if place.first:
                rows.fill_(10.0 * step + place.tensor_rank)
            else:
                mesh.receive(rows)
            if not place.last:
                mesh.send(rows)
            got.append(rows.clone())
            rows.fill_(-1.0)
        return got

    for rank, got in enumerate(together(split, act)):
        for step, rows in enumerate(got):
            assert torch.equal(rows, torch.full((1 + step % 4, 8), 10.0 * step + rank % 2))


@pytest.mark.parametrize(
    ("split", "act", "says"),
    [
        (Split(2), lambda mesh: mesh.sum(torch.ones(3, 5)), "sum of 3 x 5 numbers with rank 1 failed after "),
        (Split(2), lambda mesh: mesh.gather(torch.ones(1, 4), 8), "gather of 1 x 4 numbers with rank 1 failed after "),
        (Split(1, 2), lambda mesh: mesh.receive(torch.ones(2, 2)), "receive of 2 x 2 numbers with rank 0 failed after"),
    ],
    ids=["sum", "gather", "receive"],
)
@pytest.mark.parametrize("leaves", [False, True])
def test_who_waits_in_vain_says_for_whom(
    split: Split, act: Callable[[Mesh], Any], says: str, leaves: bool, link: str
) -> None:
    """The error is the same for a rank that does nothing and for one that has ended."""
    waits, given_up = 1 if split.pipeline > 1 else 0, threading.Event()

    def wait(mesh: Mesh) -> None:
        if mesh.place.rank == waits:
            try:
                act(mesh)
            finally:
                given_up.set()
        elif leaves:
            mesh.close()
        else:
            given_up.wait()

    error = together(split, wait, timeout=0.5)[waits]
    assert isinstance(error, MeshError)
    assert str(error).startswith(f"rank {waits} (stage {waits}, tensor rank 0): {says}")


def test_a_stage_that_takes_nothing(link: str) -> None:
    """As many messages as stages may be unreceived: the first two sends do not block."""
    sent, given_up = [], threading.Event()

    def act(mesh: Mesh) -> None:
        if not mesh.place.first:
            given_up.wait()
            return
        try:
            for step in range(3):
                mesh.send(torch.ones(2, 2))
                sent.append(step)
        finally:
            given_up.set()

    error, _ = together(Split(1, 2), act, timeout=0.5)
    assert isinstance(error, MeshError) and "send of 2 x 2 numbers with rank 1 failed after " in str(error)
    assert sent == [0, 1]


def test_a_rank_that_never_comes() -> None:
    rendezvous = f"127.0.0.1:{free_port()}"
    with pytest.raises(MeshError, match=r"^rank 0 \(stage 0, tensor rank 0\) did not connect to all of 2 ranks at 127"):
        Mesh(RankPlace(Split(2), 0), rendezvous, message_bytes=0, start_timeout=1.0)


@pytest.mark.parametrize("rendezvous", ["", "127.0.0.1", "29500", "127.0.0.1:http"])
def test_an_address_that_is_none(rendezvous: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        Mesh(RankPlace(Split(2), 0), rendezvous, message_bytes=0)


def test_an_unknown_backend() -> None:
    with pytest.raises(ValueError, match="no backend 'mpi': use gloo"):
        Mesh(RankPlace(Split(2), 0), "127.0.0.1:1", message_bytes=0, backend="mpi")
