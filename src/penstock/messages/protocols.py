"""The interfaces of an engine's client and of an executor, and their errors."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from penstock.messages.control import ControlAnswer, ControlMessage
from penstock.messages.delta import EngineInfo, EngineState, EngineStats, TokenDelta
from penstock.messages.plan import Capacity, FinishReason, StepPlan, StepResult
from penstock.messages.request import GenerateRequest, Grammar


class Clock(Protocol):
    def __call__(self) -> float:
        """Seconds, monotonic."""


class Executor(Protocol):
    """Runs plans, in the order submitted. Results come back in the same order."""

    def start(self) -> Capacity: ...
    def prepare(self, grammar: Grammar) -> bool:
        """Start to compile a grammar that a plan will need. Returns True when that is done, or need not be awaited."""

    def submit(self, plan: StepPlan) -> None: ...
    @property
    def result_at(self) -> float:
        """When the oldest outstanding plan's result can be taken, by the engine's clock. Until then the engine executes
        commands. 0 for an executor whose `result` blocks. Read only while a plan is outstanding."""

    def result(self) -> StepResult:
        """Return the result of the oldest outstanding plan. Blocks until it is there, unless `result_at` says when."""

    def recover(self, error: Exception) -> bool:
        """Forget every sequence and outstanding plan, if `error`, which `submit` or `result` has raised, is a failed
        allocation. Return False if it is not, or if the executor cannot go on."""

    def trim(self, limits: Sequence[int]) -> None:
        """Give the memory of blocks back whose ids are not below the limit of their KV group. No outstanding plan may
        have one. Called only if `Capacity.resizable`."""

    def health(self) -> None:
        """Raise the error that has ended the executor. Called about once a second while it has nothing to do."""

    def close(self) -> None: ...


class StepLease(Protocol):
    """The turns of an engine on processors that several engines share."""

    def take(self, due: float) -> bool:
        """Block until it is this engine's turn, which then lasts until `give` or the next `take`. Return whether other
        engines compete for the processors. `due`: when the first token of a request is due, on the engine's clock."""

    def give(self) -> None:
        """End the turn, because the engine has no work."""


class EngineError(Exception):
    """The engine cannot serve: it has died, is closing, or never started. The message is fit for a user."""


def other_region(what: str, region: str, allowed: Sequence[str]) -> str:
    """Return why `what` may not get a request whose tenant is bound to regions."""
    where = f"is in region {region}" if region else "has no --region"
    return f"{what} {where}, and the tenant's requests stay in {', '.join(allowed)}"


class RequestRejected(ValueError):
    """This request can never be served as it is; the message names the value, the limit and the remedy."""


class EndsEngines(RequestRejected):
    """The request has ended two engines. It must not be sent again."""


class QueueFull(RequestRejected):
    """Too many requests wait, or their prompts have too many tokens. The same request may be served later."""

    def __init__(self, message: str, retry_after: int) -> None:
        """`retry_after` is in seconds."""
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(Exception):
    """A request's deadline has passed, or its first token would come after it."""


class Queue(Protocol):
    """The requests that wait for an engine."""

    @property
    def tokens(self) -> int:
        """Of their prompts."""

    refused: int  # requests so far, because the queue was full
    late: int  # requests so far that were dropped before they began, or ended, because of their deadline

    def check(self, tokens: int = 0) -> None:
        """Raise QueueFull if a request with so many prompt tokens would be refused."""

    def retry_after(self) -> int:
        """Return the seconds in which all that waits now will have started, as measured: 1 to 120."""


class EngineClient(Protocol):
    """One engine, wherever it runs. Every method is called from one event loop."""

    @property
    def info(self) -> EngineInfo:
        """Facts about the engine. Another one that was started in its place has other ones."""

    @property
    def state(self) -> EngineState: ...
    @property
    def queue(self) -> Queue: ...
    def stats(self) -> EngineStats:
        """Return the stats after the last step received. Never blocks."""

    def generate(self, request: GenerateRequest, gather: int = 1) -> AsyncIterator[TokenDelta]:
        """Deltas of every choice until each has finished. Closing the iterator early aborts the request.

        The consumer is woken when `gather` tokens have arrived, and at once for a choice's first token and its end.
        Deltas of one choice that it has not taken are merged. Raises EngineError when the engine dies meanwhile,
        QueueFull, DeadlineExceeded, and RequestRejected when the engine refuses the request.
        """

    def finish(self, request_id: str, choice: int, reason: FinishReason, keep: int) -> None:
        """End a choice that needs no more tokens and keep its first `keep` output tokens. Unknown ids are ignored."""

    def abort(self, request_id: str) -> None:
        """End all choices of a request. Unknown ids are ignored."""

    async def control(self, message: ControlMessage) -> ControlAnswer:
        """Execute an operator's message, which says what its answer is. Raises EngineError if the engine cannot execute
        it now, and RequestRejected for a message that the engine does not have."""

    async def close(self) -> None: ...
