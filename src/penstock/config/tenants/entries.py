"""What a tenants file may contain. `file.py` reads it."""

import datetime
from collections.abc import Mapping

import msgspec

from penstock.messages import TenantShare


class FilePart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A part of the file. An unknown field is an error."""


class KeyEntry(FilePart, frozen=True):
    """An API key of a tenant. The key itself is not kept."""

    name: str  # shown in logs and in the ledger
    id: str  # the part of the key by which it is found
    hash: str  # see keys.py
    expires: datetime.date | None = None  # the last day on which it is valid, in UTC
    models: tuple[str, ...] = ()  # names of the models that it may use; none: all
    wires: tuple[str, ...] = ()  # APIs that it may use; none: all
    admin: bool = False  # it may use the operator's routes

    def expired(self, today: datetime.date) -> bool:
        return self.expires is not None and today > self.expires


class QuotaLimits(FilePart, frozen=True):
    """The limits of a tenant. None: there is no such limit. Tokens are those of prompts and outputs together."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    budget_per_month: float | None = None  # in the currency of the prices


class TenantEntry(FilePart, frozen=True):
    """A tenant."""

    weight: float = 1.0
    scheduling_class: str = msgspec.field(default="standard", name="class")
    group: str = ""  # tenants of a group share prefix cache entries
    kv_share: float = 1.0  # of the KV blocks, see TenantShare
    regions: tuple[str, ...] = ()  # that its requests stay in; (): they may go anywhere
    limits: QuotaLimits = QuotaLimits()
    audit_text: bool = False  # the audit log has the texts of this tenant's requests, not only their digests
    keys: tuple[KeyEntry, ...] = ()


class ClassEntry(FilePart, frozen=True):
    """A class of requests."""

    rank: int = 0  # classes with lower ranks come first
    reserved: int = 0  # places in the batch that classes with higher ranks leave free
    max_wait: float = 0.0  # seconds after which a waiting request comes first; 0: no limit
    step_tokens: int = 0  # most prompt tokens of the class in a step beside a class with a lower rank; 0: no limit


class PriceEntry(FilePart, frozen=True):
    """Prices for a million tokens, from a day on."""

    since: datetime.date
    input: float
    output: float
    cached: float = 0.0  # for tokens of prompts that were in the prefix cache

    def cost(self, computed: int, cached: int, output: int) -> float:
        """Return the price of so many tokens of prompts, computed and cached, and of output."""
        return (computed * self.input + cached * self.cached + output * self.output) / 1e6


class FairnessEntry(FilePart, frozen=True):
    """The price of service by which tenants take turns, see TenantShare."""

    input_price: float = 1.0
    output_price: float = 2.0
    step_price: float = 0.0
    quantum: float = 0.0
    claims: bool = True


class TenantsFile(FilePart, frozen=True):
    """The whole file."""

    tenants: dict[str, TenantEntry] = {}
    anonymous: TenantEntry | None = None  # the tenant of requests without a key; None: they are refused
    classes: dict[str, ClassEntry] = {}
    batch_class: str = "batch"  # of the requests of batches
    fairness: FairnessEntry = FairnessEntry()
    currency: str = "USD"
    prices: tuple[PriceEntry, ...] = ()
    show_cost: bool = False  # usage in answers of the OpenAI API has the cost
    watts: float = 0.0  # that the machine takes while it computes, if it has no meter

    @property
    def known_classes(self) -> Mapping[str, ClassEntry]:
        """The classes of the file, and `standard` and `batch` if it has none of these names."""
        last = max((entry.rank for entry in self.classes.values()), default=0)
        return {"standard": ClassEntry(), "batch": ClassEntry(rank=last + 1), **self.classes}

    @property
    def everyone(self) -> Mapping[str, TenantEntry]:
        """All tenants by name, with the anonymous one."""
        return self.tenants if self.anonymous is None else {**self.tenants, ANONYMOUS: self.anonymous}

    def share(self, tenant: TenantEntry, *, batch: bool = False) -> TenantShare:
        """Return the share of the engine that a tenant's requests, or those of its batches, have."""
        classes = self.known_classes
        own = classes[self.batch_class if batch else tenant.scheduling_class]
        return TenantShare(
            weight=tenant.weight,
            rank=own.rank,
            held_back=sum(each.reserved for each in classes.values() if each.rank < own.rank),
            max_wait=own.max_wait,
            step_tokens=own.step_tokens,
            kv_share=tenant.kv_share,
            **msgspec.structs.asdict(self.fairness),
        )

    def price(self, day: datetime.date) -> PriceEntry | None:
        """Return the prices of a day, or None if there are none."""
        return max((each for each in self.prices if each.since <= day), key=lambda each: each.since, default=None)


ANONYMOUS = "anonymous"
