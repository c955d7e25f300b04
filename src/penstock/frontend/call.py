"""A request that has been read and found valid: what the engine is to do, and who spells the answer."""

from dataclasses import dataclass
from typing import NamedTuple

from penstock.frontend.answer import Codec
from penstock.frontend.generation import Part
from penstock.frontend.limits import RequestLimits
from penstock.frontend.served import ServedModel


@dataclass(frozen=True, slots=True)
class Context:
    """What a codec needs to know beside the body."""

    model: ServedModel
    limits: RequestLimits
    id: str  # unique; engine requests and the answer's id are made of it
    created: int  # seconds since the epoch
    tenant: str = ""  # of the API key, empty where there are no keys
    seed: int | None = None  # of requests that name none; None: each draws its own

    def salt(self, given: str | None) -> str:
        """The prefix cache's salt: tenants never share entries, whatever salt they name."""
        return f"{self.tenant}:{given or ''}" if self.tenant else given or ""


class Call(NamedTuple):
    parts: tuple[Part, ...]
    codec: Codec
    stream: bool
    operation: str  # for metrics, by OpenTelemetry's names: "chat" or "text_completion"
