"""A real engine's event log, and `penstock replay` of it."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from penstock.engine.launch import launch
from penstock.engine.link.ipc import spawn
from penstock.messages import GenerateRequest, SamplingParams
from tests.engine.simulated import ask
from tests.engine.test_model import PROMPTS, config
from tests.patience import until


def replay(log: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "penstock", "replay", str(log)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
async def log(tmp_path: Path) -> Path:
    """The log of an engine process that has served a few requests."""
    path = tmp_path / "events.jsonl"
    client = await launch(msgspec.structs.replace(config(), event_log=str(path)))
    try:
        sampling = SamplingParams(seed=0, max_tokens=9, ignore_eos=True)
        asked = [
            GenerateRequest(request_id=f"r{i}", prompt_ids=ids, sampling=sampling) for i, ids in enumerate(PROMPTS)
        ]
        await asyncio.gather(*(ask(client, request) for request in asked))
    finally:
        await client.close()
    assert path.stat().st_mode & 0o077 == 0
    return path


async def test_the_same_plans_follow(log: Path) -> None:
    assert replay(log)[0] == 0
    whole = log.read_bytes()
    log.write_bytes(whole[:-9])
    status, said = replay(log)
    assert status == 0 and "cut off" in said


async def test_the_log_of_an_engine_that_was_killed_is_kept(tmp_path: Path) -> None:
    path, before = tmp_path / "events.jsonl", tmp_path / "events.jsonl.1"
    client = await spawn(msgspec.structs.replace(config(), event_log=str(path)), resumes=True)
    try:
        asked = GenerateRequest(
            request_id="a", prompt_ids=PROMPTS[0], sampling=SamplingParams(seed=0, max_tokens=9, ignore_eos=True)
        )
        await ask(client, asked)
        os.kill(client.info.pid, signal.SIGKILL)
        await until(lambda: client.state.restarts == 1, "another engine")
        assert b'"prompt_ids"' in before.read_bytes() and b'"prompt_ids"' not in path.read_bytes()
        assert replay(before)[0] == 0 and before.stat().st_mode & 0o077 == 0
    finally:
        await client.close()


async def test_a_changed_log_is_found_out(log: Path) -> None:
    whole = log.read_bytes()
    assert b'"prompt_ids":[5,9,' in whole
    log.write_bytes(whole.replace(b'"prompt_ids":[5,9,', b'"prompt_ids":[5,8,'))
    status, said = replay(log)
    assert status == 1 and "plan 1 differs" in said


def test_a_file_that_is_no_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("hello\n")
    status, said = replay(tmp_path / "x")
    assert status == 2 and "line 1" in said
    assert replay(tmp_path / "missing")[0] == 2
