"""The engine's loop: receive commands, plan a step, apply its result, send one message."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.engine.link.channel import Channel
from penstock.engine.link.wire import Abort, Add, Command, Control, ControlReply, Finish, Refused, Rejected, Step, Stop
from penstock.engine.meter import StepMeter
from penstock.messages import (
    OUT_OF_MEMORY,
    Capacity,
    Clock,
    Completed,
    EngineStats,
    Executor,
    FinishReason,
    ForgottenBlocks,
    GenerateRequest,
    Grammar,
    RequestRejected,
    ResetCache,
    Resize,
    Sleep,
    StepLease,
    TokenDelta,
    Wake,
    WatchBlocks,
)
from penstock.schedule import Scheduler

if TYPE_CHECKING:
    from penstock.engine.tier.tier import BlockTiers

ADMISSION_SECONDS = 0.002  # the longest time in a step for adding new requests
CONTESTED_SECONDS = 0.05  # the longest step that is planned while other engines wait for the processors
COMPILER_SECONDS = 0.001  # between checks of a grammar that is being compiled, while there is no other work
HEALTH_SECONDS = 1.0  # between checks of the executor's health while there is no work
STATS_SECONDS = 0.05  # between statistics while the number of running sequences does not change

log = logging.getLogger(__name__)


class _Received(NamedTuple):
    """A request that is not in the scheduler yet, and commands to execute when it is."""

    request: GenerateRequest
    finishes: list[Finish]


class EngineCore:
    """Drives one scheduler and one executor on the calling thread. Messages to the client are passed to `post`.

    `run` serves the client at the other end of a channel. A simulator calls `step` itself, for several engines in turn:
    a step never blocks on commands, and its only clock is `clock`.

    A request that cannot be added, or that fails in its row of a step, ends alone. `step` and `run` raise an exception
    from the scheduler or the executor, since it concerns every request.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        post: Callable[[Step], None],
        capacity: Capacity,
        *,
        incarnation: int,
        clock: Clock,
        lease: StepLease | None = None,
        tiers: "BlockTiers | None" = None,
    ) -> None:
        """The executor has been started, and `capacity` is what it returned. Without `lease`, the processors are not
        shared with other engines."""
        self._scheduler = scheduler
        self._executor = executor
        self._post = post
        self._depth = capacity.depth
        self._resizable = capacity.resizable and tiers is None  # these read and fill blocks beside the steps
        self._blocks = tuple(group.num_blocks for group in capacity.groups)
        self._incarnation = incarnation
        self._clock = clock
        self._lease, self._contested = lease, False
        self._tiers = tiers
        self._meter = StepMeter(clock)
        self._outstanding = 0  # plans submitted whose results have not been taken
        self._backlog: dict[str, _Received] = {}  # by request id
        self._idle = True  # the last step has returned None
        self._out = Step()  # the next message, until `_send`
        self._posted = EngineStats()  # the last statistics sent
        self._stats_due = 0.0  # when statistics are sent next, if they have changed
        self._watched = False  # the client reads reports of blocks
        self.stop_reason: str | None = None  # from the Stop command, after which there are no more steps

    def run(self, channel: Channel) -> str:
        """Step until a Stop command. Return its reason. Between steps, block on `channel` until the next one is due.
        While there is no work, check the executor's health once a second."""
        lease, clock, receive = self._lease, self._clock, channel.receive
        if lease is not None:
            self._scheduler.limit_steps(0.0)  # so that step times are known when others compete
        wake: float | None = None
        while wake is not None or self.stop_reason is None:
            if wake is not None:
                commands = receive(wait=wake - clock())
            else:
                commands = receive(wait=HEALTH_SECONDS)
                self._executor.health()
            if lease is None:
                wake = self.step(commands)
                continue
            if commands or wake is not None:  # else it would seem to compete
                self._take_turn(lease)
            wake = self.step(commands)
            if wake is None or wake > clock():
                lease.give()
        return self.stop_reason

    def _take_turn(self, lease: StepLease) -> None:
        """Block until the next step may run. While other engines compete, plan short steps."""
        contested = lease.take(self._scheduler.first_due() if self._contested else math.inf)
        if contested:
            self._meter.resume()  # the time of other engines' steps is not a cost of this one's
        if contested != self._contested:
            self._contested = contested
            self._scheduler.limit_steps(CONTESTED_SECONDS if contested else 0.0)

    def step(self, commands: Sequence[Command | Refused] = ()) -> float | None:
        """Execute commands, submit plans as far as the depth allows, and apply the oldest result if it can be taken.

        Return the time at which the next step is due; it may have passed. Return None if there is no work until a
        command comes. A step before that time, such as for a command, does no harm. A step blocks if the executor's
        `result` blocks: on a CPU, while the result is computed.
        """
        if self._idle:
            self._idle = False
            self._meter.resume()
        if commands:
            for command in commands:
                self._execute(command)
            if self.stop_reason is not None:
                return None
        if self._tiers is not None:
            self._tiers.advance(self._clock())
        if self._backlog:
            self._admit()
        wake = self._advance()
        self._send()
        return wake

    def _admit(self) -> None:
        """Add requests for a bounded time, so that many new ones do not delay running ones. A request stays in the
        backlog while its grammar is being compiled, or its blocks are read."""
        start = self._clock()
        for request_id, (request, _) in list(self._backlog.items()):
            prepared = request.grammar is None or self._is_prepared(request, request.grammar)
            if prepared and (self._tiers is None or self._tiers.reader.ready(request, start)):
                self._add(request_id)
            if self._clock() - start >= ADMISSION_SECONDS:
                break

    def _is_prepared(self, request: GenerateRequest, grammar: Grammar) -> bool:
        """Return whether the grammar is compiled. If compiling cannot start, end the request and return False."""
        try:
            return self._executor.prepare(grammar)
        except Exception as error:
            _log_failure("the grammar of request %s cannot be prepared", request.request_id)
            del self._backlog[request.request_id]
            self._end(request, "error", f"internal error: {type(error).__name__}: {error}")
            return False

    def _advance(self) -> float | None:
        """Drop late requests, submit plans as far as the depth allows, then apply the oldest result. Return when the
        next step is due, as `step` does."""
        now = self._clock()
        for request_id, seconds in self._scheduler.drop_late(now):
            self._out.rejected.append(Rejected(request_id, _late(seconds), "deadline"))
        while self._outstanding < self._depth and (plan := self._scheduler.plan(now)) is not None:
            if plan.new:
                # Sent before the step runs: if it ends the process, the client must know which requests are suspect.
                self._post(Step(begun=self._scheduler.begun(plan)))
            try:
                self._executor.submit(plan)
            except Exception as error:
                self._start_over(error)
                return now
            self._outstanding += 1
        if not self._outstanding:
            if self._scheduler.has_work and not self._scheduler.leases.held:
                raise RuntimeError("the scheduler has work but plans none of it")
            if self._backlog:
                return now + COMPILER_SECONDS
            self._idle = True
            return self._tiers.due(now) if self._tiers is not None else None
        if (due := self._executor.result_at) > now:
            return due
        try:
            result = self._executor.result()
        except Exception as error:
            self._start_over(error)
            return now
        self._outstanding -= 1
        now = self._clock()
        self._meter.step(result.timing, now)
        self._out.deltas += self._scheduler.apply(result, now)
        if self._tiers is not None:
            self._tiers.reader.note_step(self._scheduler.prompt_tokens, result.timing.total)
        return now

    def _start_over(self, error: Exception) -> None:
        """After a failed allocation, end the request with most tokens in the step, and compute the others again.
        Raises any other error.

        It is unknown how far the step came, so the executor forgets all sequences.
        """
        if not self._executor.recover(error):
            raise error
        log.error("a step failed for lack of memory; one request ends, and the others are computed again: %r", error)
        self._outstanding = 0
        message = f"{OUT_OF_MEMORY} beside the others: send it again later, or a shorter one"
        self._out.deltas.extend(self._scheduler.start_over(message, self._clock()))

    def _send(self) -> None:
        """Send one message with everything new since the last one, if anything is new."""
        out, running, mark = self._out, self._scheduler.num_running, self._meter.mark
        if not running or running != self._posted.running or mark >= self._stats_due:
            self._stats_due = mark + STATS_SECONDS
            stats = self._scheduler.stats(*self._meter.seconds)
            if self._tiers is not None:
                stats = msgspec.structs.replace(stats, **self._tiers.counts())
            if stats != self._posted:
                out.stats = self._posted = stats
            if self._watched and (changes := self._scheduler.block_changes()) is not None:
                out.blocks.append(changes)
        if out.deltas or out.stats or out.rejected or out.aborted or out.replies or out.blocks:
            self._post(out)
            self._out = Step()

    def _execute(self, command: Command | Refused) -> None:
        now = self._clock()
        match command:
            case Add():
                self._accept(command.request, now)
            case Finish():
                # A request that waits for its grammar must not be added: its first step would block.
                if (received := self._backlog.get(command.request_id)) is not None:
                    received.finishes.append(command)
                else:
                    self._finish(command, now)
            case Abort():
                if (received := self._backlog.pop(command.request_id, None)) is not None:
                    self._end(received.request, "abort")
                if self._tiers is not None:
                    self._tiers.reader.forget(command.request_id)
                self._out.deltas.extend(self._scheduler.abort(command.request_id, now))
                self._out.aborted.append(command.request_id)
            case Control():
                self._out.replies.append(self._control(command))
            case Rejected():
                self._out.rejected.append(command)
            case ControlReply():
                self._out.replies.append(command)
            case Stop():
                self.stop_reason = command.reason

    def _accept(self, request: GenerateRequest, now: float) -> None:
        if request.request_id in self._backlog:
            self._out.rejected.append(Rejected(request.request_id, f"request id {request.request_id!r} is in use"))
            return
        if not request.arrival:
            request = msgspec.structs.replace(request, arrival=now)
        self._backlog[request.request_id] = _Received(request, [])

    def _finish(self, command: Finish, now: float) -> None:
        ended = self._scheduler.finish(command.request_id, command.choice, command.reason, command.keep, now)
        self._out.deltas.extend(ended)

    def _add(self, request_id: str) -> None:
        """Move a request from the backlog to the scheduler. An error here ends this request only."""
        request, finishes = self._backlog.pop(request_id)
        try:
            self._out.deltas.extend(self._scheduler.add(request, self._clock()))
            for command in finishes:
                self._finish(command, self._clock())
        except RequestRejected as error:
            self._out.rejected.append(Rejected(request_id, str(error)))
        except Exception as error:
            _log_failure("request %s could not be added", request_id)
            self._scheduler.abort(request_id, self._clock())
            self._end(request, "error", f"internal error: {type(error).__name__}: {error}")

    def _end(self, request: GenerateRequest, reason: FinishReason, error: str = "") -> None:
        """End a request that is not in the scheduler."""
        for choice in range(request.first_choice, request.first_choice + request.n):
            self._out.deltas.append(
                TokenDelta(
                    request.request_id,
                    choice,
                    len(request.output_ids),
                    finish_reason=reason,
                    error=error,
                    incarnation=self._incarnation,
                )
            )

    def _control(self, command: Control) -> ControlReply:
        match command.message:
            case ResetCache():
                blocks = self._scheduler.stats(*self._meter.seconds).blocks_cached
                self._scheduler.reset_prefix_cache()
                if self._tiers is not None:
                    self._tiers.clear()
                return ControlReply(command.serial, ForgottenBlocks(blocks))
            case Wake():
                return ControlReply(command.serial, Completed())
            case WatchBlocks():
                self._scheduler.watch_blocks()
                self._watched, self._stats_due = True, 0.0  # the first report leaves with the reply
                return ControlReply(command.serial, Completed())
            case Resize(share) if self._resizable:
                return self._resize(command.serial, share)
            case Resize():
                error = "the KV cache on a GPU, of ranks, of an encoder or with --kv-disk or --role has a fixed size"
            case Sleep():
                # A client that can start the engine again executes this itself, and never sends it.
                error = "this engine cannot sleep, as it cannot be started again"
            case _:
                error = "this engine was not started by penstock engine, and has no fronts"
        return ControlReply(command.serial, error=error, cause="engine")

    def _resize(self, serial: int, share: float) -> ControlReply:
        """No plan is outstanding: on the CPU a step takes its result. Block 0 counts for no share."""
        limits = tuple(1 + int((blocks - 1) * share) for blocks in self._blocks)
        try:
            self._scheduler.resize(limits)
        except ValueError as error:
            return ControlReply(serial, error=str(error))
        self._executor.trim(limits)
        return ControlReply(serial, Completed())


def _late(seconds: float) -> str:
    return (
        "the request was dropped before its prompt was computed: its first token would have come "
        f"{max(seconds, 0.01):.2f} s after its deadline; send it with a longer timeout, or when fewer requests wait"
    )


def _log_failure(message: str, request_id: str) -> None:
    """Log the exception being handled. A request's id is the id of its answer, "-" and a number."""
    log.exception(message, request_id, extra={"fields": {"answer_id": request_id.rpartition("-")[0]}})
