"""Defines what passes between the server and a wire: the context of a request, and the valid call it becomes."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from penstock.frontend.answer import Codec, Keep
from penstock.frontend.generation import Generation, PromptPart, Updates
from penstock.frontend.http.asgi import first_value
from penstock.frontend.http.buffers import HeldBytes
from penstock.frontend.limits import RequestLimits
from penstock.frontend.registry import ModelRegistry
from penstock.frontend.served import ServedModel
from penstock.frontend.siblings import Siblings
from penstock.frontend.storage.database import Database
from penstock.frontend.store import ModelStore
from penstock.frontend.tenants.account import RequestAccount
from penstock.frontend.versions.serving import Version
from penstock.observe.model_metrics import ModelMetrics
from penstock.observe.tracing import RequestTrace

SESSION = b"x-session-id"  # requests with one id get one version during a rollout


class RequestContext(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what a wire needs, besides the body, to read a request. `for_model` adds the model that it names."""

    models: ModelRegistry
    # Returns a version of the model with a name (None: the default one), which then stays until the request ends.
    enter: Callable[[str | None], Awaitable[Version]]
    limits: RequestLimits
    id: str  # unique; it is part of the ids of the answer and of the requests sent to the engine
    created: int  # seconds since the epoch
    path: Mapping[str, str] = {}  # the parameters in the path
    headers: Sequence[tuple[bytes, bytes]] = ()  # as ASGI has them
    start: float = msgspec.field(default_factory=time.monotonic)  # when the request arrived, on time.monotonic()
    tenant: str = ""  # identifies the API key of the request; "" if the server has no API keys
    account: RequestAccount | None = None  # counts what the request uses; None: the server has no tenants
    store: ModelStore | None = None  # of models that clients may change; None: they may not
    seed: int | None = None  # used if the request has no seed; None: the request gets a random seed
    query: bytes = b""  # of the URL
    storage: Database | None = None  # None: nothing is stored
    wake_batches: Callable[[], None] = lambda: None  # called after a batch has been stored or changed
    siblings: Siblings | None = None  # None: this is the only API process
    held: HeldBytes | None = None  # the request's part of the budget of bodies; None: it is not bounded
    unread: HeldBytes | None = None  # the answer's part of the budget of answers; None: it is not bounded
    admin: bool = False  # the request has the operator's key, or needs none
    compares: bool = False  # a rollout of the model may run a copy of the request
    show: Callable[[Mapping[str, Any]], None] = lambda fields: None  # gives the request's line in the log its fields

    async def for_model(self, name: str | None) -> "ModelContext":
        """Returns the context with the model that the request names; None: the default model. Its version stays until
        the request ends. Waits while a reload holds requests back, and while the model is loaded.

        Raises APIError 404 for an unknown name, APIError 400 for a model that cannot do what the route does, APIError
        503 if there is no room for the model in time, and DeadlineExceeded.
        """
        return self.on(await self.enter(name))

    def on(self, version: Version) -> "ModelContext":
        """Returns the context with the model of a version, which the caller has entered."""
        model = version.model if self.account is None else self.account.on(version.model)
        return ModelContext(**{**msgspec.structs.asdict(self), "model": model, "metrics": version.metrics})

    def compare(self, path: str, name: str | None, body: bytes) -> None:
        """Lets the rollout of a model compare its versions on the request, if it has one."""
        if self.compares and (rollout := self.models.find(name).rollout) is not None:
            rollout.compare(path, body)

    def session_key(self) -> str:
        """Identifies the client's session, by the header X-Session-Id; "" without one."""
        session = (first_value(self.headers, SESSION) or b"")[:256].decode("latin-1")
        return f"{self.tenant} {session}" if session else ""

    def hold(self, count: int) -> None:
        """Counts stored bytes like those of the body, before they are read. Raises APIError 429 if the budget is
        spent."""
        if self.held is not None:
            self.held.add_stored(count)

    def reserve(self, count: int) -> None:
        """Counts bytes of the answer before the work that makes them. Raises APIError 429 if the budget is spent."""
        if self.unread is not None:
            self.unread.add_made(count)

    def salt(self, client_salt: str | None) -> str:
        """Returns the request's salt for the prefix cache, where only requests with equal salts share entries. It
        starts with the tenant or its group, so that others never share entries."""
        owner = self.tenant if self.account is None else self.account.salt
        return f"{owner}:{client_salt or ''}" if owner else client_salt or ""


class ModelContext(RequestContext, frozen=True, kw_only=True):
    """The context of a request for one model."""

    model: ServedModel
    metrics: ModelMetrics  # of the model


class Call(NamedTuple):
    """Holds a valid request: the model, the prompts to run and the codec that encodes the answer."""

    context: ModelContext
    parts: tuple[PromptPart, ...]
    codec: Codec
    stream: bool  # True: the answer is a stream of events
    operation: str  # OpenTelemetry's name for metrics: "chat" or "text_completion"
    keep: Keep | None = None  # stores a complete answer before its end is sent
    headers: Mapping[str, str] = MappingProxyType({})  # of the answer

    def generation(self, start: float, request_id: str = "", trace: RequestTrace | None = None) -> Updates:
        """Returns the output of the model's engine, or of its provider. See Generation."""
        model, metrics = self.context.model, self.context.metrics
        if model.remote is not None:
            return model.remote.generation(self, start, request_id, trace)
        return Generation(model, self.parts, metrics, self.operation, start, request_id, trace)
