"""What each tenant has been served.

The counters are those of VTC (Sheng et al., Fairness in Serving Large Language Models, arXiv 2401.00588, algorithm 2).
A tenant's service is the price of its computed tokens, divided by its weight. The tenant that has been served least
comes first. A tenant that returns is lifted to the least of those that wait, so that it cannot save up service.

Two tenants that both wait throughout an interval get service in it whose difference is at most
2 max(input price * longest prompt, output price * tokens of a batch), for weights of 1 (theorem 4.4 there). A quantum
adds its size.
"""

import math

from penstock.messages import TenantShare
from penstock.schedule.sequence import Sequence


class TenantService:
    """One tenant: its service, its waiting sequences and the number of those that run."""

    def __init__(self) -> None:
        self.set_share(TenantShare())
        self.served = 0.0  # price of its tokens / its weight
        self.lines: dict[int, list[Sequence]] = {}  # waiting sequences by the rank of their class, each line in order
        self.waiting = 0
        self.running = 0
        self.returned = False  # it had nothing that waited, and has started nothing since

    @property
    def head(self) -> Sequence:
        """The first of the waiting sequences, of which there is at least one."""
        return self.lines[min(rank for rank, line in self.lines.items() if line)][0]

    def set_share(self, share: TenantShare) -> None:
        """Charge for service as `share`, that of its newest request, says."""
        self.share = share
        self.input_rate, self.output_rate = share.input_price / share.weight, share.output_price / share.weight
        self.step_rate = 1000 * share.step_price / share.weight  # of a second

    def part_of(self, whole: float, weights: float) -> float:
        """Return the part of a whole that its weight gives it among all `weights`; at least 1."""
        return max(1.0, whole * self.share.weight / weights)


class ServiceCounters:
    """The service of all tenants, and whose turn it is."""

    def __init__(self) -> None:
        self.tenants: dict[str, TenantService] = {}
        self.live: set[str] = set()  # tenants with sequences that wait or run
        self._last: TenantService | None = None  # the tenant whose sequence left the queue last
        self._turn: TenantService | None = None  # the tenant that has a quantum
        self._turn_began = 0.0  # at this service

    @property
    def contended(self) -> bool:
        """True if there are several tenants. Otherwise there is nothing to count."""
        return len(self.tenants) > 1

    def of(self, name: str) -> TenantService:
        tenant = self.tenants.get(name)
        if tenant is None:
            tenant = self.tenants[name] = TenantService()
        return tenant

    def lift(self, tenant: TenantService) -> None:
        """Raise the service of a tenant that had no waiting request, before its first one waits. It comes before equal
        tenants, or it would wait for a step only to see them charged."""
        waiting = [other.served for other in self.tenants.values() if other.waiting]
        last = 0.0 if self._last is None else self._last.served
        tenant.served = max(tenant.served, min(waiting, default=last))
        tenant.returned = True

    def level(self, tenant: TenantService) -> float:
        """Return the service that the tenant's place in the queue depends on. During its quantum it does not grow, and
        comes before equal ones."""
        turn = self._has_turn(tenant)
        served = self._turn_began if turn else tenant.served
        return math.nextafter(served, -math.inf) if turn or tenant.returned else served

    def take_turn(self, tenant: TenantService) -> None:
        """Note that a sequence of the tenant starts."""
        if not self._has_turn(tenant):
            self._turn, self._turn_began = tenant, tenant.served
        self._last, tenant.returned = tenant, False

    def _has_turn(self, tenant: TenantService) -> bool:
        return tenant is self._turn and tenant.served < self._turn_began + tenant.share.quantum

    def forget_idle(self, name: str) -> None:
        """Note that a tenant has no sequences. Its counter stays, unless counters of very many tenants are kept."""
        self.live.discard(name)
        if len(self.tenants) > MOST_TENANTS:
            del self.tenants[name]


MOST_TENANTS = 16_384  # idle tenants' counters are dropped beyond this number
