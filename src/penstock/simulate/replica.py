"""A replica: the production engine loop and scheduler on the simulator's clock."""

from collections.abc import Callable
from typing import Literal, cast

from penstock.engine.core import EngineCore
from penstock.engine.link.wire import Abort, Command, Step
from penstock.engine.queue import RequestQueue
from penstock.messages import Capacity, EngineStats
from penstock.schedule import Scheduler
from penstock.simulate.batching import BatchScheduler
from penstock.simulate.clock import EventClock
from penstock.simulate.costed import NEVER, CostedExecutor, Machine
from penstock.simulate.traffic.request import SimulatedRequest

ReplicaState = Literal["starting", "ready", "draining", "dead"]


class SimulatedReplica:
    """One engine. The simulation calls `step` when it is due. `in_flight` has the requests that were sent to it."""

    def __init__(
        self,
        name: str,
        group: str,
        model: str,
        region: str,
        scheduler: Scheduler | BatchScheduler,
        executor: CostedExecutor,
        machine: Machine,
        queue: RequestQueue,
        clock: EventClock,
        post: Callable[["SimulatedReplica", Step], None],
    ) -> None:
        capacity: Capacity = executor.capacity
        self.name, self.group, self.model, self.region = name, group, model, region
        self.scheduler, self.executor, self.machine, self.queue = scheduler, executor, machine, queue
        self.block_size = capacity.block_size
        self.state: ReplicaState = "ready"
        self.reachable = True  # from the router
        self.in_flight: dict[int, SimulatedRequest] = {}
        self.due: int | None = None  # nanoseconds of its next step
        self.computes = False  # it awaits the result of a step
        self.seen = EngineStats()  # as the router knows it
        self.waiting: dict[int, SimulatedRequest] = {}  # of those in flight, not begun
        self._clock, self._post = clock, post
        self._inbox: list[Command] = []
        self._core = EngineCore(cast(Scheduler, scheduler), executor, self._take, capacity, incarnation=1, clock=clock)

    @property
    def slots(self) -> int:
        """The sequences that can run at a time."""
        return self.queue.most - self.queue.max_waiting

    def check(self, request: SimulatedRequest) -> None:
        """Raises QueueFull if the request would exceed the limits of the queue."""
        self.queue.check(request.prompt_tokens, request.priority)

    def book(self, request: SimulatedRequest) -> None:
        """Counts a request that is on its way."""
        self.in_flight[request.number] = self.waiting[request.number] = request
        self.queue.join(request.prompt_tokens)

    def receive(self, command: Command) -> None:
        """Takes a command. The engine reads it between two steps."""
        self._inbox.append(command)

    def abort(self, request: SimulatedRequest) -> None:
        """Ends a request."""
        self.receive(Abort(str(request.number)))
        self.gone(request)

    def gone(self, request: SimulatedRequest) -> None:
        """Notes that a request is no longer in flight here."""
        self.in_flight.pop(request.number, None)
        if self.waiting.pop(request.number, None) is not None:
            self.queue.leave(request.prompt_tokens, started=False)

    def step(self) -> float | None:
        """Runs the engine's loop until it waits. Returns until when, in seconds; None: until a request comes.

        As in production, commands are read between steps: not while a result is awaited.
        """
        now, core = self._clock.now, self._core
        wake = core.step()
        while wake is None or wake <= now:
            commands, self._inbox = self._inbox, []
            if wake is None and not commands:
                self.computes = False
                return self.scheduler.due() if isinstance(self.scheduler, BatchScheduler) else None
            wake = core.step(commands)
        self.computes = True
        return None if wake == NEVER else wake

    def _take(self, step: Step) -> None:
        for request_id in step.begun:
            request = self.waiting.pop(int(request_id), None)
            if request is not None:
                self.queue.leave(request.prompt_tokens, started=True)
        if step.stats is not None:
            self.queue.running = step.stats.running
        self._post(self, step)
