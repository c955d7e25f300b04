"""Ranks on the nodes of a Ray cluster."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.engine.launch import launch
from penstock.messages import EngineError
from tests.ray_cluster.session import CASES, config


def own_network() -> list[str]:
    """What runs a command in a network namespace of its own; nothing where that is not allowed."""
    command = ["unshare", "--net", "--map-root-user"]
    if shutil.which("unshare") and not subprocess.run([*command, "true"], capture_output=True).returncode:
        return command
    return []


@pytest.mark.rare
def test_two_nodes_give_the_tokens_of_one_and_tell_of_a_rank_that_dies(tiny_checkpoint: Callable[..., Path]) -> None:
    folders = [str(tiny_checkpoint(case.variant)) for case in CASES]
    command = [*own_network(), sys.executable, "-m", "tests.ray_cluster.session", *folders]
    stdin, lifeline = os.pipe()
    with open(stdin, "rb") as pipe, open(lifeline, "wb"):
        session = subprocess.run(command, stdin=pipe, capture_output=True, text=True, timeout=400)
    assert session.returncode == 0, session.stdout + session.stderr
    assert "no rank is left" in session.stdout


@pytest.mark.rare
def test_a_fleet_on_three_nodes_loses_one_and_no_stream(tmp_path: Path) -> None:
    command = [*own_network(), sys.executable, "-m", "tests.ray_cluster.fleet_session", str(tmp_path)]
    session = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert session.returncode == 0, session.stdout + session.stderr
    assert "no engine is left" in session.stdout


async def test_where_there_is_no_cluster_the_user_is_told(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(EngineError, match="no Ray cluster was found: run `ray start --head` here, or set RAY_ADDRESS"):
        await launch(config(tiny_checkpoint("llama2"), distributed_executor="ray", tensor_parallel_size=2))
