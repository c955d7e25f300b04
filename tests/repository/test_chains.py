"""Models of a pipeline that run as one batch: what they answer, what is counted, and when they run apart."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="pip install 'penstock[onnx]'")

from penstock.messages import RequestRejected
from penstock.messages.arrays import read_array, tensor_of
from penstock.messages.tensors import InferRequest
from penstock.repository import batching
from penstock.repository.backend.process import ModelProcess
from penstock.repository.entry import Folder
from penstock.repository.oneshot import OneShotModel
from penstock.repository.service import Repository
from tests.repository.onnx_files import INT64, gather, identity, put, scale

SCALES = """
max-batch-size: 8
inputs: [{name: x, datatype: FP32, dims: [4]}]
outputs: [{name: y, datatype: FP32, dims: [4]}]
steps:
  - {model: one, inputs: {x: x}, outputs: {y: a}}
  - {model: two, inputs: {x: a}, outputs: {y: b}}
  - {model: three, inputs: {x: b}, outputs: {y: y}}
"""
TABLE = """
max-batch-size: 8
inputs: [{name: x, datatype: INT64, dims: [1]}]
outputs: [{name: y, datatype: FP32, dims: [1, 2]}]
steps:
  - {model: same, inputs: {x: x}, outputs: {y: place}}
  - {model: table, inputs: {x: place}, outputs: {y: y}}
"""


class Served:
    """A repository, and the orders that its process has got: how many models ran in each."""

    def __init__(self, repository: Repository, orders: list[int]) -> None:
        self._repository, self.orders = repository, orders

    def model(self, name: str) -> OneShotModel:
        found = self._repository.find(name)
        assert isinstance(found, OneShotModel)
        return found

    async def ask(self, name: str, value: Any, kind: str = "FP32") -> Any:
        result = await self.model(name).infer(InferRequest(inputs=[tensor_of("x", kind, np.array(value))]))
        (made,) = result.outputs
        return read_array(made.data, made.datatype, made.shape)

    def counted(self, name: str) -> tuple[int, int]:
        statistics = self.model(name).statistics_of
        return statistics.inferences, statistics.durations["success"].count


@asynccontextmanager
async def served(root: Path, monkeypatch: pytest.MonkeyPatch, **settings: str) -> AsyncIterator[Served]:
    """All of the models above. `settings` are those of a model."""
    for name, factor in (("one", 2.0), ("two", 3.0), ("three", 5.0)):
        put(root, name, scale(factor), settings=settings.get(name))
    put(root, "same", identity(INT64, ("n", 1)))
    put(root, "table", gather())
    for name, text in (("chain", SCALES), ("lookup", TABLE)):
        (root / name).mkdir()
        (root / name / "model.yaml").write_text(text)
    orders: list[int] = []
    submit = ModelProcess.submit

    def counted(self: ModelProcess, order: Any, *rest: Any) -> None:
        orders.append(1 + len(order.then))
        submit(self, order, *rest)

    monkeypatch.setattr(ModelProcess, "submit", counted)
    monkeypatch.setattr(batching, "LONG_NS", 10**12)  # a busy machine takes long for short runs
    repository = Repository(Folder(root))
    try:
        await repository.load("chain")
        await repository.load("lookup")
        yield Served(repository, orders)
    finally:
        await repository.close()


def row(value: float) -> Any:
    return np.full((1, 4), value, np.float32)


def test_short_models_in_a_row_run_as_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> None:
        async with served(tmp_path, monkeypatch) as there:
            assert (await there.ask("chain", row(1.0))).tolist() == [[30.0] * 4]  # how long they take is not known yet
            assert there.orders == [1, 1, 1]
            found = await asyncio.gather(*(there.ask("chain", row(value)) for value in range(6)))
            assert [array[0, 0] for array in found] == [30.0 * value for value in range(6)]
            assert there.orders[3:] == [3]
            assert [there.counted(name) for name in ("one", "two", "three")] == [(7, 7)] * 3
            assert (await there.ask("two", row(1.0))).tolist() == [[3.0] * 4]  # nothing holds it
            batches = there.model("two").statistics_of.batches
            assert {rows: infer.count for rows, (_, infer, _) in batches.items()} == {1: 2, 6: 1}

    asyncio.run(ask())


def test_a_request_waits_for_a_model_that_others_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> None:
        async with served(tmp_path, monkeypatch) as there:
            await there.ask("chain", row(1.0))
            batches = there.model("two").batches
            assert batches is not None
            held = batches.batcher.follow(1)
            mixed = [there.ask("chain", row(2.0)), there.ask("two", row(5.0))]
            waiting = asyncio.gather(*mixed)
            while batches.batcher.waiting < 2:
                await asyncio.sleep(0.01)
            batches.batcher.apply(held)
            batches.pump()
            chained, direct = await waiting
            assert chained[0, 0] == 60.0 and direct[0, 0] == 15.0
            assert there.orders[3:] == [1, 1, 1]  # the request to the chain and the other one shared a batch of `two`
            await there.ask("chain", row(1.0))
            assert there.orders[6:] == [3]

    asyncio.run(ask())


def test_long_runs_leave_models_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> None:
        async with served(tmp_path, monkeypatch) as there:
            monkeypatch.setattr(batching, "LONG_NS", 0)
            for _ in range(2):
                await there.ask("chain", row(1.0))
            assert there.orders == [1] * 6

    asyncio.run(ask())


@pytest.mark.parametrize(
    "settings", ["cache: true", "batching: {keep-order: true}", "rate-limiter: {resources: {m: 1}}"]
)
def test_models_with_rules_of_their_own_run_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str
) -> None:
    async def ask() -> None:
        async with served(tmp_path, monkeypatch, three=settings) as there:
            for value in (1.0, 2.0):
                assert (await there.ask("chain", row(value)))[0, 0] == 30.0 * value
            assert there.orders == [1, 1, 1, 2, 1]

    asyncio.run(ask())


def test_only_the_request_that_fails_gets_an_error_which_names_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> None:
        async with served(tmp_path, monkeypatch) as there:
            await there.ask("lookup", [[1]], "INT64")
            both = [there.ask("lookup", [[place]], "INT64") for place in (2, 9)]
            good, bad = await asyncio.gather(*both, return_exceptions=True)
            assert good.tolist() == [[[4.0, 5.0]]]
            assert isinstance(bad, RequestRejected) and "'table'" in str(bad)
            assert there.orders[2] == 2  # both, as one batch
            assert (await there.ask("lookup", [[3]], "INT64")).tolist() == [[[6.0, 7.0]]]
            assert there.orders[-1] == 2

    asyncio.run(ask())
