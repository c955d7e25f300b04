"""An operator's own judge of rollouts: a command, and what happens if it fails."""

import asyncio
import sys
from functools import partial
from pathlib import Path

import pytest

from penstock.repository.rollouts import command
from penstock.repository.rollouts.command import CommandJudge

# The pair says what the command does.
PROGRAM = """
import os, sys, time
for line in sys.stdin:
    exec(__import__("json").loads(line)["do"])
"""


def scores(folder: Path, *acts: str) -> list[float | None]:
    (folder / "judge.py").write_text(PROGRAM)

    async def run() -> list[float | None]:
        judge = CommandJudge((sys.executable, "judge.py"), folder)
        try:
            return list(await asyncio.gather(*(judge.score(partial(dict, do=act)) for act in acts)))
        finally:
            await judge.close()
            await judge.close()

    return asyncio.run(run())


def test_a_command_scores_pairs_one_after_the_other(tmp_path: Path) -> None:
    say = "print({}, flush=True)"
    acts = [say.format(0.25), say.format('"null"'), "count = 1; print(-1, flush=True)", say.format("count / 4")]
    assert scores(tmp_path, *acts) == [0.25, None, -1.0, 0.25]


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        ("sys.exit(3)", "truncated"),
        ("print(2, flush=True)", "<= 1.0"),
        ("print('good', flush=True)", "malformed"),
        ("print(' ' * 70_000, flush=True)", "limit"),
        ("time.sleep(1000)", "no answer in 0.5 s"),
    ],
)
def test_a_command_that_fails_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, act: str, reason: str
) -> None:
    if "sleep" in act:
        monkeypatch.setattr(command, "ANSWER_SECONDS", 0.5)
        assert scores(tmp_path, act) == [None]
    else:
        assert scores(tmp_path, act, "print(0.5, flush=True)") == [None, 0.5]
    assert "must answer each line with a number from -1 to 1" in caplog.text and reason in caplog.text


def test_a_command_that_is_not_there_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    judge = CommandJudge(("./missing",), tmp_path)
    assert asyncio.run(judge.score(dict)) is None and "No such file" in caplog.text


def test_a_pair_that_json_cannot_hold_is_not_judged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    judge = CommandJudge(("./missing",), tmp_path)
    assert asyncio.run(judge.score(lambda: {"text": b"\xff".decode()})) is None and "can't decode" in caplog.text
