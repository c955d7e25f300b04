"""No event in any order gives a wrong token or loses a block: the disk tier beside the real core and scheduler."""

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.engine.link.wire import Abort, Control
from penstock.messages import ResetCache
from penstock.schedule import replay
from tests.engine.tier.engine import DAY, MOST_BLOCKS, TierEngine
from tests.schedule.invariants import check_scheduler


class TierMachine(RuleBasedStateMachine):
    """The executor of the engine checks every slot that a plan reads."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kv-"))
        self.away = self.folder / "away"
        self.engine = TierEngine(self.folder)

    @rule(text=st.integers(0, 2), length=st.integers(1, 60), salt=st.sampled_from(["", "other"]), n=st.integers(1, 2))
    def ask(self, text: int, length: int, salt: str, n: int) -> None:
        self.engine.ask(text, length, salt=salt, n=n, seed=self.engine.count % 3)

    @rule(steps=st.integers(1, 30))
    def compute(self, steps: int) -> None:
        self.engine.compute(steps)

    @rule(count=st.integers(1, 20))
    def disk_reads(self, count: int) -> None:
        self.engine.work(self.engine.reads, count)

    @rule(count=st.integers(1, 20))
    def disk_writes(self, count: int) -> None:
        self.engine.work(self.engine.writes, count)

    @rule(pick=st.integers(0, 100))
    def client_leaves(self, pick: int) -> None:
        answers = self.engine.answers
        if answers:
            request_id = list(answers)[pick % len(answers)]
            del answers[request_id]
            self.engine.step(Abort(request_id))

    @rule()
    def reset(self) -> None:
        self.engine.step(Control(1, ResetCache()))

    @rule(pick=st.integers(0, 1000), how=st.sampled_from(["flip", "cut", "swap", "gone"]))
    def spoil(self, pick: int, how: str) -> None:
        found = sorted(self.engine.files.folder.glob("*"))
        if not found:
            return
        path, other = found[pick % len(found)], found[(pick + 1) % len(found)]
        match how:
            case "flip":
                content = bytearray(path.read_bytes())
                if content:
                    content[pick % len(content)] ^= 1 << pick % 8
                path.write_bytes(content)
            case "cut":
                os.truncate(path, pick % 64)
            case "swap" if path != other:
                shutil.copy(other, path)
            case "gone":
                path.unlink()

    @rule(fails=st.booleans())
    def disk_fails(self, fails: bool) -> None:
        """While the folder has another name, every write and every read fails."""
        folder = self.engine.files.folder
        if fails and folder.exists() and not self.away.exists():
            folder.rename(self.away)
        elif not fails and self.away.exists():
            shutil.rmtree(folder, ignore_errors=True)  # made by a reset
            self.away.rename(folder)

    @rule(days=st.floats(0, 2))
    def time_passes(self, days: float) -> None:
        self.engine.wall += days * DAY
        self.engine.clock.now += days

    @rule()
    def engine_is_killed(self) -> None:
        replay(self.engine.events)
        self.disk_fails(False)
        self.engine.start()

    @invariant()
    def blocks_agree(self) -> None:
        check_scheduler(self.engine.scheduler)
        assert len(self.engine.tier._index) <= MOST_BLOCKS

    def teardown(self) -> None:
        try:
            self.disk_fails(False)
            self.engine.settle()
            self.engine.check()
        finally:
            shutil.rmtree(self.folder)


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
