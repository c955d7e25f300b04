"""The account of one request: what it may use, and what it has used."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace

from penstock.config.tenants.entries import PriceEntry
from penstock.config.tenants.file import today
from penstock.frontend.http.asgi import Headers
from penstock.frontend.served import ServedModel
from penstock.frontend.tenants.grant import Grant
from penstock.frontend.tenants.ledger import LedgerRow
from penstock.frontend.tenants.quotas import NANO, Amounts
from penstock.messages import ComputeUsage, EngineClient, EngineError, GenerateRequest, RequestRejected, TokenDelta

if TYPE_CHECKING:
    from penstock.frontend.generation import Usage
    from penstock.frontend.tenants.office import TenantOffice

_NO_USE = ComputeUsage()


class EngineUse:
    """What one request to the engine has used, of which a client's request may have several."""

    def __init__(self, request: GenerateRequest) -> None:
        self.name, self.prompt = request.request_id, len(request.prompt_ids)
        self.most = len(request.prompt_ids) + request.n * request.sampling.max_tokens
        self.pooled = request.pooling is not None
        self.open = set(range(request.first_choice, request.first_choice + request.n))  # choices that have not ended
        self.outputs: dict[int, int] = {}  # tokens by choice
        self.first = 0.0  # when the first token came
        self.cached = 0
        self.queued = 0.0  # seconds
        self.usage: list[ComputeUsage] = []
        self.started = False

    def note(self, delta: TokenDelta) -> None:
        if not self.started and (delta.token_ids or delta.pooled):
            self.started, self.first, self.cached = True, time.monotonic(), delta.cached_tokens
        if not self.pooled:
            self.outputs[delta.choice] = delta.offset + len(delta.token_ids)
        if delta.finish_reason is not None:
            self.open.discard(delta.choice)
        if (timing := delta.timing) is not None:
            self.queued = timing.queued
            if timing.usage is not None:
                self.usage.append(timing.usage)
                self.started = self.started or timing.usage.computed > 0

    def amounts(self, price: PriceEntry | None) -> Amounts:
        """What was used."""
        if not self.started:
            return Amounts()
        output = sum(self.outputs.values())
        cost = 0.0 if price is None else price.cost(self.prompt - self.cached, self.cached, output)
        return Amounts(self.prompt + output, round(cost * NANO))


class RequestAccount:
    """What one request of a client may use, and has used."""

    def __init__(
        self, office: "TenantOffice", grant: Grant, wire: str, answer_id: str, headers: Headers, *, batch: bool = False
    ) -> None:
        """`headers` are those of the answer. `batch`: the request is a line of a batch."""
        self.grant, self.wire, self.id = grant, wire, answer_id
        self.cost = 0  # billionths of the currency
        self.asked = False  # it has asked for the engine
        self.answered: Usage | None = None  # what the answer says of its tokens
        self._office, self._headers = office, headers
        self._share = grant.file.share(grant.entry, batch=batch)
        self._price = grant.file.price(today())
        self.shown_price = self._price if grant.file.show_cost else None
        self._began, self._start = time.time(), time.monotonic()
        self._uses: list[EngineUse] = []
        self._added: Headers = []  # to the headers of the answer
        self._used: dict[str, Amounts] = {}  # by the names of uses that have ended
        self._model = self._version = ""
        self._closing: dict[str, Any] | None = None  # what `close` was given
        self._dropped = False

    @property
    def salt(self) -> str:
        return self.grant.salt

    def beside(self) -> "RequestAccount":
        """Returns an account for a summary that the request needs: its tokens count, but it is no request more."""
        other = RequestAccount(self._office, self.grant, self.wire, f"{self.id}-s", [])
        other.asked, other._share = True, self._share
        return other

    async def usage(self, since: float) -> list[dict[str, Any]]:
        """Returns what the tenant has used by hours since a time. With an operator's key: what all have."""
        operator = self.grant.key is not None and self.grant.key.admin
        return await self._office.usage("" if operator else self.grant.tenant, since)

    def on(self, model: ServedModel) -> ServedModel:
        """Returns the model with an engine whose requests are counted here. Raises APIError 403."""
        self.grant.check_model(model.names)
        if model.remote is not None:
            self.grant.check_region("the provider", model.remote.provider.entry.region)
        self._model, self._version = model.name, model.fingerprint
        return model.with_client(cast(EngineClient, AccountedClient(model.client, self)))

    async def reserve(
        self, request: GenerateRequest, prompt: int | None = None, price: PriceEntry | None = None
    ) -> EngineUse:
        """Reserves what a request to the engine may use. A request to a provider has about `prompt` tokens, at a
        `price` of its own. Raises APIError 429 and 503."""
        use = EngineUse(request)
        if prompt is not None:
            use.prompt, use.most = prompt, prompt + use.most
        if price is not None:
            self._price = price
            self.shown_price = price if self.grant.file.show_cost else None
        cost = 0.0 if self._price is None else self._price.cost(use.prompt, 0, use.most - use.prompt)
        first, self.asked = not self.asked, True
        headers = await self._office.reserve(use.name, self.grant, Amounts(use.most, round(cost * NANO), int(first)))
        if first:
            self._added = headers
            self._headers += headers
        self._uses.append(use)
        return use

    def request(self, request: GenerateRequest) -> GenerateRequest:
        return replace(request, share=self._share, regions=self.grant.entry.regions)

    def ended(self, use: EngineUse, client: EngineClient) -> None:
        """Settles a request to the engine. If its client has gone, the engine says what it used when it has stopped."""
        if use.open and self._office.watch(client, use, self):
            return
        self.settle(use)

    def settle(self, use: EngineUse) -> None:
        self._used[use.name] = used = use.amounts(self._price)
        self.cost += used.money
        if self._closing is not None:
            self._finish()

    def close(self, **fields: Any) -> None:
        """Writes the row of the ledger when the engine has said what all was used, with `fields` that are known only
        now. A request that did not ask for the engine has none."""
        self._closing = fields if self.asked else None
        self._finish()

    def leave(self, request_id: str, route: str, error: str) -> None:
        """Ends the account because another model is tried: with a row if the first one has computed something."""
        for header in self._added:
            self._headers.remove(header)
        if any(use.started for use in self._uses):
            self.close(request_id=request_id, route=route, status=200, error=error)
        else:
            self.drop()

    def drop(self) -> None:
        """Gives back what was reserved. The request is tried again, and has no row yet."""
        self._closing, self._dropped = {}, True
        self._finish()

    def _finish(self) -> None:
        if self._closing is None or self._office.watches(self):
            return
        uses, self._uses, fields, self._closing = self._uses, [], self._closing, None
        if self._dropped:
            self._office.finish(self.grant, None, dict.fromkeys(self._used, Amounts()))
            return
        usage = [each for use in uses for each in use.usage] or [_NO_USE]
        started = [use for use in uses if use.started]
        first = min((use.first for use in started if use.first), default=0.0)
        seconds, watts = sum(each.step_seconds for each in usage), self.grant.file.watts
        row = LedgerRow(
            id=self.id,
            began=self._began,
            tenant=self.grant.tenant,
            key=self.grant.key_name,
            model=self._model,
            version=self._version,
            wire=self.wire,
            prompt=sum(use.prompt for use in started),
            cached=sum(use.cached for use in started),
            computed=sum(each.computed for each in usage),
            output=sum(sum(use.outputs.values()) for use in started),
            reasoning=0 if self.answered is None else self.answered.reasoning_tokens or 0,
            rejected=sum(each.rejected for each in usage),
            repeated=sum(each.repeated for each in usage),
            step_ms=1000 * seconds,
            block_seconds=sum(each.block_seconds for each in usage),
            joules=watts * seconds,
            energy="estimate" if watts else "none",
            queue_ms=1000 * max((use.queued for use in uses), default=0.0),
            ttft_ms=1000 * (first - self._start) if first else 0.0,
            total_ms=1000 * (time.monotonic() - self._start),
            nano=self.cost,
            currency=self.grant.file.currency if self._price is not None else "",
            **fields,
        )
        self._office.finish(self.grant, row, self._used)


class AccountedClient:
    """An EngineClient whose requests are counted by an account. All else is as that of the client itself."""

    def __init__(self, client: EngineClient, account: RequestAccount) -> None:
        self._client, self._account = client, account

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, request: GenerateRequest, gather: int = 1) -> AsyncGenerator[TokenDelta, None]:
        """See EngineClient. Also raises APIError 429 if a limit of the tenant is reached."""
        account = self._account
        use = await account.reserve(request)
        note = use.note
        try:
            deltas = cast(AsyncGenerator[TokenDelta, None], self._client.generate(account.request(request), gather))
            async with aclosing(deltas):
                async for delta in deltas:
                    note(delta)
                    yield delta
        except (RequestRejected, EngineError):
            use.open.clear()  # the engine has nothing of it that is still to come
            raise
        finally:
            account.ended(use, self._client)
