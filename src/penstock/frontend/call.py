"""A request that has been read and found valid."""

from dataclasses import dataclass
from typing import NamedTuple

from penstock.frontend.answer import Codec
from penstock.frontend.generation import PromptPart
from penstock.frontend.limits import RequestLimits
from penstock.frontend.served import ServedModel


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What a dialect needs besides the body."""

    model: ServedModel
    limits: RequestLimits
    id: str  # unique; the ids of the engine's requests and of the answer contain it
    created: int  # seconds since the epoch
    tenant: str = ""  # identifies the API key; "" without keys
    seed: int | None = None  # for requests without a seed; None: each gets a random one

    def salt(self, given: str | None) -> str:
        """The salt for the prefix cache. Tenants never share cache entries, whatever salt they send."""
        return f"{self.tenant}:{given or ''}" if self.tenant else given or ""


class Call(NamedTuple):
    """What a request asks for, and the codec for its answer."""

    parts: tuple[PromptPart, ...]
    codec: Codec
    stream: bool
    operation: str  # OpenTelemetry's name for metrics: "chat" or "text_completion"
