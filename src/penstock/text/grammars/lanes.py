"""Threads for grammars that may be slow, so that a step does not wait for one.

llguidance cannot be interrupted: an ambiguous grammar may keep it busy for seconds with one token. So such grammars are
followed on other threads, without Python's lock. A call that takes too much processor time is given up. Its thread goes
on, only when a processor is idle, until the call returns. Another thread takes its place.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING

from penstock.text.grammars.copies import GrammarCopy, LibraryCalls

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

CALL_SECONDS = 0.02  # of processor time, that a call of llguidance may take
POLL_SECONDS = 0.002  # between two looks at the processor time of a call
MOST_GIVEN_UP = 16  # threads; beyond this, new sequences with such grammars are refused
_CLOSE_SECONDS = 1.0  # that `close` waits for calls that run
_THREADS = "/proc/self/task"

log = logging.getLogger(__name__)


class Task:
    """Calls of llguidance for one output."""

    __slots__ = ("copy", "done", "given_up", "run")

    def __init__(self, copy: GrammarCopy, run: Callable[[], None]) -> None:
        self.copy = copy
        self.run = run
        self.done = threading.Event()
        self.given_up = False


class Lane:
    """A thread that runs tasks.

    llguidance keeps Python's lock while it consumes a token, unless it consumes several at once on threads of its own.
    So a lane has an executor of llguidance with one thread, and an idle matcher beside the one that works. That thread
    runs no Python, but for texts that a grammar forces. So it can have the lowest priority without others waiting.
    """

    def __init__(self, tasks: "SimpleQueue[Task | None]", tokenizer: "LLTokenizer") -> None:
        from llguidance import LLExecutor, LLMatcher

        self._tasks = tasks
        self._idle = LLMatcher(tokenizer, "-", log_level=0)  # no grammar: it is in error
        before = set(os.listdir(_THREADS))
        self._executor = LLExecutor(1)
        self._executor_id = max(
            map(int, set(os.listdir(_THREADS)) - before)
        )  # a thread is created while Python is locked
        self._calls = LibraryCalls(self._clock, self._consume, self._compute)
        self._task: Task | None = None
        self._left = False  # it ends after its task
        self._thread = threading.Thread(target=self._work, name="grammar", daemon=True)
        self._thread.start()

    @property
    def runs(self) -> bool:
        """False once its last task has ended."""
        return self._thread.is_alive()

    def give_up_late(self) -> bool:
        """Gives up the running task if its call takes too long, or if its grammar has been refused: then it may wait
        for the call of another output, as outputs of a grammar share its lexer. Returns True if it does."""
        task = self._task
        if task is None or not (task.copy.refused or self._clock() - task.copy.began > CALL_SECONDS):
            return False
        task.copy.refuse(CALL_SECONDS)
        self._left = task.given_up = True
        with contextlib.suppress(OSError):  # it has ended, or may not change that
            os.sched_setscheduler(self._executor_id, os.SCHED_IDLE, os.sched_param(0))
        return True

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _work(self) -> None:
        while not self._left:
            task = self._tasks.get()
            if task is None:  # the lanes are closed
                return
            task.copy.calls, task.copy.began = self._calls, self._clock()
            self._task = task
            try:
                task.run()
            except Exception as error:  # none is expected; it must not leave others without a lane
                log.exception("a grammar could not be followed")
                task.copy.error = f"internal error: {type(error).__name__}: {error}"
            finally:
                self._task = None
                task.done.set()
            del task  # else an idle lane would keep the output, and all that its grammar refers to

    def _clock(self) -> float:
        # Linux numbers the clock of a thread's processor time so (CPUCLOCK_PERTHREAD and CPUCLOCK_SCHED).
        return time.clock_gettime((~self._executor_id << 3) | 6)

    def _consume(self, matcher: "LLMatcher", token_id: int) -> bool:
        return self._executor.consume_token_par([(matcher, token_id), (self._idle, 0)])[0]

    def _compute(self, matcher: "LLMatcher", address: int, size: int, drafts: list[int]) -> None:
        """The line after the masks gets that of the idle matcher."""
        spare = 1 + len(drafts)
        if drafts:
            both = [(matcher, 0, drafts), (self._idle, spare, [0])]
            self._executor.unsafe_compute_mask_ptr_with_draft_token(both, address, size, 1 + spare)
        else:
            self._executor.unsafe_compute_mask_ptr([(matcher, 0), (self._idle, spare)], address, size, 1 + spare)


class Lanes:
    """The lanes of an engine. Used from one thread."""

    def __init__(self, count: int, tokenizer: "LLTokenizer") -> None:
        self._count, self._tokenizer = count, tokenizer
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._lanes: list[Lane] = []
        self._given_up: list[Lane] = []  # lanes whose task was given up and still runs

    @property
    def full(self) -> bool:
        """Whether too many threads run what was given up."""
        self._given_up = [lane for lane in self._given_up if lane.runs]
        return len(self._given_up) >= MOST_GIVEN_UP

    def submit(self, task: Task) -> None:
        if len(self._lanes) < self._count:
            self._lanes.append(Lane(self._tasks, self._tokenizer))
        self._tasks.put(task)

    def wait(self, task: Task) -> None:
        """Waits until a task has ended or was given up."""
        while not (task.given_up or task.done.wait(POLL_SECONDS)):
            for lane in [lane for lane in self._lanes if lane.give_up_late()]:
                self._lanes.remove(lane)
                self._given_up.append(lane)
                self._lanes.append(Lane(self._tasks, self._tokenizer))

    def close(self) -> None:
        """Ends the threads. One whose call takes too long ends when the call returns."""
        lanes, self._lanes = self._lanes, []
        for _ in lanes:
            self._tasks.put(None)
        end = time.monotonic() + _CLOSE_SECONDS
        for lane in lanes:
            lane.join(max(end - time.monotonic(), 0))
