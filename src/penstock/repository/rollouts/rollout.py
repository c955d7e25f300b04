"""A rollout while it runs: sends each request to a version, runs it on the other one too, and compares the answers."""

import asyncio
import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from penstock.messages import DeadlineExceeded, QueueFull
from penstock.messages.tensors import InferRequest, InferResult, TensorModel, TensorSpec
from penstock.repository.rollouts.decision import EQUAL, RolloutState, decide
from penstock.repository.rollouts.judging import WITHOUT_LABELS, LabelledJudges, Pair, VersionOutcome
from penstock.repository.rollouts.record import RolloutRecord

MAX_COPIES = 4  # in flight. Copies yield to requests of users: while so many run, requests are not compared
MAX_UNLABELLED = 10_000  # pairs that wait for a label
MAX_UNLABELLED_BYTES = 64 << 20


class Rollout:
    """Used from one event loop."""

    def __init__(
        self,
        record: RolloutRecord,
        incumbent: TensorModel,
        candidate: TensorModel,
        changed: Callable[["Rollout"], None],
    ) -> None:
        """`changed` is called after each change of the state."""
        self.record = record
        self._arms = _Arm(incumbent, self), _Arm(candidate, self)
        self._changed = changed
        self._labelled = LabelledJudges()
        self._pairs: OrderedDict[str, tuple[Pair, int]] = OrderedDict()  # by id of the request, with their bytes
        self._bytes = 0
        self._copies: set[asyncio.Task[None]] = set()

    def pick(self, key: str) -> TensorModel:
        """Returns the version for a request. Requests with one `key` stay on a version, and once they have moved to the
        candidate, they stay there as the share grows. "": a random version."""
        text = f"{self.record.name}\0{self.record.candidate}\0{key or secrets.token_hex(8)}"
        place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / 2**32 * 100
        return self._arms[place < self.record.share]

    def set_state(self, state: RolloutState) -> None:
        if state != self.record.state:
            self.record.state = state
            self._changed(self)

    def look(self) -> None:
        """Decides anew."""
        self.set_state(decide(self.record.evidence, self.record.state, self.record.rules, time.time()))

    def label(self, request_id: str, label: Any) -> bool:
        """Judges a pair by what has turned out to be right. Returns False if the pair is not there: the request is not
        known, too old, or was not compared. Raises RequestRejected for a label that does not fit."""
        found = self._pairs.get(request_id)
        if found is None:
            return False
        judges = self._judges - WITHOUT_LABELS.keys()
        for judge, value in [(judge, self._labelled.difference(judge, found[0], label)) for judge in judges]:
            self._add(judge, value)
        self._forget(request_id)
        self.look()
        return True

    async def close(self) -> None:
        for copy in self._copies:
            copy.cancel()
        await asyncio.gather(*self._copies, return_exceptions=True)

    def compare(self, arm: "_Arm", request: InferRequest, outcome: VersionOutcome) -> None:
        """Runs a request that `arm` has answered on the other version too, unless enough copies run."""
        if self.record.state.is_open and len(self._copies) < MAX_COPIES:
            copy = asyncio.create_task(self._compare(arm, request, outcome))
            self._copies.add(copy)
            copy.add_done_callback(self._copies.discard)

    async def _compare(self, arm: "_Arm", request: InferRequest, first: VersionOutcome) -> None:
        is_candidate = arm is self._arms[1]
        try:
            second, _ = await self._arms[not is_candidate].run(request)
        except (QueueFull, DeadlineExceeded):
            return  # users come first
        pair = Pair(second, first) if is_candidate else Pair(first, second)
        for judge in self._judges & WITHOUT_LABELS.keys():
            if judge != "latency" or self.record.share == EQUAL:
                self._add(judge, WITHOUT_LABELS[judge](pair))
        if request.id and self._judges - WITHOUT_LABELS.keys():
            self._keep(request.id, pair)
        self.look()

    @property
    def _judges(self) -> set[str]:
        return set(self.record.evidence)

    def _add(self, judge: str, difference: float | None) -> None:
        if difference is not None:
            self.record.evidence[judge].add(difference)

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

    def __init__(self, model: TensorModel, rollout: Rollout) -> None:
        self._model, self._rollout = model, rollout
        self.name, self.version, self.streams = model.name, model.version, model.streams
        self.inputs: Sequence[TensorSpec] = model.inputs
        self.outputs: Sequence[TensorSpec] = model.outputs
        self.labels: Mapping[str, Sequence[str]] = model.labels
        self.metadata, self.config, self.statistics = model.metadata, model.config, model.statistics

    async def infer(self, request: InferRequest) -> InferResult:
        """See TensorModel. The answer is compared with the other version's after it was given."""
        outcome, error = await self.run(request)
        self._rollout.compare(self, request, outcome)
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
