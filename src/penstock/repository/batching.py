"""Runs the requests of one version of a model in batches: the batcher decides, the process computes."""

import asyncio
import math
import time
from collections.abc import Hashable, Sequence
from functools import partial

import msgspec

from penstock.messages import DeadlineExceeded, EngineError, QueueFull, RequestRejected
from penstock.messages.tensors import (
    DATATYPES,
    LENGTH_BYTES,
    MAX_BYTES,
    Bytes,
    InferRequest,
    InferResult,
    Tensor,
    TensorSpec,
)
from penstock.observe.thread_load import LOOK_SECONDS
from penstock.repository.backend.process import Done, ModelProcess, unavailable
from penstock.repository.backend.wire import BatchDone, RunBatch, TensorPlace
from penstock.repository.chains import ChainRequest, NextStep, common_steps
from penstock.repository.statistics import ModelStatistics
from penstock.schedule.batcher import Batch, Batcher, BatchRules
from penstock.schedule.resources import ResourceNeeds, ResourcePool

MIN_ROOM = 4096  # bytes for outputs
LONG_NS = 4_000_000  # of several models that run as one batch, as far as their last runs tell
BUSY = 0.7  # of the thread's time: then a batch gathers requests also while nothing runs
GATHER_ROWS = 8  # at most
RETRY_SECONDS = 1  # the Retry-After of a full queue

Ran = list[tuple[NextStep, Batch]]  # models that run with a batch, and what they hold of their own batchers


class _Waiter(msgspec.Struct, eq=False):
    """A request, and what waits for its result."""

    request: InferRequest
    rows: int
    size: int  # bytes of its inputs
    result: "asyncio.Future[InferResult]"
    arrived: float
    began: float = 0.0
    outcome: InferResult | Exception | None = None  # kept until it may leave


class BatchedModel:
    """The queue and the instances of one version of a model."""

    def __init__(
        self,
        name: str,
        process: ModelProcess,
        model: int,
        rules: BatchRules,
        outputs: Sequence[TensorSpec],
        statistics: ModelStatistics,
        hang_seconds: float,
        *,
        has_rows: bool,
        pool: ResourcePool,
        needs: ResourceNeeds,
    ) -> None:
        """`model` is the model's number in the process. `has_rows`: tensors have a batch dimension. Batches need
        resources of the `pool`."""
        self.name = name
        self.batcher = Batcher(rules)
        self._process, self.model = process, model
        self._outputs = tuple(spec.name for spec in outputs)
        self._row_bytes = sum(_known_bytes(spec) for spec in outputs)  # of all outputs, as far as they are known
        self._statistics = statistics
        self._hang_seconds = hang_seconds
        self._has_rows = has_rows
        self._pool, self._user = pool, pool.add(needs) if needs.resources else None
        self._waiters: dict[int, _Waiter] = {}
        self._numbers = 0
        self._last_ns = math.inf  # of the last run
        self._blocked: Batch | None = None  # waits for shared memory
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None  # when it calls `pump`
        self._most = 0  # requests at a time since the last look at how busy the thread is
        self._next_look = 0.0

    async def infer(self, request: InferRequest, rows: int) -> InferResult:
        """Runs a request that has been checked. Raises QueueFull, DeadlineExceeded, RequestRejected and EngineError."""
        if self._process.gone(self.model):
            raise EngineError(f"model {self.name!r} has ended its process too often; load it again")
        size = sum(len(tensor.data) for tensor in request.inputs)
        if size > self._process.arena.size // 4:
            limit = self._process.arena.size // 4
            raise RequestRejected(f"the inputs have {size} bytes; the limit is {limit}: send fewer rows")
        self._numbers += 1
        number, now = self._numbers, time.monotonic()
        rules = self.batcher.rules
        group: Hashable = number if rules.mode == "none" else _group(request)
        if self.batcher.add(number, rows, group, now, level=request.priority, timeout=request.timeout) is not None:
            raise QueueFull(
                f"Exceeds maximum queue size: the queue of model {self.name!r} is full; try again later", RETRY_SECONDS
            )
        waiter = _Waiter(request, rows, size, asyncio.get_running_loop().create_future(), now)
        self._waiters[number] = waiter
        self._most = max(self._most, len(self._waiters))
        self._schedule()
        try:
            return await waiter.result
        except asyncio.CancelledError:
            if self.batcher.cancel(number):
                self._waiters.pop(number, None)
                self._leave(self.batcher.leaving())
                self._schedule()
            raise

    def may_precede(self, other: "BatchedModel") -> bool:
        """Returns whether a batch may go on to another model in its process."""
        return self._process is other._process and self._has_rows and other._has_rows and other._user is None

    def pump(self) -> None:
        """Starts the batches that are due. Called when something has changed."""
        self._scheduled = False
        now = time.monotonic()
        self._set_gather(now)
        for number in (late := self.batcher.drop_late(now)):
            waiter = self._waiters.pop(number)
            _fail(
                waiter, DeadlineExceeded(f"Request timeout expired: it waited longer than model {self.name!r} allows")
            )
        if late:
            self._leave(self.batcher.leaving())
        if self._process.gone(self.model):
            self._end_all()
            self.close()
            return
        while self._blocked is not None or self._can_run(now):
            batch = self._blocked or self.batcher.plan(now)
            if batch is None or not self._process.has(self.model):
                break
            self._blocked = None
            waiters = [self._waiters[number] for number in batch.requests]
            then, ran = self._next(waiters, batch.rows), Ran()
            if not self._start(waiters, partial(self._done, batch, waiters, ran), now, then):
                self._blocked = batch  # `pump` is called again when memory is free
                break
            ran += [(step, step.batches.batcher.follow(batch.rows)) for step in then]
        if self._blocked is not None or self.batcher.waiting:
            self._process.stalled.add(self.pump)
        else:
            self._process.stalled.discard(self.pump)
        self._set_timer()

    def close(self) -> None:
        """Frees its resources. Called when no request is left."""
        self._process.stalled.discard(self.pump)
        if self._user is not None and self._pool.remove(self._user):
            self._freed()

    def _can_run(self, now: float) -> bool:
        """Takes the resources of the next batch, if one is due and the process can run it."""
        can = self._process.has(self.model)
        if self._user is None:
            return can
        if can and self.batcher.due(now):
            return self._pool.take(self._user)
        if self._pool.leave(self._user):
            self._freed()
        return False

    def _freed(self) -> None:
        """Lets other models run that wait for resources."""
        asyncio.get_running_loop().call_soon(self._process.on_free)

    def _schedule(self) -> None:
        """Calls `pump` once the loop has handled what has arrived, so that these requests run together."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.pump)

    def _set_timer(self) -> None:
        due = self.batcher.next_due()
        if due == self._due:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due = due
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(max(due - time.monotonic(), 0), self._at_due)

    def _at_due(self) -> None:
        self._timer = self._due = None
        self.pump()

    def _set_gather(self, now: float) -> None:
        """Has the batcher gather half of the requests that were here at a time, if this thread has little time left."""
        if now >= self._next_look:
            busy = self._process.thread.busy(now) >= BUSY
            self.batcher.gather(min(self._most // 2, GATHER_ROWS) if busy else 0)
            self._next_look, self._most = now + LOOK_SECONDS, len(self._waiters)

    def _next(self, waiters: list[_Waiter], rows: int) -> Sequence[NextStep]:
        """The models that run at once after this one, because all requests go there and nothing else waits for them.

        That saves the way to the process and back for each. Long runs end here: others may need a model meanwhile.
        """
        found, ns = list[NextStep](), self._last_ns
        for step in common_steps([waiter.request for waiter in waiters]):
            ns += step.batches._last_ns
            used = self is step.batches or any(each.batches is step.batches for each in found)
            if used or ns > LONG_NS or not step.batches.batcher.free_for(rows):
                break
            found.append(step)
        return found

    def _start(self, waiters: list[_Waiter], done: Done, now: float, then: Sequence[NextStep] = ()) -> bool:
        """Copies the inputs of requests to shared memory, one after the other, and has them run. Returns False if there
        is no room."""
        last = then[-1].batches if then else self
        requests = [waiter.request for waiter in waiters]
        total = _aligned(sum([waiter.size for waiter in waiters])) + 64 * len(requests[0].inputs)  # each is aligned
        rows = sum([waiter.rows for waiter in waiters])
        room = MIN_ROOM + _aligned(last._row_bytes * rows) + 64 * len(last._outputs)
        arena = self._process.arena
        region = arena.take(total + room)
        if region is None:
            return False
        at, places = region, []
        for i, first in enumerate(requests[0].inputs):
            start = at
            for request in requests:
                data = request.inputs[i].data
                arena.view[at : at + len(data)] = data
                at += len(data)
            shape = (rows, *first.shape[1:]) if self._has_rows else first.shape
            places.append(TensorPlace(first.name, first.datatype, shape, start, at - start))
            at = start + _aligned(at - start)
        for waiter in waiters:
            waiter.began = now
        wanted = _wanted(requests, self._outputs)
        order = RunBatch(0, self.model, places, wanted, region + total, room)
        order.then = [step.order for step in then]
        self._process.submit(order, region, self._hang_seconds, done)
        return True

    def _done(self, batch: Batch, waiters: list[_Waiter], ran: Ran, report: BatchDone, memory: memoryview) -> None:
        for step, held in ran:
            step.batches.batcher.apply(held)
            if step.batches.batcher.waiting:
                step.batches._schedule()
        if report.error and (len(waiters) > 1 or ran) and self._process.has(self.model):
            self._run_alone(batch, waiters)
            return
        self._keep(waiters, report, memory)
        for (step, held), ns in zip(ran, report.then_ns, strict=False):  # no times come with an error
            step.batches._count(held.rows, len(waiters), (0, ns, 0))
            step.batches._statistics.request(ns / 1e9, 0.0, len(waiters))
        self._finish(batch)

    def _finish(self, batch: Batch) -> None:
        leaving = self.batcher.apply(batch)
        if self._user is not None:
            self._pool.give(self._user)
            self._freed()
        if self.batcher.waiting or self._blocked is not None:
            self.pump()  # the next batch runs while results are sent
        self._leave(leaving)

    def _run_alone(self, batch: Batch, waiters: list[_Waiter]) -> None:
        """Runs the requests of a batch that failed one at a time: only those that fail again end with an error."""
        first, rest = waiters[0], waiters[1:]

        def done(report: BatchDone, memory: memoryview) -> None:
            self._keep([first], report, memory)
            if rest and self._process.has(self.model):
                self._run_alone(batch, rest)
                return
            for each in rest:
                each.outcome = unavailable(report.error)
            self._finish(batch)

        if not self._start([first], done, first.began):
            for each in waiters:
                each.outcome = EngineError("there is no shared memory for the request; try again later")
            asyncio.get_running_loop().call_soon(self._finish, batch)

    def _keep(self, waiters: list[_Waiter], report: BatchDone, memory: memoryview) -> None:
        """Counts a run, and gives each request its rows of the outputs, or the error."""
        rows = sum(waiter.rows for waiter in waiters)
        if report.error:
            alive = self._process.has(self.model)
            for waiter in waiters:
                waiter.outcome = _run_error(self.name, report.error, alive=alive)
            return
        self._count(rows, len(waiters), (report.input_ns, report.run_ns, report.output_ns))
        results: list[list[Tensor]] = [[] for _ in waiters]
        for place in report.outputs:
            data = memory[place.start : place.start + place.size]
            if not self._has_rows or len(waiters) == 1:
                parts: list[Bytes] = [bytes(data)]
                shapes = [place.shape]
            elif not place.shape or place.shape[0] != rows:
                wrong = EngineError(
                    f"output {place.name!r} of model {self.name!r} has the shape {place.shape} for {rows} rows"
                )
                for waiter in waiters:
                    waiter.outcome = wrong
                return
            else:
                parts = _divided(data, place, [waiter.rows for waiter in waiters])
                shapes = [(waiter.rows, *place.shape[1:]) for waiter in waiters]
            for result, part, shape in zip(results, parts, shapes, strict=True):
                result.append(Tensor(place.name, place.datatype, shape, part))
        for waiter, result in zip(waiters, results, strict=True):
            names = waiter.request.outputs
            if isinstance(waiter.request, ChainRequest):
                waiter.request.ran = len(report.then_ns)
            elif names and len(names) < len(result):
                by_name = {tensor.name: tensor for tensor in result}
                result = [by_name[name] for name in names]
            waiter.outcome = InferResult(outputs=result)

    def _count(self, rows: int, requests: int, ns: tuple[int, int, int]) -> None:
        self._last_ns = ns[1]
        self._statistics.batch(rows, requests, ns)

    def _leave(self, numbers: list[int]) -> None:
        """Hands out results whose turn it is."""
        now = time.monotonic()
        for number in numbers:
            waiter = self._waiters.pop(number, None)
            if waiter is None or waiter.result.done():
                continue
            if isinstance(waiter.outcome, InferResult):
                self._statistics.request(now - waiter.arrived, waiter.began - waiter.arrived)
                waiter.result.set_result(waiter.outcome)
            else:
                waiter.result.set_exception(waiter.outcome or EngineError("the batch ended without a result"))

    def _end_all(self) -> None:
        """Ends every request that waits: the model cannot run again."""
        for number in [number for number, waiter in self._waiters.items() if not waiter.began]:
            if self.batcher.cancel(number):
                error = EngineError(f"model {self.name!r} has ended its process too often; load it again")
                _fail(self._waiters.pop(number), error)


def _run_error(name: str, text: str, *, alive: bool) -> Exception:
    """The error of a run: the request's, if the process is `alive`."""
    return RequestRejected(f"model {name!r}: {text}") if alive else unavailable(text)


def _fail(waiter: _Waiter, error: Exception) -> None:
    if not waiter.result.done():
        waiter.result.set_exception(error)


def _group(request: InferRequest) -> Hashable:
    """Requests with equal groups have the same inputs, and rows of the same shape."""
    return tuple((tensor.name, tensor.shape[1:]) for tensor in request.inputs)


def _wanted(requests: list[InferRequest], outputs: tuple[str, ...]) -> tuple[str, ...]:
    """The outputs to compute: those that a request needs."""
    asked = {request.outputs for request in requests}
    if () in asked:
        return outputs
    names = set().union(*asked)
    return tuple([name for name in outputs if name in names])


def _divided(data: memoryview, place: TensorPlace, counts: list[int]) -> list[Bytes]:
    """The bytes of each request's rows. Raises no error: the child has written the tensor."""
    parts: list[Bytes] = []
    at = 0
    if place.datatype != "BYTES":
        row = place.size // place.shape[0]
        for count in counts:
            parts.append(bytes(data[at : at + count * row]))
            at += count * row
        return parts
    per_row = math.prod(place.shape[1:])
    for count in counts:
        start = at
        for _ in range(count * per_row):
            at += LENGTH_BYTES + int.from_bytes(data[at : at + LENGTH_BYTES], "little")
        parts.append(bytes(data[start:at]))
    return parts


def _known_bytes(spec: TensorSpec) -> int:
    """The bytes of an output's row if its shape is fixed, else a guess."""
    size = DATATYPES[spec.datatype] or 32
    return min(size * math.prod(length if length > 0 else 1 for length in spec.shape), MAX_BYTES)


def _aligned(size: int) -> int:
    return -(-size // 64) * 64
