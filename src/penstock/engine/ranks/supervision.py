"""Checks the ranks of an engine, and makes the report that ends it. Pure but for the clock it is given.

Three things end an engine: a rank that ends or fails, one that falls silent (stopped, or its machine is gone), and a
plan whose result does not come though all ranks beat (one is stuck, the others wait for it in a collective). Ranks that
fail drag the others along, so what is reported is the first cause, after a moment for everybody's last words.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.engine.ranks.wire import Beat, RankFailed
from penstock.messages import Clock

CONNECT_SECONDS = 60.0  # for a new process to say its first word
LOADING_SILENCE = 60.0  # a library read from a slow disk can hold up every thread of a process
SILENCE = 10.0  # afterwards: 40 beats,
SILENCE_SHARE = 0.5  # or so much of step_deadline where that is less,
LEAST_SILENCE = 1.0  # but four beats at the least
STEP_SHARE = 0.8  # of step_deadline that a step may take: so this report comes before the client gives the engine up
LAST_WORDS = 0.5  # for the cause to show, once a rank has ended
LONGEST_LOOK = 1.0  # that one look counts as at most: time in which we were stopped ourselves is no rank's silence


@dataclass
class Rank:
    """The state of one rank's process."""

    name: str  # "rank 1 (pid 4711)"
    heard: float = 0.0
    greeted: bool = False  # by both of its sockets: it has said hello, and beats
    loaded: bool = False
    beat: Beat | None = None
    failed: RankFailed | None = None
    ended: str = ""  # how its process did: "was killed by SIGKILL"

    @property
    def gone(self) -> bool:
        return bool(self.ended) or self.failed is not None

    @property
    def doing(self) -> str:
        """The last activity that it reported."""
        beat = self.beat
        if beat is None:
            return "starting"
        return f"{beat.doing}, {beat.at}" if beat.at else beat.doing


@dataclass
class Supervision:
    """Judges `ranks`, whose fields the caller keeps up to date. Times are seconds of its own `now`."""

    ranks: Sequence[Rank]
    step_deadline: float
    clock: Clock
    now: float = 0.0
    _looked: float = field(init=False)
    _due: float | None = field(default=None, init=False)  # since when a result is
    _trouble: float | None = field(default=None, init=False)  # since when a rank is gone

    def __post_init__(self) -> None:
        self._looked = self.clock()

    @property
    def troubled(self) -> bool:
        """A rank is gone; the report comes as soon as the others have had their last words."""
        return self._trouble is not None

    def expect(self, outstanding: int) -> None:
        """Note that `outstanding` results are due from now on."""
        self._due = self.now if outstanding else None

    def hear(self, rank: Rank) -> None:
        rank.heard = self.now

    def advance(self) -> None:
        """Update `now`. Must be called before reports are processed; `look` compares with it."""
        now = self.clock()
        self.now += min(now - self._looked, LONGEST_LOOK)
        self._looked = now

    @property
    def patience(self) -> float:
        """Seconds without a word from a rank that has loaded."""
        return min(SILENCE, max(SILENCE_SHARE * self.step_deadline, LEAST_SILENCE))

    def look(self) -> str:
        """Return the report that ends the engine, empty while all is well."""
        if self._trouble is None and any(rank.gone for rank in self.ranks):
            self._trouble = self.now
        if self._trouble is not None:
            everybody = all(rank.gone for rank in self.ranks)
            return self._cause() if everybody or self.now - self._trouble >= LAST_WORDS else ""
        return self._silent() or self._stuck()

    def _cause(self) -> str:
        """Report the ranks that are gone, less those that failed because another one did."""
        gone = [rank for rank in self.ranks if rank.gone]
        for rank in gone:
            if rank.failed is not None and rank.failed.for_user and not (rank.loaded or rank.failed.waits):
                return rank.failed.reason
        # Ranks that were killed, and ranks that failed while they were not waiting for others.
        causes = [rank for rank in gone if rank.failed is None or not rank.failed.waits]
        lines = [_last(rank) for rank in causes or gone]
        if not causes:
            lines += [f"{rank.name} was in {rank.doing}" for rank in self.ranks if not rank.gone]
        return "\n".join(lines)

    def _silent(self) -> str:
        lines = []
        for rank in self.ranks:
            patience = self.patience if rank.loaded else LOADING_SILENCE
            if not rank.greeted and self.now - rank.heard >= CONNECT_SECONDS:
                lines.append(f"{rank.name} did not connect within {CONNECT_SECONDS:g} s")
            elif rank.greeted and self.now - rank.heard >= patience:
                lines.append(
                    f"{rank.name} has not been heard of for {patience:g} s: it was stopped, or its machine hangs; "
                    f"last known of it: {rank.doing}"
                )
        return "\n".join(lines)

    def _stuck(self) -> str:
        """Report that all ranks beat and no result comes; first those that are behind and wait for no other."""
        if self._due is None or self.now - self._due < STEP_SHARE * self.step_deadline:
            return ""
        behind = min((rank.beat.plans for rank in self.ranks if rank.beat is not None), default=0)
        culprits = [r for r in self.ranks if r.beat is not None and not r.beat.waits and r.beat.plans == behind]
        seconds = f"{STEP_SHARE * self.step_deadline:g} s ({STEP_SHARE:.0%} of step_deadline)"
        lines = [f"{rank.name} is stuck: no step for {seconds}; it is in {rank.doing}" for rank in culprits]
        lines = lines or [f"the ranks wait for each other: no step for {seconds}"]
        return "\n".join([*lines, *(f"{r.name} is in {r.doing}" for r in self.ranks if r not in culprits)])


def _last(rank: Rank) -> str:
    if rank.failed is not None:
        return f"{rank.name} failed in {rank.failed.doing}: {rank.failed.reason}"
    return f"{rank.name} {rank.ended}; last known of it: {rank.doing}"
