"""All live requests, and the queue that each of their choices is in."""

from penstock.schedule.config import SchedulerConfig
from penstock.schedule.fairness.accounting import StepAccounts
from penstock.schedule.fairness.fair_queue import FairQueue
from penstock.schedule.policy import Policy
from penstock.schedule.queues import WaitingQueue, after, dequeue, enqueue
from penstock.schedule.sequence import Phase, Request, Sequence


class LiveRequests:
    """Choices are waiting, running, or held back until the first choice has computed the prompt they share."""

    def __init__(self, policy: Policy, config: SchedulerConfig, block_size: int) -> None:
        """With `config.tenants`, they share the engine, and what each request uses is measured."""
        self._policy = policy
        self.requests: dict[str, Request] = {}
        self.fair: FairQueue | None = None
        if config.tenants:
            accounts = StepAccounts(block_size)
            self.fair = FairQueue(policy, config.max_num_seqs, config.max_num_batched_tokens, accounts)
        self.waiting: WaitingQueue | FairQueue = WaitingQueue(policy) if self.fair is None else self.fair
        self.running: list[Sequence] = []  # in order

    def add(self, request: Request) -> None:
        """The first choice waits to run; the others are held back."""
        self.requests[request.message.request_id] = request
        request.held_back.extend(request.choices.values())
        self._queue(request, 1)

    def start(self, sequence: Sequence, computed: int) -> None:
        """Move the first waiting sequence, of which `computed` tokens are cached, to those that run."""
        self.waiting.start(sequence, computed)
        sequence.phase = Phase.RUNNING
        enqueue(self.running, sequence)
        sequence.request.started = True

    def victim(self, sequence: Sequence) -> Sequence | None:
        """The running sequence that gives way to this one first. None if all that run come before it."""
        later = after(self.running, sequence)
        if not later:
            return None
        return self._policy.victim(later) if self.fair is None else self.fair.victim(later, self.running)

    def preempt(self, victim: Sequence, taker: Sequence | None) -> None:
        """Move a running sequence back to the waiting queue. `taker`, the sequence that gets its blocks or its place in
        the batch, stays before it for good."""
        dequeue(self.running, victim)
        if taker is not None:
            if not taker.keeps_order:
                self.waiting.keep(taker)
            if self.fair is not None and victim.order < taker.order:
                victim.order = self.fair.behind(victim, taker)
        self.waiting.stopped(victim)
        victim.phase = Phase.WAITING
        self.waiting.push(victim)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from its queue, and its request with the last choice."""
        request = sequence.request
        match sequence.phase:
            case Phase.RUNNING:
                dequeue(self.running, sequence)
                self.waiting.stopped(sequence)
            case Phase.WAITING:
                self.waiting.remove(sequence)
            case _:
                request.held_back.remove(sequence)
        sequence.phase = Phase.DONE
        del request.choices[sequence.choice]
        if not request.choices:
            del self.requests[request.message.request_id]
        elif len(request.held_back) == len(request.choices):
            # The choice that was to compute the prompt is gone: the next one computes it.
            self._queue(request, 1)

    def release(self, request: Request) -> None:
        """The prompt is computed: queue the choices held back."""
        if request.held_back:
            self._queue(request, len(request.held_back))

    def _queue(self, request: Request, count: int) -> None:
        for sequence in request.held_back[:count]:
            sequence.phase = Phase.WAITING
            self.waiting.push(sequence)
        del request.held_back[:count]
