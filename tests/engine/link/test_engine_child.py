"""A process that is started before anybody knows what it shall run."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from socket import MSG_PEEK

import pytest

from penstock.__main__ import _starts_none
from penstock.engine.link.engine_child import ENGINE as REAL_ENGINE
from penstock.engine.link.engine_child import IMPORT_RUNTIME, EngineChild, one_rank_expected
from penstock.engine.link.ipc import connect
from penstock.engine.signals import GROUP_SIGNALS
from penstock.messages import EngineError
from tests.engine.processes import alive, children, command_line, descriptors
from tests.engine.simulated import ENGINE, Scenario, ask, config
from tests.patience import until
from tests.schedule.simulated import request


def test_leaving_ends_it_and_leaves_nothing() -> None:
    before = descriptors()
    with EngineChild(ENGINE) as child:
        assert alive(child.process.pid)
    assert not alive(child.process.pid)
    assert descriptors() == before


async def test_a_signal_to_the_group_while_it_imports_is_not_for_it() -> None:
    settings = config(Scenario())
    with EngineChild(ENGINE) as child:
        for number in sorted(GROUP_SIGNALS):
            child.process.send_signal(number)
        child.send_config(settings)
        client = await connect(settings, child)
        assert (await ask(client, request("a", 4, 3))).reasons == {0: "length"}
    await client.close()


async def test_secrets_stay_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("PENSTOCK_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password")
    others = ("HF_HOME", "PENSTOCK_ISA", "TOKENIZERS_PARALLELISM", "RAY_AUTH_TOKEN", "MONKEY", "CUDA_VISIBLE_DEVICES")
    for name in (*secrets, *others):
        monkeypatch.setenv(name, "a value")
    with EngineChild(("/bin/sleep", "60")) as child:
        environ = Path(f"/proc/{child.process.pid}/environ")
        await until(lambda: environ.read_bytes() != b"", "the kernel to set it")
        environment = environ.read_bytes().split(b"\0")
    names = {entry.partition(b"=")[0].decode() for entry in environment if entry.endswith(b"=a value")}
    assert names == set(others)


async def test_it_gets_ready_while_nobody_listens_and_serves_whoever_takes_it_over() -> None:
    settings = config(Scenario())
    with EngineChild(ENGINE) as child:
        child.send_config(settings)
        await asyncio.to_thread(child.socket.recv, 1, MSG_PEEK)  # it has said that it is ready
        client = await connect(settings, child)
    assert (await ask(client, request("a", 4, 3))).reasons == {0: "length"}
    await client.close()
    assert not alive(client.info.pid)


async def test_one_that_ended_before_it_was_taken_over_is_told() -> None:
    settings = config(Scenario())
    with EngineChild(("/bin/false",)) as child:
        await until(lambda: not alive(child.process.pid), "it to end")
        child.send_config(settings)
        with pytest.raises(EngineError, match="ended with status 1"):
            await connect(settings, child)


@pytest.mark.parametrize(
    ("arguments", "variables", "one"),
    [
        (["serve", "qwen", "--port", "80", "--max-num-seqs=4"], ["PENSTOCK_PORT", "TENSOR", "HF_HOME"], True),
        (["serve", "--tensor-parallel-size", "2"], [], False),
        (["run", "--pipeline-parallel-size=2"], [], False),
        (["serve", "--expert-parallel"], [], False),
        (["serve", "--distributed-executor", "ray"], [], False),
        (["serve", "--config", "ranks.yaml"], [], False),
        (["serve"], ["PENSTOCK_TENSOR_PARALLEL_SIZE"], False),
        (["serve"], ["penstock_config"], False),
    ],
)
def test_ranks_are_expected_where_a_setting_may_mean_them(
    arguments: Sequence[str], variables: Sequence[str], one: bool
) -> None:
    assert one_rank_expected(arguments, dict.fromkeys(variables, "2")) is one


@pytest.mark.parametrize(
    ("flags", "variables", "early"),
    [
        ((), {}, True),
        (("--tensor-parallel-size", "2"), {}, False),
        ((), {"PENSTOCK_PIPELINE_PARALLEL_SIZE": "2"}, False),
    ],
)
async def test_only_an_engine_of_one_rank_imports_torch_early(
    flags: Sequence[str], variables: Mapping[str, str], early: bool
) -> None:
    """`penstock run` starts its engine, and then reads its prompt from a pipe, which stays open here."""
    command = [sys.executable, "-m", "penstock", "run", "python-8m", *flags]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, **variables}) as process:
        try:

            def started() -> bool:
                return any("penstock.engine.process" in command_line(pid) for pid in children(process.pid))

            await until(started, "the engine process")
            (engine,) = children(process.pid)
            assert (IMPORT_RUNTIME in command_line(engine)) is early
        finally:
            process.kill()
    await until(lambda: not alive(engine), "the engine to end with its parent")


@pytest.mark.parametrize("imports", ["nothing yet", "libtorch"])
async def test_without_a_configuration_it_ends_quietly_also_while_it_imports_torch(imports: str) -> None:
    """A wrong command line ends its parent within that second."""
    ours, other = socket.socketpair()
    with ours, other:
        end = other.fileno()
        command = [*REAL_ENGINE, str(end), IMPORT_RUNTIME]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, pass_fds=(end,), **pipes) as process:
            if imports == "libtorch":
                maps = Path(f"/proc/{process.pid}/maps")
                await until(lambda: "libtorch" in maps.read_text(), "torch to be loaded")
            said, _ = process.communicate(timeout=60)
    assert (process.returncode, said) == (1, b"")


@pytest.mark.parametrize(
    ("line", "starts"),
    [
        ("serve", True),
        ("serve python-8m --port 80", True),
        ("serve python-8m --repository models", True),
        ("run --model python-8m", True),
        ("serve --repository models --port 80", False),
        ("serve --port 80 --repository=models", False),
        ("serve --providers file.yaml", False),
        ("serve --replicas 2", False),
        ("serve python-8m --help", False),
    ],
)
def test_an_engine_starts_before_the_command_line_is_read_if_it_is_needed(line: str, starts: bool) -> None:
    assert _starts_none(["penstock", *line.split()]) is not starts
