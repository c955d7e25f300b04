"""Compares two versions of a one-shot model: each request that one has answered runs on the other one too."""

import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any

from penstock.messages import DeadlineExceeded, QueueFull
from penstock.messages.arrays import read_array
from penstock.messages.tensors import InferRequest, InferResult, Tensor, TensorModel, TensorSpec
from penstock.repository.rollouts.decision import EQUAL
from penstock.repository.rollouts.judging import WITH_LABELS, WITHOUT_LABELS, LabelledJudges, Pair, VersionOutcome
from penstock.repository.rollouts.rollout import Rollout

MAX_UNLABELLED = 10_000  # pairs that wait for a label
MAX_UNLABELLED_BYTES = 64 << 20


class TensorComparison:
    """See Comparison. Used from one event loop."""

    def __init__(self, rollout: Rollout, incumbent: TensorModel, candidate: TensorModel) -> None:
        self._rollout = rollout
        self._arms = _Arm(incumbent, self), _Arm(candidate, self)
        self._labelled = LabelledJudges()
        self._pairs: OrderedDict[str, tuple[Pair, int]] = OrderedDict()  # by id of the request, with their bytes
        self._bytes = 0

    def arm(self, candidate: bool) -> TensorModel:
        return self._arms[candidate]

    def end(self, *, promoted: bool) -> None:
        """See Comparison. The repository finds the version that serves."""

    def label(self, request_id: str, label: Any) -> bool:
        """Judges a pair by what has turned out to be right. Returns False if the pair is not there: the request is not
        known, too old, or was not compared. Raises RequestRejected for a label that does not fit."""
        found = self._pairs.get(request_id)
        if found is None:
            return False
        judges = self._rollout.judges & set(WITH_LABELS)
        for judge, value in [(judge, self._labelled.difference(judge, found[0], label)) for judge in judges]:
            self._rollout.add(judge, value)
        self._forget(request_id)
        self._rollout.look()
        return True

    def compare(self, arm: "_Arm", request: InferRequest, outcome: VersionOutcome) -> None:
        """Runs a request that `arm` has answered on the other version too, unless enough copies run."""
        self._rollout.copy(partial(self._compare, arm, request, outcome))

    async def _compare(self, arm: "_Arm", request: InferRequest, first: VersionOutcome) -> None:
        is_candidate = arm is self._arms[1]
        try:
            second, _ = await self._arms[not is_candidate].run(request)
        except (QueueFull, DeadlineExceeded):
            return  # users come first
        pair = Pair(second, first) if is_candidate else Pair(first, second)
        for judge in self._rollout.judges & WITHOUT_LABELS.keys():
            if judge != "latency" or self._rollout.record.share == EQUAL:
                self._rollout.add(judge, WITHOUT_LABELS[judge](pair))
        if request.id and self._rollout.judges & set(WITH_LABELS):
            self._keep(request.id, pair)
        await self._rollout.ask(lambda: {"request": _values(request.inputs), **_told(pair)})
        self._rollout.look()

    def _keep(self, request_id: str, pair: Pair) -> None:
        self._forget(request_id)  # an id may come twice
        size = sum(len(tensor.data) for outcome in pair for tensor in outcome.outputs)
        self._pairs[request_id] = pair, size
        self._bytes += size
        while len(self._pairs) > MAX_UNLABELLED or self._bytes > MAX_UNLABELLED_BYTES:
            self._forget(next(iter(self._pairs)))

    def _forget(self, request_id: str) -> None:
        _, size = self._pairs.pop(request_id, (None, 0))
        self._bytes -= size


class _Arm:
    """One of the two versions. See `penstock.messages.tensors.TensorModel`."""

    def __init__(self, model: TensorModel, comparison: TensorComparison) -> None:
        self._model, self._comparison = model, comparison
        self.name, self.version, self.streams = model.name, model.version, model.streams
        self.inputs: Sequence[TensorSpec] = model.inputs
        self.outputs: Sequence[TensorSpec] = model.outputs
        self.labels: Mapping[str, Sequence[str]] = model.labels
        self.metadata, self.config, self.statistics = model.metadata, model.config, model.statistics

    async def infer(self, request: InferRequest) -> InferResult:
        """See TensorModel. The answer is compared with the other version's after it was given."""
        outcome, error = await self.run(request)
        self._comparison.compare(self, request, outcome)
        if error is not None:
            raise error
        return InferResult(outputs=list(outcome.outputs))

    def stream(self, request: InferRequest) -> AsyncGenerator[InferResult, None]:
        """See TensorModel. Streams are not compared."""
        return self._model.stream(request)

    async def run(self, request: InferRequest) -> tuple[VersionOutcome, Exception | None]:
        """Returns what the version makes of a request. Raises QueueFull and DeadlineExceeded, which tell nothing."""
        began = time.monotonic()
        try:
            result = await self._model.infer(request)
        except (QueueFull, DeadlineExceeded):
            raise
        except Exception as error:
            return VersionOutcome((), True, time.monotonic() - began), error
        return VersionOutcome(result.outputs, False, time.monotonic() - began), None


def _told(pair: Pair) -> dict[str, Any]:
    """A pair as an operator's own judge gets it."""
    return {name: {**each._asdict(), "outputs": _values(each.outputs)} for name, each in pair._asdict().items()}


def _values(tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Raises UnicodeDecodeError for texts that are not UTF-8."""
    return {each.name: read_array(each.data, each.datatype, each.shape).tolist() for each in tensors}
