"""The parts of a provider's stream, which are the same for all APIs, and the errors of providers."""

import math
from typing import Any, Literal, NamedTuple

from penstock.frontend.errors import ProviderFailed, unavailable
from penstock.frontend.providers.file import ModelEntry, ProviderEntry
from penstock.frontend.requests.chat import ChatRequest
from penstock.messages import NEUTRAL
from penstock.text.calls import Part

EndReason = Literal["stop", "length", "content_filter"]
PartKind = Literal["content", "reasoning", "call", "arguments"]
# Errors of reading an event that does not have the form of the provider's API. orjson's errors are ValueErrors.
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError)
MOST_TOKENS = 100_000_000  # of a prompt or an answer


class AnswerPiece(NamedTuple):
    """New output of a choice."""

    choice: int
    part: Part


class Ending(NamedTuple):
    """The end of a choice."""

    choice: int
    reason: EndReason
    stopped: str | None = None  # the stop string that ended it, if the provider says it


class Counts(NamedTuple):
    """Tokens, as the provider counts them. None: it has not said."""

    prompt: int | None = None  # with those that were cached
    cached: int = 0
    output: int | None = None  # of all choices, with those of reasoning
    reasoning: int | None = None


class Question(NamedTuple):
    """A chat for a provider."""

    chat: ChatRequest
    name: str  # of the model, at the provider
    model: ModelEntry
    provider: ProviderEntry
    begun: str = ""  # the answer so far, which goes on: it is added to the messages
    first_deadline: float = math.inf  # of the first piece and of the last one, on time.monotonic()
    deadline: float = math.inf

    @property
    def plain(self) -> bool:
        """True for a text that the provider continues, without a chat template."""
        return self.chat.prompt.plain and "completions" in self.provider.accepts

    @property
    def max_tokens(self) -> int | None:
        """The most tokens of the answer, or of the rest of one that has begun."""
        wanted = self.chat.max_tokens
        return wanted if wanted is None or not self.begun else max(wanted - estimate(self.begun), 1)

    def given(self, known: tuple[str, ...]) -> dict[str, Any]:
        """Returns the sampling parameters that the request sets. Raises APIError 400 for one that is neither among
        those `known` to the API nor accepted by the provider."""
        given = {}
        for name, value in self.chat.options.sampling.items():
            if name in known or name in self.provider.accepts:
                given[name] = value
            elif value != NEUTRAL.get(name):
                raise unavailable(name)
        return given


def stream_broken(why: str) -> ProviderFailed:
    """Returns the error for a stream that is not of the provider's API, or ends too early."""
    return ProviderFailed(502, f"the provider's stream {why}; send the request again", "provider_stream_broken")


def stream_error(message: str) -> ProviderFailed:
    """Returns the error for an error event of a provider."""
    return ProviderFailed(502, f"the provider ended its stream with an error: {one_line(message)}", "provider_failed")


def piece(choice: int, kind: PartKind, text: str, call: int = -1, call_id: str = "") -> AnswerPiece:
    """Returns a part of a choice. Raises TypeError for values that JSON allows and the API does not."""
    if not isinstance(choice, int) or not isinstance(text, str) or not isinstance(call_id, str):
        raise TypeError(f"choice {choice!r} has {kind} of another type than text")
    return AnswerPiece(choice, Part(kind, text, call, call_id))


def one_line(text: str) -> str:
    return " ".join(text.split())


def counted(value: Any) -> int:
    """Returns a count of tokens as the provider has sent it, or the nearest one that can be. Raises UNREADABLE."""
    return min(max(int(value or 0), 0), MOST_TOKENS)


def estimate(text: str) -> int:
    """Returns about how many tokens a text has, for reservations, and for streams whose provider sends no count."""
    return (len(text.encode()) + 3) // 4
