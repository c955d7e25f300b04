"""One request and its output so far, on the client's side. The code does not block and reads no clock, so a client of
one engine and a client of several engines can both use it."""

from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import replace

from penstock.messages.delta import TokenDelta
from penstock.messages.delta_buffer import DeltaBuffer
from penstock.messages.plan import FinishReason
from penstock.messages.protocols import DeadlineExceeded, EngineError
from penstock.messages.request import GenerateRequest

T = TypeVar("T")

_NO_TOKEN = "no token came within the request's first_token_timeout; send it with a longer one, or with less load"
_NOT_DONE = "the request was not complete within its timeout; send it again with a longer one, or ask for fewer tokens"


class Stream:
    """Buffers the deltas of one request until its consumer takes them. The request's max_tokens bounds the buffer.

    It also keeps all tokens of unfinished choices. If the engine ends, they are sent to another one, which continues
    after them. It gets one request for each unfinished choice, with an id of its own (`names`) if there were several.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.waits = True  # no engine has begun it
        self.sent = False  # it was sent to the engine that runs now
        self.begun = False  # that engine has computed a step of it, or was about to
        self.answered = 0  # deltas that this engine has sent
        self.closed = False  # the consumer has stopped reading
        self.gather = 1  # wake the consumer when it has so many tokens; for a choice's first token and its end at once
        self.notify: Callable[[], None] = _nothing  # wakes the consumer
        self.has_tokens = False  # an engine has sent a delta
        self.error: Exception | None = None  # raised to the consumer after it has taken all deltas
        self.unread = 0  # tokens to take, with 1 for each delta without tokens; 0: nothing to take
        choices = range(request.first_choice, request.first_choice + request.n)
        self._outputs = {choice: list(request.output_ids) for choice in choices}  # of unfinished choices
        self._endings: dict[int, tuple[FinishReason, int]] = {}  # of choices that the client has ended: (reason, keep)
        self._names: dict[int, str] = {}  # the engine's request ids of choices, if each was resumed by itself
        self._buffer = DeltaBuffer()
        self._refused = False  # the engine has refused the whole request

    @property
    def in_engine(self) -> bool:
        """True while the engine may still work on the request."""
        return bool(self._outputs) and not self._refused

    @property
    def complete(self) -> bool:
        """True when every choice has ended."""
        return not self._outputs

    @property
    def longest_output(self) -> int:
        """The most tokens of an unfinished choice."""
        return max(map(len, self._outputs.values()), default=0)

    def push(self, delta: TokenDelta) -> None:
        """Take a delta from the engine. If it does not continue its choice, tokens were lost: the stream ends with an
        error."""
        output = self._outputs.get(delta.choice)
        if output is None:
            return  # that choice has ended
        expected = len(output)
        if delta.offset != expected and (delta.offset > expected or delta.finish_reason is None):
            self.fail(EngineError(f"choice {delta.choice}: expected token {expected}, got token {delta.offset}"))
            return
        self.has_tokens = True
        self.answered += 1
        self.unread += len(delta.token_ids) or 1
        due = not output or self.unread >= self.gather
        if delta.finish_reason is None:
            output += delta.token_ids
        else:
            due = True
            del self._outputs[delta.choice]
        if self._names:
            delta = replace(delta, request_id=self.request.request_id)
        self._buffer.push(delta)
        if due:
            self.notify()

    def take(self) -> list[TokenDelta]:
        """Return new deltas, merged per choice. Does not block."""
        self.unread = 0
        return self._buffer.take()

    def refuse(self, error: Exception) -> None:
        """End the stream because the engine has refused or dropped the request."""
        # Some choices may still run: of a late request, or if each choice was resumed by itself. The client must abort
        # their `names`.
        self._refused = not isinstance(error, DeadlineExceeded) and not self._names
        self.fail(error)

    def fail(self, error: Exception) -> None:
        """End the stream with an error, after all deltas pushed so far. A second error is ignored."""
        self.error = self.error or error
        self.notify()

    def watch_deadlines(
        self, now: float, later: Callable[[float, Callable[[], None]], T], collect: Callable[[], None] = lambda: None
    ) -> list[T]:
        """Let the stream end at its deadlines. `later` calls a function after some seconds, and returns its timer.
        `collect` takes what engines have sent."""

        def first() -> None:
            collect()
            if not self.has_tokens:
                self.fail(DeadlineExceeded(_NO_TOKEN))

        def last() -> None:
            self.fail(DeadlineExceeded(_NOT_DONE))

        ends = ((self.request.first_token_deadline, first), (self.request.deadline, last))
        return [later(max(deadline - now, 0.0), end) for deadline, end in ends if deadline is not None]

    def aborted(self) -> list[TokenDelta]:
        """Return deltas that end the unfinished choices with "abort"."""
        name = self.request.request_id
        return [TokenDelta(name, choice, len(output), (), "abort") for choice, output in self._outputs.items()]

    # -- the request in the engine ----------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the engine's request ids of the unfinished choices."""
        return [self._names[choice] for choice in self._outputs] if self._names else [self.request.request_id]

    def finish(self, choice: int, reason: FinishReason, keep: int) -> str:
        """Note that the client ends a choice after `keep` tokens. Return the engine's request id of it."""
        self._endings[choice] = (reason, keep)
        return self._names.get(choice, self.request.request_id)

    def abort(self) -> list[str]:
        """Note that the client ends all choices. Return the engine's request ids to abort. If the request was not sent
        to an engine, end the choices here and return none."""
        if self.sent:
            for choice, output in self._outputs.items():
                self._endings.setdefault(choice, ("abort", len(output)))
            return self.names()
        for delta in self.aborted():
            self.push(delta)
        return []

    def requests(self) -> list[GenerateRequest]:
        """Return the requests to send to a new engine: this one, or, if an engine has sent tokens, one for each
        unfinished choice with its tokens so far."""
        self.sent, self.begun, self.answered = True, False, 0
        for choice, (reason, keep) in self._endings.items():
            self.push(TokenDelta(self.request.request_id, choice, keep, (), reason))
        request = self.request
        if not self.has_tokens:
            return [request]
        if request.n > 1:
            self._names = {choice: f"{request.request_id}#{choice}" for choice in self._outputs}
        return [
            replace(
                request,
                request_id=self._names.get(choice, request.request_id),
                output_ids=tuple(output),
                first_token_deadline=None if output else request.first_token_deadline,
                n=1,
                first_choice=choice,
                # A choice with tokens already has the prompt's logprobs: they come with the first token.
                sampling=replace(request.sampling, prompt_logprobs=None) if output else request.sampling,
            )
            for choice, output in self._outputs.items()
        ]


def _nothing() -> None:
    """No consumer is blocked on the stream."""
