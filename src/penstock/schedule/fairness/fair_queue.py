"""The waiting sequences of several tenants.

The order has three levels: the class, then the tenant that has been served least, then the order of policy.py. A
sequence's place moves while it waits, since service is counted at every step. It becomes final when the sequence starts
or preempts another one, as for every policy.
"""

import math
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Items

from penstock.messages import SequenceResult, TenantShare
from penstock.schedule.fairness.accounting import StepAccounts
from penstock.schedule.fairness.service import ServiceCounters, TenantService
from penstock.schedule.policy import Policy
from penstock.schedule.queues import dequeue, enqueue
from penstock.schedule.sequence import Phase, Sequence, SequenceUsage
from penstock.schedule.step import Outstanding

Order = tuple[float, ...]

_NO_SHARE = TenantShare()
_UNKNOWN = math.inf  # the level of a sequence whose place may still change: such sequences follow those that have one
ENTRY_TOKENS = 64  # prompt tokens of others in a step in which a tenant with little to do comes to its place
PRESENT_SECONDS = 60.0  # after its last sequence, for which steps of classes with higher ranks stay short for a class
_OVERDUE = -1.0  # the rank of a sequence that has waited for its class's max_wait


class FairQueue:
    """A WaitingQueue that shares the batch among tenants. `order` of a sequence is (rank, level, *policy's key, id)."""

    def __init__(self, policy: Policy, places: int, step_tokens: int, accounts: StepAccounts) -> None:
        """At most `places` sequences run at a time, and a step computes at most `step_tokens`. `accounts` are notified
        whether there is work."""
        self.now = 0.0  # seconds
        self.counters = ServiceCounters()
        self._accounts = accounts
        self._policy = policy
        self._places = places
        self._length = 0
        self._running = Counter[int]()  # sequences that run, by the rank of their class
        self._present = dict[int, float]()  # until when steps are kept short for a class, by its rank
        self._entering: TenantService | None = None  # see `begin`
        self._entry_rank = 0  # of its sequences that enter
        self._weights = 1.0  # of all tenants with sequences, when a step was planned with several of them
        self._half_step = step_tokens // 2
        self._short_until = -math.inf  # until when a tenant over its part gets no more of a step than that

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """Yields all sequences in the order of this moment."""
        lines = (line for tenant in self.counters.tenants.values() for line in tenant.lines.values())
        return iter(sorted((sequence for line in lines for sequence in line), key=self.place))

    def push(self, sequence: Sequence) -> None:
        message = sequence.request.message
        tenant, rank = self.counters.of(message.tenant), _share(sequence).rank
        if not sequence.keeps_order:
            sequence.usage = sequence.usage or SequenceUsage()
            tenant.set_share(_share(sequence))
            if not tenant.waiting:
                self.counters.lift(tenant)
            sequence.order = (rank, _UNKNOWN, *self._policy.sort_key(sequence.request), sequence.id)
        self.counters.live.add(message.tenant)
        self._accounts.work(True)
        enqueue(tenant.lines.setdefault(rank, []), sequence)
        tenant.waiting += 1
        self._length += 1

    def peek(self) -> Sequence | None:
        """Return the sequence to start next. None if all that wait are of classes that must leave places free."""
        if self._entering is not None and (line := self._entering.lines[self._entry_rank]) and self._may_start(line[0]):
            return line[0]
        first: Sequence | None = None
        least: Order = (math.inf,)
        for name in self.counters.live:
            tenant = self.counters.tenants[name]
            for line in tenant.lines.values():
                if line and self._may_start(line[0]) and (place := self.place(line[0])) < least:
                    first, least = line[0], place
        return first

    def start(self, sequence: Sequence, computed: int) -> None:
        """Take a sequence whose first `computed` tokens are cached out of the queue: it runs from now on."""
        tenant = self._tenant(sequence)
        self.keep(sequence)
        self._take(sequence, tenant)
        tenant.running += 1
        self._running[rank := _share(sequence).rank] += 1
        self._present[rank] = math.inf
        self.counters.take_turn(tenant)
        if not sequence.preemptions and self.counters.contended:
            tenant.served += tenant.input_rate * (len(sequence.tokens) - computed)

    def stopped(self, sequence: Sequence) -> None:
        """Note that a running sequence has ended or is preempted."""
        tenant = self._tenant(sequence)
        tenant.running -= 1
        self._running[rank := _share(sequence).rank] -= 1
        if not self._running[rank]:
            self._present[rank] = self.now + PRESENT_SECONDS
        if sequence.usage is not None:
            sequence.usage.reached = max(sequence.usage.reached, sequence.computed)
        self._left(sequence, tenant)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that ends while it waits."""
        tenant = self._tenant(sequence)
        self._take(sequence, tenant)
        self._left(sequence, tenant)

    def charge(self, step: Outstanding, results: Items[SequenceResult], now: float) -> None:
        """Charge tenants for the output and the time of a step, before its results are applied."""
        spent = self._accounts.note(step, now)
        if not self.counters.contended:
            return
        for sequence, given, seconds in zip(step.sequences, results, spent, strict=True):
            if sequence.phase is not Phase.DONE:
                tenant = self.counters.tenants[sequence.request.message.tenant]
                tenant.served += tenant.output_rate * len(given.token_ids) + tenant.step_rate * seconds

    def place(self, sequence: Sequence) -> Order:
        """Return where the sequence is in the order of this moment."""
        if sequence.keeps_order:
            return sequence.order
        share, (rank, _, *rest) = _share(sequence), sequence.order
        if share.max_wait and self.now - sequence.request.arrival >= share.max_wait:
            return (_OVERDUE, 0.0, *rest)
        return (rank, self.counters.level(self._tenant(sequence)), *rest)

    def keep(self, sequence: Sequence) -> None:
        """Make the place of a waiting sequence final."""
        if sequence.keeps_order:
            return
        line = self._tenant(sequence).lines[_share(sequence).rank]
        dequeue(line, sequence)
        sequence.order, sequence.keeps_order = self.place(sequence), True
        enqueue(line, sequence)

    def begin(self, now: float) -> None:
        """Note that a step is planned, before anything else is done for it.

        Choose the tenant whose sequences enter in this step ahead of all others: the one that has been served least,
        if all its sequences fit into its part of the batch. Those of others that were preempted have places of an
        earlier time, and may come before them in the order.
        """
        self.now, self._entering = now, None
        if not self._length or not self.counters.contended or (first := self.peek()) is None:
            return
        live = [self.counters.tenants[name] for name in self.counters.live]
        self._weights = math.fsum(tenant.share.weight for tenant in live)
        heads = [(tenant, tenant.head) for tenant in live if tenant.waiting]
        tenant, head = min(heads, key=lambda each: (_share(each[1]).rank, self.counters.level(each[0])))
        may_enter = _share(head).claims and self._fits(tenant) and self._may_start(head)
        if may_enter and self.place(head)[0] <= self.place(first)[0]:
            self._entering, self._entry_rank, self._short_until = tenant, _share(head).rank, now + PRESENT_SECONDS

    def claim(self, running: Items[Sequence], blocked: Sequence | None) -> tuple[Sequence, list[Sequence]] | None:
        """Return a waiting sequence, and the running ones that give their places to it and to those of its tenant. None
        if there is no claim.

        A class takes a place from classes with higher ranks. Within a class, a tenant all of whose sequences fit into
        its part of the batch takes places from the tenant that is most over its part. If there were places but no KV
        blocks for the first waiting sequence, `blocked`, blocks count instead. So tenants cannot take from each other
        in turn, and each keeps at least one place. Others get places as they become free.
        """
        if (taker := self.peek()) is None:
            return None
        rank, own, free = _share(taker).rank, self._tenant(taker), self._places - len(running)
        enters, by_blocks = own is self._entering, free > 0 and taker is blocked
        count = 1 if by_blocks else (len(own.lines[rank]) if enters else 1) - free
        if count < 1:
            return None
        if any(number and lower > rank for lower, number in self._running.items()):
            return taker, [each for each in reversed(running) if _share(each).rank > rank][:count]
        if not enters:
            return None
        used = Counter[TenantService]()
        for each in running:
            used[self._tenant(each)] += each.slots if by_blocks else 1
        whole = used.total() if by_blocks else self._places

        def over(tenant: TenantService) -> float:
            return used[tenant] - tenant.part_of(whole, self._weights)

        equals = [each for each in running if _share(each).rank == rank]
        most = max((self._tenant(each) for each in equals), key=over, default=None)
        if most is None or most is own or over(most) < 1 or most.running < 2 or over(own) > 0:
            return None
        count = min(count, int(over(most)), most.running - 1)
        return taker, [each for each in reversed(equals) if self._tenant(each) is most][:count]

    def cap(self, sequence: Sequence) -> int | None:
        """Return how many prompt tokens a step may have of all sequences that are to keep it short for others. None if
        this one is not among them.

        A request waits for the step that runs when it comes. So while tenants with little to do have come lately, one
        that is over its part gets half of a step.
        """
        share = _share(sequence)
        if share.step_tokens and any(rank < share.rank and self.now < end for rank, end in self._present.items()):
            return share.step_tokens
        if self._entering is not None and self._tenant(sequence) is not self._entering:
            return ENTRY_TOKENS
        if self.now < self._short_until and not self._fits(self._tenant(sequence)):
            return self._half_step
        return None

    def behind(self, victim: Sequence, taker: Sequence) -> Order:
        """Return the place of a sequence that gives its place to one after it: behind that one, and where its tenant is
        now. So it can take nothing back."""
        rank, _, *rest = victim.order
        return max((rank, self.counters.level(self._tenant(victim)), *rest), (*taker.order, victim.id))

    def victim(self, later: Items[Sequence], running: Items[Sequence]) -> Sequence:
        """Return which of `later` loses its KV blocks: of the last class, the tenant that is most over its part of the
        blocks, and its last sequence."""
        slots = Counter[str]()
        for sequence in running:
            slots[sequence.request.message.tenant] += sequence.slots
        last = max(_share(each).rank for each in later)

        def over(sequence: Sequence) -> float:
            name = sequence.request.message.tenant
            return slots[name] / self.counters.tenants[name].share.kv_share

        return max((each for each in later if _share(each).rank == last), key=lambda each: (over(each), each.order))

    def _may_start(self, sequence: Sequence) -> bool:
        share = _share(sequence)
        if not share.held_back:
            return True
        own = sum(count for rank, count in self._running.items() if rank >= share.rank)
        return own < max(self._places - share.held_back, 1)

    def _fits(self, tenant: TenantService) -> bool:
        """True if all sequences of the tenant fit into its part of the batch."""
        return tenant.running + tenant.waiting <= tenant.part_of(self._places, self._weights)

    def _tenant(self, sequence: Sequence) -> TenantService:
        return self.counters.tenants[sequence.request.message.tenant]

    def _take(self, sequence: Sequence, tenant: TenantService) -> None:
        dequeue(tenant.lines[_share(sequence).rank], sequence)
        tenant.waiting -= 1
        self._length -= 1

    def _left(self, sequence: Sequence, tenant: TenantService) -> None:
        if not tenant.waiting and not tenant.running:
            self.counters.forget_idle(sequence.request.message.tenant)
            self._accounts.work(bool(self.counters.live))


def _share(sequence: Sequence) -> TenantShare:
    return sequence.request.message.share or _NO_SHARE
