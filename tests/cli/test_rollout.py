"""What `penstock rollout` prints."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.cli.operate.repository import RepositoryServer
from penstock.cli.operate.rollout import show_rollouts

ROW = {"name": "chat", "candidate": 2, "incumbent": 1, "share": 0, "status": "running", "reason": ""}


def printed(rows: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> str:
    show_rollouts(cast(RepositoryServer, SimpleNamespace(ask=lambda path: {"rollouts": rows})))
    return capsys.readouterr().out


def test_without_a_rollout_it_says_how_to_begin_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed([], capsys).startswith("no rollout was started; begin one with: penstock rollout start NAME")


def test_a_judge_without_pairs_has_no_interval(capsys: pytest.CaptureFixture[str]) -> None:
    judges = [
        {"name": "length", "requests": 0, "low": -1.0, "high": 1.0, "tolerance": 0.5},
        {"name": "likelihood", "requests": 27, "low": 0.154, "high": 1.0, "tolerance": 0.3},
    ]
    first, _, length, likelihood = printed([{**ROW, "judges": judges}], capsys).splitlines()
    assert first == "chat: version 2 in place of 1, running at shadow"
    assert length.split() == ["length", "0", "0.5"]
    assert likelihood.split() == ["likelihood", "27", "+0.154", "to", "+1.000", "0.3"]
