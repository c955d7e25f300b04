"""An engine with a disk tier on one thread: the test runs the tier's jobs one at a time, and moves its clocks."""

import queue
import time
from collections.abc import Callable
from pathlib import Path

from penstock.engine.core import EngineCore
from penstock.engine.link.wire import Abort, Add, Control, Step
from penstock.engine.tier.disk import DiskTier
from penstock.engine.tier.files import PageFiles
from penstock.engine.tier.lender import Lender
from penstock.engine.tier.reader import BlockReader, PageSource
from penstock.engine.tier.tier import BlockTiers
from penstock.engine.tier.worker import T
from penstock.messages import Capacity, GenerateRequest, Identity, KVGroup, PagesAt, SamplingParams
from penstock.schedule import Event, Scheduler, SchedulerConfig, replay
from tests.engine.simulated import Answer, expected
from tests.engine.tier.pages import PagedExecutor
from tests.plan_checks import VOCABULARY, VirtualClock
from tests.schedule.invariants import check_scheduler

LIMITS = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=96)
CAPACITY = Capacity(4, (KVGroup(41),), 1, Identity("simulated"), VOCABULARY)
MOST_BLOCKS = 100  # on the disk
DAY = 86_400.0


class ManualJobs:
    """Jobs that wait for the test."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], Callable[[], None]]] = []

    def submit(self, work: Callable[[], T], done: Callable[[T | None], None]) -> None:
        def run() -> Callable[[], None]:
            value = work()
            return lambda: done(value)

        self.waiting.append(run)


class TierEngine:
    """See above. Every step is 10 ms long."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = VirtualClock(1.0)
        self.wall = time.time()  # files get the times of this machine
        self.count = 0
        self.peer_jobs = ManualJobs()
        self.peer: Callable[[PagesAt], PageSource] | None = None  # returns the blocks of another engine
        self.start()

    def start(self) -> None:
        """Begin with an empty memory, as after kill -9."""
        self.events: list[Event] = []
        self.scheduler = Scheduler(LIMITS, CAPACITY, log=self.events, incarnation=3)
        self.executor = PagedExecutor(CAPACITY, LIMITS, self.clock)
        self.reads, self.writes = ManualJobs(), ManualJobs()
        self.results: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.files = PageFiles(self.folder, "simulated", len(self.executor.page(0)))
        leases, page = self.scheduler.leases, self.executor.page
        self.disk = DiskTier(
            self.files,
            leases,
            page,
            (self.reads, self.writes),
            block_size=4,
            most_bytes=MOST_BLOCKS * self.files.file_bytes,
            most_seconds=DAY,
            wall_clock=lambda: self.wall,
        )
        self.reader = BlockReader(leases, page, 4, self._source)
        self.lender = Lender(leases, page, lambda name: self.reader.waits(name) or self.scheduler.has(name))
        self.tiers = BlockTiers(self.reader, self.results, disk=self.disk, lender=self.lender)
        self.core = EngineCore(
            self.scheduler, self.executor, self._post, CAPACITY, incarnation=3, clock=self.clock, tiers=self.tiers
        )
        self.answers: dict[str, tuple[GenerateRequest, Answer]] = {}

    def _source(self, request: GenerateRequest) -> PageSource | None:
        if request.pages is not None and self.peer is not None:
            return self.peer(request.pages)
        return self.disk if self.disk.has_blocks else None

    def ask(
        self, text: int, length: int, *, salt: str = "", n: int = 1, seed: int = 0, pages: PagesAt | None = None
    ) -> str:
        """Send a request whose prompt is the beginning of a text. Return its id."""
        self.count += 1
        prompt = tuple((text * 7 + i * i) % VOCABULARY for i in range(length))
        sampling = SamplingParams(max_tokens=8, temperature=1.0, seed=seed)
        name = f"r{self.count}"
        request = GenerateRequest(
            request_id=name, prompt_ids=prompt, sampling=sampling, n=n, cache_salt=salt, pages=pages
        )
        self.answers[name] = request, Answer(request)
        self.step(Add(request))
        return name

    def step(self, *commands: Add | Abort | Control) -> None:
        self.clock.now += 0.01
        self.core.step(commands)

    def work(self, jobs: ManualJobs, most: int = 1000) -> int:
        """Run some jobs, and take a step after each. Return how many there were."""
        count = 0
        while count < most and jobs.waiting:
            self.results.put(jobs.waiting.pop(0)())
            self.step()
            count += 1
        return count

    def compute(self, steps: int = 1000) -> None:
        """Step until no request is in the scheduler, at most so often."""
        for _ in range(steps):
            if not self.scheduler.has_work:
                return
            self.step()

    def settle(self) -> None:
        """Run everything to its end."""
        for _ in range(1000):
            while self.work(self.reads) or self.work(self.writes) or self.work(self.peer_jobs):
                pass
            idle = not self.scheduler.has_work and not self.core._backlog
            self.step()  # the tiers see what the step before has freed
            if idle and self.tiers.due(0.0) is None and not self.writes.waiting:
                return
            self.clock.now += 0.5
        raise AssertionError("there is still something to do")

    def cached(self, name: str) -> int:
        """The cached tokens of a request that has ended."""
        return self.answers[name][1].ends[0].cached_tokens

    def check(self) -> None:
        """Every answer is whole and right, no block is held, and the log gives the same plans."""
        assert not self.scheduler.leases.held and not self.reader._fetches
        assert set(self.scheduler.stats().blocks_held) == {0}
        check_scheduler(self.scheduler)
        for request, answer in self.answers.values():
            assert answer.choices == {choice: expected(request, choice) for choice in range(request.n)}
        replay(self.events)

    def _post(self, step: Step) -> None:
        assert not step.rejected
        for delta in step.deltas:
            if delta.request_id in self.answers:
                assert delta.finish_reason != "error", delta
                self.answers[delta.request_id][1].take(delta)
