"""The response cache of a model: equal requests get the answer of the first, from memory."""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from penstock.messages.tensors import InferRequest, InferResult
from penstock.repository.statistics import ModelStatistics

MAX_BYTES = 64 << 20  # of the answers that are kept


class AnswerCache:
    """The latest answers of a version, by the content of their requests. Bounded by bytes."""

    def __init__(self, statistics: ModelStatistics) -> None:
        self._statistics = statistics
        self._used = 0
        self._answers: OrderedDict[bytes, InferResult] = OrderedDict()

    async def answer(
        self, request: InferRequest, rows: int, run: Callable[[InferRequest, int], Awaitable[InferResult]]
    ) -> InferResult:
        """Returns the answer that is kept, or runs the request and keeps its answer. Raises what `run` raises."""
        began = time.monotonic_ns()
        key, counts = _content(request), self._statistics
        found = self._answers.get(key)
        if found is not None:
            self._answers.move_to_end(key)
            took = time.monotonic_ns() - began
            counts.cache_hit.add(took)
            counts.inferences += rows
            counts.request(took / 1e9, 0.0)
            return found
        result = await run(request, rows)
        began = time.monotonic_ns()
        self._keep(key, result)
        counts.cache_miss.add(time.monotonic_ns() - began)
        return result

    def _keep(self, key: bytes, result: InferResult) -> None:
        size = _size(result)
        if size > MAX_BYTES or key in self._answers:
            return
        self._answers[key] = result
        self._used += size
        while self._used > MAX_BYTES:
            self._used -= _size(self._answers.popitem(last=False)[1])


def _content(request: InferRequest) -> bytes:
    """A digest of what an answer depends on. Lengths are part of it, so that no two contents look alike."""
    digest = hashlib.blake2b(digest_size=32)
    for tensor in sorted(request.inputs, key=lambda each: each.name):
        head = (tensor.name, tensor.datatype, tensor.shape, len(tensor.data))
        digest.update(repr(head).encode())
        digest.update(tensor.data)
    digest.update(repr(request.outputs).encode())
    return digest.digest()


def _size(result: InferResult) -> int:
    return sum(len(tensor.data) + 256 for tensor in result.outputs)
