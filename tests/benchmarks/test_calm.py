"""Whether the processor is calm, and which windows count."""

import os
import time
from pathlib import Path

import calm
import pytest
from calm import Watch, kept, said

from tests.patience import AT_ONCE


def test_calm_windows_count_if_they_are_a_quarter() -> None:
    assert kept([(1, False), (2, True), (3, False), (4, False)]) == ([2], True)
    assert kept([(1, False), (2, True), (3, False), (4, False), (5, False)]) == ([1, 2, 3, 4, 5], False)
    assert kept([(1, None), (2, False), (3, False)]) == ([1, 2, 3], None)
    assert [said(each) for each in (True, False, None)] == ["calm", "disturbed", "–"]


def test_a_window_has_a_share_and_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calm, "CPUS", sorted(os.sched_getaffinity(0))[:1])
    watch = Watch(patience=0.2)
    now = time.perf_counter()
    share = watch.share(now - 0.05, now)
    if share is None:
        pytest.skip("no compiler, or another processor")
    assert 0 <= share <= 1 and watch.calm(now - 0.05) in (True, False)
    assert watch.share(now + 9, now + 10) is None
    monkeypatch.setattr(calm, "SHARE", 2.0)  # never calm
    began = time.perf_counter()
    waited = [watch.wait() for _ in range(3)]
    assert 0.2 <= waited[-1] - began < AT_ONCE


def test_without_a_compiler_nothing_is_known_and_nothing_waits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    watch, began = Watch(patience=100.0), time.perf_counter()
    assert watch.wait() - began < AT_ONCE and watch.calm(began) is None
    assert capsys.readouterr().err.count("\n") == 1


def test_two_threads_of_a_core_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2")):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings)
    monkeypatch.setattr(calm, "TOPOLOGY", str(tmp_path / "cpu{}" / "topology" / "thread_siblings_list"))
    assert not calm._siblings([0, 1, 9])
    assert calm._siblings([0, 1, 2])
