"""A pipeline as a model: see `penstock.repository.pipelines.graph`."""

import time

from penstock.messages.tensors import InferRequest, InferResult, LoadFailed
from penstock.repository.entry import Target
from penstock.repository.oneshot import Emit, OneShotModel, spec_of
from penstock.repository.pipelines.graph import Graph
from penstock.repository.pipelines.nodes import Find, PipelineCall, check_alike
from penstock.repository.statistics import ModelStatistics
from penstock.schedule.batcher import Batcher


class PipelineRunner:
    """See `penstock.repository.oneshot.Runner`. The graph runs in the server, its models where they are."""

    note, size, streams = "", 0, True
    batcher: Batcher | None = None

    def __init__(
        self, graph: Graph, inputs: frozenset[str], outputs: tuple[str, ...], statistics: ModelStatistics
    ) -> None:
        self._graph, self._inputs, self._outputs, self._statistics = graph, inputs, outputs, statistics

    async def run(self, request: InferRequest, rows: int, emit: Emit | None = None) -> InferResult:
        began = time.monotonic()
        tensors = {tensor.name: tensor for tensor in request.inputs}
        wanted = request.outputs or self._outputs
        call = PipelineCall(request, self._inputs - tensors.keys(), wanted, emit)
        await self._graph.run(tensors, call, wanted)
        took = time.monotonic() - began
        self._statistics.batch(rows, 1, (0, int(took * 1e9), 0))
        self._statistics.request(took, 0.0)
        return InferResult(outputs=[tensors[name] for name in wanted])

    async def close(self) -> None:
        """Nothing: it has no memory of its own."""


def load_pipeline(target: Target, find: Find) -> OneShotModel:
    """Returns a pipeline whose graph is valid: names, datatypes, shapes, circles, members. Raises LoadFailed."""
    settings, rows = target.settings, target.settings.max_batch_size or 0
    inputs, outputs = ([spec_of(each, rows) for each in specs] for specs in (settings.inputs, settings.outputs))
    if not settings.steps:
        raise LoadFailed("a pipeline needs steps")
    graph = Graph(settings.steps, find, has_rows=bool(rows))
    given = {spec.name: spec for spec in inputs}
    there = given | graph.check(given)
    for spec in outputs:
        if spec.name not in there:
            raise LoadFailed(f"output {spec.name!r} is made by no step")
        check_alike(f"output {spec.name!r}", spec, there[spec.name])
    statistics = ModelStatistics()
    runner = PipelineRunner(graph, frozenset(given), tuple(spec.name for spec in outputs), statistics)
    return OneShotModel(target, inputs, outputs, rows, runner, statistics)
