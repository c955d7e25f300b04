"""No event in any order gives a wrong token or loses a block: a disk and another engine beside the real core and
scheduler."""

import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.engine.link.wire import Abort, Control
from penstock.messages import PagesAt, ResetCache
from penstock.schedule import replay
from tests.engine.tier.direct import DirectPages
from tests.engine.tier.engine import DAY, MOST_BLOCKS, TierEngine
from tests.schedule.invariants import check_scheduler


class TierMachine(RuleBasedStateMachine):
    """The executor of the engine checks every slot that a plan reads."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kv-"))
        self.away = self.folder / "away"
        self.peer_folder = Path(tempfile.mkdtemp(prefix="kv-peer-"))
        self.engine, self.peer = TierEngine(self.folder), TierEngine(self.peer_folder)
        self.sources: list[DirectPages] = []
        self.damages = False
        self.engine.peer = self._source
        for text in range(3):
            self.engine.ask(text, 44)
        self.engine.settle()
        self.engine.start()  # the disk has what the memory had

    @rule(
        text=st.integers(0, 2), length=st.integers(1, 60), salt=st.sampled_from(["", "", "other"]), n=st.integers(1, 2)
    )
    def ask(self, text: int, length: int, salt: str, n: int) -> None:
        self.engine.ask(text, length, salt=salt, n=n, seed=self.engine.count % 3)

    def _source(self, where: PagesAt) -> DirectPages:
        self.sources.append(DirectPages(self.engine, self.peer, where, self.engine.peer_jobs))
        self.sources[-1].damages = self.damages
        return self.sources[-1]

    @rule(text=st.integers(0, 5), length=st.integers(1, 60), computes=st.booleans())
    def ask_apart(self, text: int, length: int, computes: bool) -> None:
        """The other engine computes the prompt, or has its blocks or not."""
        name = self.peer.ask(text, length) if computes else ""
        self.engine.ask(text, length, seed=self.engine.count % 3, pages=PagesAt("", name))

    @rule(steps=st.sampled_from([1, 5, 50]))
    def peer_computes(self, steps: int) -> None:
        self.peer.compute(steps)

    @rule(count=st.sampled_from([1, 3, 50]))
    def peer_sends(self, count: int) -> None:
        self.engine.work(self.engine.peer_jobs, count)

    @rule(count=st.sampled_from([1, 3, 50]))
    def peer_writes(self, count: int) -> None:
        self.peer.work(self.peer.writes, count)
        self.peer.work(self.peer.reads, count)

    @rule()
    def peer_forgets(self) -> None:
        self.peer.step(Control(1, ResetCache()))

    @rule()
    def peer_is_killed(self) -> None:
        replay(self.peer.events)
        self.peer.start()

    @rule(damages=st.booleans())
    def pages_are_damaged(self, damages: bool) -> None:
        """Those of connections that begin after this."""
        self.damages = damages

    @rule(pick=st.integers(0, 100))
    def connection_is_cut(self, pick: int) -> None:
        if self.sources:
            self.sources[-1 - pick % min(len(self.sources), 3)].cut = True

    @rule(pick=st.integers(0, 100))
    def peer_request_ends(self, pick: int) -> None:
        """The front gives up the prompt at the other engine."""
        answers = self.peer.answers
        if answers:
            request_id = list(answers)[pick % len(answers)]
            del answers[request_id]
            self.peer.step(Abort(request_id))

    @rule(steps=st.sampled_from([1, 5, 50]))
    def compute(self, steps: int) -> None:
        self.engine.compute(steps)

    @rule(count=st.sampled_from([1, 3, 50]))
    def disk_reads(self, count: int) -> None:
        self.engine.work(self.engine.reads, count)

    @rule(count=st.sampled_from([1, 3, 50]))
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
            case "flip":  # a bit of every page
                for each in found:
                    content = bytearray(each.read_bytes())
                    if content:
                        content[-1 - pick % min(len(content), 32)] ^= 1 << pick % 8
                    each.write_bytes(content)
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

    @rule(days=st.sampled_from([0.0, 0.001, 0.6, 2.0]))
    def time_passes(self, days: float) -> None:
        self.engine.wall += days * DAY
        self.engine.clock.now += days

    @rule(idle=st.booleans())
    def engine_is_killed(self, idle: bool) -> None:
        if idle:
            self.engine.compute()
            self.disk_fails(False)
            self.engine.settle()
        replay(self.engine.events)
        self.disk_fails(False)
        for source in self.sources:
            source.end()
        self.sources.clear()
        self.engine.peer_jobs.waiting.clear()
        self.engine.start()

    @invariant()
    def blocks_agree(self) -> None:
        check_scheduler(self.engine.scheduler)
        check_scheduler(self.peer.scheduler)
        assert len(self.engine.disk._index) <= MOST_BLOCKS

    def teardown(self) -> None:
        try:
            self.disk_fails(False)
            self.engine.settle()
            self.peer.settle()
            self.engine.check()
            self.peer.check()
        finally:
            shutil.rmtree(self.folder)
            shutil.rmtree(self.peer_folder)


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_long_walk(seed: int) -> None:
    """The same events at random, with so many requests that blocks are read all the time, and some of them spoilt."""
    source, machine = random.Random(seed), TierMachine()
    engine, reads, failures, peer_reads = machine.engine, 0, 0, 0
    try:
        for _ in range(1000):
            chance = source.random()
            if chance < 0.35:
                machine.ask(source.randrange(6), source.randint(1, 60), source.choice(("", "", "other")), 1)
            elif chance < 0.45:
                machine.ask_apart(source.randrange(6), source.randint(1, 60), source.random() < 0.8)
                machine.damages = source.random() < 0.2
            elif chance < 0.5:
                machine.peer_sends(source.randrange(20))
            elif chance < 0.6:
                machine.client_leaves(source.randrange(100))
            elif chance < 0.7:
                machine.spoil(source.randrange(1000), source.choice(("flip", "cut", "swap", "gone")))
            elif chance < 0.72:
                machine.disk_fails(source.random() < 0.3)
            elif chance < 0.73:
                machine.reset()
            elif chance < 0.85:
                engine.compute(source.randrange(60))
            elif chance < 0.97:
                engine.work(source.choice((engine.reads, engine.writes)), source.randrange(60))
            else:
                counts = engine.tiers.counts()
                reads, failures = reads + counts["disk_reads"], failures + counts["disk_failures"]
                peer_reads += counts["peer_reads"]
                machine.engine_is_killed(idle=source.random() < 0.7)
            machine.blocks_agree()
    finally:
        machine.teardown()
    assert reads > 20 and failures > 10 and peer_reads > 50
