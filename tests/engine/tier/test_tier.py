"""What the disk tier reads and writes, and what waits for it."""

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.engine.link.wire import Abort, Control
from penstock.engine.tier.disk import READS_AT_ONCE, STALLED_SECONDS, WRITES_AT_ONCE
from penstock.messages import ResetCache
from tests.engine.tier.engine import DAY, MOST_BLOCKS, TierEngine

LONG = 40  # tokens: ten blocks


@pytest.fixture
def engine(tmp_path: Path) -> TierEngine:
    """An engine that has a text on disk, and nothing in memory."""
    engine = TierEngine(tmp_path)
    engine.ask(1, LONG)
    engine.settle()
    assert engine.tiers.counts()["disk_writes"] >= 10
    engine.start()
    return engine


def test_a_text_is_read_and_not_computed(engine: TierEngine) -> None:
    again = engine.ask(1, LONG)
    assert not engine.scheduler.has_work and len(engine.reads.waiting) == READS_AT_ONCE
    engine.settle()
    assert engine.cached(again) == LONG - 1
    assert engine.tiers.counts()["disk_reads"] == LONG // 4
    engine.check()


def test_others_go_on_meanwhile(engine: TierEngine) -> None:
    waits = engine.ask(1, LONG)
    other = engine.ask(2, LONG)
    engine.compute()
    assert engine.answers[other][1].ends and not engine.answers[waits][1].ends
    engine.settle()
    assert engine.cached(waits) == LONG - 1
    engine.check()


def test_a_text_of_another_salt_is_computed(engine: TierEngine) -> None:
    other = engine.ask(1, LONG, salt="other")
    assert not engine.reads.waiting
    engine.settle()
    assert engine.cached(other) == 0
    engine.check()


def test_blocks_in_memory_are_not_read(engine: TierEngine) -> None:
    engine.ask(1, 20)
    engine.settle()
    before = engine.tiers.counts()["disk_reads"]
    again = engine.ask(1, LONG)
    engine.settle()
    assert engine.tiers.counts()["disk_reads"] - before == 5 and engine.cached(again) == LONG - 1
    engine.check()


def test_what_cannot_be_read_is_computed(engine: TierEngine) -> None:
    for path in engine.files.folder.iterdir():
        os.truncate(path, 70)
    again = engine.ask(1, LONG)
    engine.settle()
    assert engine.cached(again) == 0 and engine.tiers.counts()["disk_failures"] == READS_AT_ONCE
    engine.check()


def test_a_disk_that_hangs_delays_a_request_for_a_limited_time(engine: TierEngine) -> None:
    waits, behind = engine.ask(1, LONG), engine.ask(1, 30)
    engine.clock.now += STALLED_SECONDS - 0.1
    engine.step()
    assert not engine.scheduler.has_work
    engine.clock.now += 0.2
    engine.step()
    late = engine.ask(1, 25)
    engine.compute()
    assert all(engine.answers[name][1].ends for name in (waits, behind, late))
    assert sum(engine.scheduler.leases.held.values()) == READS_AT_ONCE  # the thread may still write into these
    engine.settle()
    engine.check()


def test_a_client_that_leaves_stops_the_reads(engine: TierEngine) -> None:
    waits = engine.ask(1, LONG)
    engine.step(Abort(waits))
    del engine.answers[waits]
    assert engine.work(engine.reads) == READS_AT_ONCE and not engine.reads.waiting
    engine.settle()
    engine.check()


def test_reading_must_be_faster_than_computing(engine: TierEngine) -> None:
    engine.disk._read_rate = 1.0  # byte a second
    engine.reader.prefill_rate = 1000.0
    again = engine.ask(1, LONG)
    assert not engine.reads.waiting
    engine.settle()
    assert engine.cached(again) == 0
    for _ in range(600):
        engine.disk.patience(LONG, 1000.0)
    assert engine.disk.patience(LONG, 1000.0)  # it is tried again after some time
    engine.check()


def test_a_request_waits_no_longer_than_computing_takes(engine: TierEngine) -> None:
    engine.reader.prefill_rate = 100.0
    waits = engine.ask(1, LONG)
    engine.clock.now += LONG / 100.0
    engine.step()
    engine.compute()
    assert engine.answers[waits][1].ends
    engine.settle()
    engine.check()


def test_a_reset_deletes_the_files(engine: TierEngine) -> None:
    waits = engine.ask(1, LONG)
    engine.work(engine.reads, 2)
    engine.step(Control(1, ResetCache()))
    engine.compute()
    assert engine.cached(waits) == 0
    assert engine.work(engine.writes, 1) and not list(engine.files.folder.iterdir())
    engine.settle()
    engine.check()


def test_old_blocks_are_deleted(engine: TierEngine) -> None:
    engine.wall += 2 * DAY
    engine.clock.now += 60.0
    engine.settle()
    assert len(engine.disk._index) == 0 and not list(engine.files.folder.iterdir())


def test_the_disk_has_no_more_than_it_may(engine: TierEngine) -> None:
    for text in range(2, 20):
        engine.wall += 1.0
        engine.ask(text, LONG)
        engine.compute()
        engine.settle()
        assert len(list(engine.files.folder.iterdir())) == len(engine.disk._index) <= MOST_BLOCKS
    assert len(engine.disk._index) > MOST_BLOCKS // 2
    last, first = engine.ask(19, LONG), engine.ask(1, LONG)
    engine.settle()
    assert engine.cached(last) == LONG - 1 and engine.cached(first) == 0
    engine.check()


def test_blocks_of_one_second_do_not_displace_each_other_forever(engine: TierEngine) -> None:
    """All blocks are equally old, and the disk has room for fewer than memory."""
    engine.disk._most_blocks = 12
    for text in range(2, 6):
        engine.ask(text, LONG)
    engine.compute()
    for _ in range(400):
        engine.step()
        engine.work(engine.writes)
    writes = engine.tiers.counts()["disk_writes"]
    for _ in range(50):
        engine.step()
        engine.work(engine.writes)
    assert engine.tiers.counts()["disk_writes"] == writes and not engine.writes.waiting
    engine.settle()
    engine.check()


def test_a_slow_disk_forgets_and_blocks_no_step(engine: TierEngine) -> None:
    for text in range(2, 8):
        name = engine.ask(text, LONG)
        engine.compute()
        assert engine.answers[name][1].ends
        assert len(engine.writes.waiting) <= WRITES_AT_ONCE
    engine.settle()
    assert engine.tiers.counts()["disk_dropped"] > 0
    engine.check()


def test_a_full_disk_is_tried_again_each_second(engine: TierEngine, caplog: pytest.LogCaptureFixture) -> None:
    away = engine.folder / "away"
    engine.files.folder.rename(away)
    engine.ask(2, LONG)
    engine.compute()
    engine.step()
    assert engine.work(engine.writes) == WRITES_AT_ONCE
    engine.step()
    assert not engine.writes.waiting and engine.tiers.due(engine.clock.now) == pytest.approx(engine.disk._write_after)
    engine.clock.now += 1.1
    engine.step()
    assert engine.work(engine.writes) == WRITES_AT_ONCE
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    away.rename(engine.files.folder)
    engine.settle()
    assert engine.tiers.counts()["disk_writes"] >= 10
    engine.check()


def test_token_ids_that_no_model_has_are_refused_by_the_scheduler(engine: TierEngine) -> None:
    request = engine.answers[engine.ask(2, 8)][0]
    assert engine.scheduler.leases.keys(request)
    assert engine.scheduler.leases.keys(replace(request, prompt_ids=(2**40,) * 8)) == []
