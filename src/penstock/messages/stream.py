"""One request and its output so far, as a client holds them. Nothing here waits or reads a clock, so that the client of
one engine and the client of several can both use it."""

from collections.abc import Callable

from msgspec.structs import replace

from penstock.messages.delta import TokenDelta
from penstock.messages.delta_buffer import DeltaBuffer
from penstock.messages.plan import FinishReason
from penstock.messages.protocols import DeadlineExceeded, EngineError
from penstock.messages.request import GenerateRequest


class Stream:
    """Buffers the deltas of one request until its consumer takes them. Bounded by the request's own max_tokens.

    It also holds all tokens of unfinished choices, so that another engine can go on after them.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.waits = True  # no engine has begun it
        self.sent = False  # to the engine that runs now
        self.begun = False  # that engine has computed a step of it, or was about to
        self.answered = 0  # messages with tokens that this engine has sent
        self.closed = False
        self.has_tokens = False  # some engine has sent something
        self.error: Exception | None = None  # what the stream ends with, after what has been pushed
        self.gather = 1  # tokens that are due together; a choice's first token and its end are due at once
        self.notify: Callable[[], None] = _nothing  # called when something is due, or the stream has failed
        self.unread = 0  # 0 if nothing is to be taken, else the tokens, where a delta without any counts as one
        choices = range(request.first_choice, request.first_choice + request.n)
        self._outputs = {choice: list(request.output_ids) for choice in choices}  # of unfinished choices
        self._endings: dict[int, tuple[FinishReason, int]] = {}  # choices that the client ended, until the engine does
        self._names: dict[int, str] = {}  # the engine's names of choices that were resumed apart
        self._buffer = DeltaBuffer()
        self._refused = False  # by the engine, which works on no part of it

    @property
    def in_engine(self) -> bool:
        """True while the engine may still work on the request."""
        return bool(self._outputs) and not self._refused

    @property
    def complete(self) -> bool:
        """True when every choice has ended."""
        return not self._outputs

    def push(self, delta: TokenDelta) -> None:
        """Take a delta that continues its choice; anything else means that tokens were lost, and ends the stream."""
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
        """The engine does not serve the request, or no longer."""
        # Other choices of a late request, or of one whose choices went on apart, may still run: their `names` must be
        # aborted.
        self._refused = not isinstance(error, DeadlineExceeded) and not self._names
        self.fail(error)

    def fail(self, error: Exception) -> None:
        """End the stream after what has been pushed. The first error stays."""
        self.error = self.error or error
        self.notify()

    def aborted(self) -> list[TokenDelta]:
        """Return what ends the unfinished choices after what has been pushed."""
        name = self.request.request_id
        return [TokenDelta(name, choice, len(output), (), "abort") for choice, output in self._outputs.items()]

    # -- its place in an engine -------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The engine's names of what is unfinished."""
        return [self._names[choice] for choice in self._outputs] if self._names else [self.request.request_id]

    def finish(self, choice: int, reason: FinishReason, keep: int) -> str:
        """Note that the client ends a choice after `keep` tokens. Return the engine's name of it."""
        self._endings[choice] = (reason, keep)
        return self._names.get(choice, self.request.request_id)

    def abort(self) -> list[str]:
        """Note that the client ends all choices. Return the engine's names of them, none if no engine has them: then
        they have ended."""
        if self.sent:
            for choice, output in self._outputs.items():
                self._endings.setdefault(choice, ("abort", len(output)))
            return self.names()
        for delta in self.aborted():
            self.push(delta)
        return []

    def requests(self) -> list[GenerateRequest]:
        """Return what a new engine must be sent: the request, or one for each unfinished choice with its tokens so
        far."""
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
                # The prompt's logprobs come with the first token.
                sampling=replace(request.sampling, prompt_logprobs=None) if output else request.sampling,
            )
            for choice, output in self._outputs.items()
        ]


def _nothing() -> None:
    """Nobody waits for the stream."""
