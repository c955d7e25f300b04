"""Decides what happens to requests when their engine has ended: which go on at once, which are tried one by one, and
which are refused because they end engines.

A request that the engine had begun, but not answered, may have ended it. These suspects are held and sent to the next
engine one at a time, each after the one before it has been answered. If that engine ends too, the culprit is certain: a
prompt ends two engines at most. Requests that had been answered, or that had not begun, go on at once.
"""

import hashlib
from array import array
from collections import deque
from collections.abc import Iterable

from penstock.messages import Clock, EndsEngines, EngineError, GenerateRequest, Stream

MOST_ENDS = 4  # of engines that a request may see, one after the other, with little progress between them
PROGRESS = 32  # answers of an engine after which its end does not count against a request
REFUSED_SECONDS = 600.0
REFUSED_MOST = 1024  # prompts
# Seconds before each start of an engine in a minute. After the last, the server gives up.
DELAYS = (0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0)
MINUTE = 60.0


class Starts:
    """The starts of a process that ends, each later than the one before. The minute does not count the time in which
    the process only starts: a model that takes long to load, and cannot be, is given up as any other."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._times: deque[float] = deque()
        self._began: float | None = None  # when the process began to start; None once it is ready

    def ready(self) -> None:
        """Call when the process that was started is ready."""
        if self._began is not None:
            taken = max(self._clock() - self._began, 0.0)
            self._times = deque(time + taken for time in self._times)
            self._began = None

    def delay(self) -> float | None:
        """Seconds to wait before the next start; None to give up."""
        self.ready()  # unless it ended before: that it started has taken this time as well
        now = self._clock()
        while self._times and self._times[0] < now - MINUTE:
            self._times.popleft()
        if len(self._times) >= len(DELAYS):
            return None
        self._times.append(now)
        delay = DELAYS[len(self._times) - 1]
        self._began = now + delay
        return delay


class Recovery:
    """The requests that wait for an engine, and the prompts that are refused."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at_once: list[Stream] = []
        self._held: deque[Stream] = deque()
        self._tried: Stream | None = None  # the held request that the engine has now
        self._ends: dict[str, int] = {}  # engines that each open request has seen end
        self._refused: dict[bytes, float] = {}  # digests of prompts, and until when
        self._starts = Starts(clock)

    @property
    def holding(self) -> bool:
        """True while requests must be held back, so that one can be tried alone."""
        return bool(self._held) or self._tried is not None

    def check(self, request: GenerateRequest) -> None:
        """Raises EndsEngines if the same prompt has ended two engines in the last minutes."""
        if self._refused and self._refused.get(_digest(request), 0.0) > self._clock():
            raise _ends_engines()

    def delay(self) -> float | None:
        """Seconds to wait before the next start; None to give up."""
        return self._starts.delay()

    def hold(self, stream: Stream, *, alone: bool) -> None:
        """Keep a request for the next engine, or until its turn to be tried alone."""
        if alone:
            self._held.append(stream)
        else:
            self._at_once.append(stream)

    def engine_ended(self, streams: Iterable[Stream]) -> None:
        """Sort the unfinished requests of an engine that has ended, in the order in which they came."""
        at_once: list[Stream] = []
        held: list[Stream] = []
        ends: dict[str, int] = {}
        waiting = set(self._held)
        for stream in streams:
            name = stream.request.request_id
            sent, stream.sent = stream.sent, False
            unanswered = stream.begun and not stream.answered
            if not sent:
                (held if stream in waiting else at_once).append(stream)
            elif stream is self._tried and unanswered:
                self._refuse(stream)
            else:
                ends[name] = 1 if stream.answered > PROGRESS else self._ends.get(name, 0) + 1
                if ends[name] >= MOST_ENDS:
                    stream.fail(
                        EngineError(f"the engine ended {ends[name]} times during this request; it is not retried")
                    )
                else:
                    (held if unanswered else at_once).append(stream)
        self._at_once, self._held, self._tried, self._ends = at_once, deque(held), None, ends

    def ready(self) -> list[Stream]:
        """Return the requests to send to a new engine at once. Call it when that is ready."""
        self._starts.ready()
        at_once, self._at_once = self._at_once, []
        return [stream for stream in at_once if not stream.closed]

    def next(self) -> Stream | None:
        """Return the next request to try, if the one before it has been answered or has ended."""
        tried = self._tried
        if tried is not None and not (tried.answered or tried.closed or not tried.in_engine):
            return None
        self._tried = None
        while self._held:
            stream = self._held.popleft()
            if not stream.closed:
                self._tried = stream
                return stream
        return None

    def _refuse(self, stream: Stream) -> None:
        now = self._clock()
        self._refused = {digest: until for digest, until in self._refused.items() if until > now}
        if len(self._refused) >= REFUSED_MOST:
            del self._refused[next(iter(self._refused))]
        self._refused[_digest(stream.request)] = now + REFUSED_SECONDS
        stream.fail(_ends_engines())


def _ends_engines() -> EndsEngines:
    return EndsEngines(
        "the engine ended twice while it computed this prompt, which is refused for the next "
        f"{REFUSED_SECONDS / 60:.0f} minutes: do not send it again"
    )


def _digest(request: GenerateRequest) -> bytes:
    return hashlib.sha256(array("q", request.prompt_ids).tobytes()).digest()
