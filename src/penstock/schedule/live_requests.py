"""All live requests, and the queue that each of their choices is in."""

from penstock.schedule.policy import Policy
from penstock.schedule.queues import WaitingQueue, after, dequeue, enqueue
from penstock.schedule.sequence import Phase, Request, Sequence
from penstock.schedule.step import Outstanding


class LiveRequests:
    """Choices are waiting, running, or held back until the first choice has computed the prompt they share."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue(policy)
        self.running: list[Sequence] = []  # in order

    def add(self, request: Request) -> None:
        """The first choice waits to run; the others are held back."""
        self.requests[request.message.request_id] = request
        request.held_back.extend(request.choices.values())
        self._queue(request, 1)

    def start(self) -> Sequence:
        """Move the first waiting sequence to those that run."""
        sequence = self.waiting.pop()
        sequence.phase = Phase.RUNNING
        sequence.keeps_order = True
        enqueue(self.running, sequence)
        sequence.request.started = True
        return sequence

    def victim(self, sequence: Sequence) -> Sequence | None:
        """The running sequence that gives way to this one first. None if all that run come before it."""
        later = after(self.running, sequence)
        return self._policy.victim(later) if later else None

    def preempt(self, victim: Sequence, taker: Sequence | None) -> None:
        """Move a running sequence back to the waiting queue. `taker`, the sequence that gets its blocks or its place in
        the batch, stays before it for good."""
        if taker is not None:
            taker.keeps_order = True
        dequeue(self.running, victim)
        victim.phase = Phase.WAITING
        self.waiting.push(victim)

    def charge(self, step: Outstanding) -> None:
        """Charge the policy for a step whose result has come. The order of what waits may change."""
        if self._policy.charge(step):
            self.waiting.reorder()

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from its queue, and its request with the last choice."""
        request = sequence.request
        match sequence.phase:
            case Phase.RUNNING:
                dequeue(self.running, sequence)
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

    def check(self) -> None:
        """Prove that every choice is in the queue of its phase, and that the queues are in order."""
        by_phase: dict[Phase, list[Sequence]] = {phase: [] for phase in Phase}
        for request in self.requests.values():
            for sequence in request.choices.values():
                by_phase[sequence.phase].append(sequence)
        for phase, queue in ((Phase.RUNNING, self.running), (Phase.WAITING, list(self.waiting))):
            if queue != sorted(by_phase[phase], key=lambda s: s.order):
                raise RuntimeError(f"the queue of {phase.value} sequences is not in order, or lacks one")
        held_back = [s for request in self.requests.values() for s in request.held_back]
        if held_back != by_phase[Phase.HELD_BACK] or by_phase[Phase.DONE]:
            raise RuntimeError("a sequence's phase differs from its queue, or it has ended and is still there")

    def _queue(self, request: Request, count: int) -> None:
        for sequence in request.held_back[:count]:
            sequence.phase = Phase.WAITING
            self.waiting.push(sequence)
        del request.held_back[:count]
