"""A process that is started before anybody knows what it shall run."""

import asyncio
import os
from pathlib import Path
from socket import MSG_PEEK

import pytest

from penstock.engine.link.engine_child import EngineChild
from penstock.engine.link.ipc import connect
from penstock.engine.signals import GROUP_SIGNALS
from penstock.messages import EngineError
from tests.engine.processes import alive
from tests.engine.simulated import ENGINE, Scenario, ask, config, until
from tests.schedule.simulated import request


def test_leaving_ends_it_and_leaves_nothing() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with EngineChild(ENGINE) as spawned:
        assert alive(spawned.process.pid)
    assert not alive(spawned.process.pid)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_signal_to_the_group_while_it_imports_is_not_for_it() -> None:
    settings = config(Scenario())
    with EngineChild(ENGINE) as spawned:
        for number in sorted(GROUP_SIGNALS):
            spawned.process.send_signal(number)
        spawned.send_config(settings)
        client = await connect(settings, spawned)
        assert (await ask(client, request("a", 4, 3))).reasons == {0: "length"}
    await client.close()


async def test_secrets_stay_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("PENSTOCK_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password")
    others = ("HF_HOME", "PENSTOCK_ISA", "TOKENIZERS_PARALLELISM", "RAY_AUTH_TOKEN", "MONKEY", "CUDA_VISIBLE_DEVICES")
    for name in (*secrets, *others):
        monkeypatch.setenv(name, "a value")
    with EngineChild(("/bin/sleep", "60")) as spawned:
        environ = Path(f"/proc/{spawned.process.pid}/environ")
        await until(lambda: environ.read_bytes() != b"", "the kernel to set it", 5)
        environment = environ.read_bytes().split(b"\0")
    names = {entry.partition(b"=")[0].decode() for entry in environment if entry.endswith(b"=a value")}
    assert names == set(others)


async def test_it_gets_ready_while_nobody_listens_and_serves_whoever_takes_it_over() -> None:
    settings = config(Scenario())
    with EngineChild(ENGINE) as spawned:
        spawned.send_config(settings)
        await asyncio.to_thread(spawned.socket.recv, 1, MSG_PEEK)  # it has said that it is ready
        client = await connect(settings, spawned)
    assert (await ask(client, request("a", 4, 3))).reasons == {0: "length"}
    await client.close()
    assert not alive(client.info.pid)


async def test_one_that_ended_before_it_was_taken_over_is_told() -> None:
    settings = config(Scenario())
    with EngineChild(("/bin/false",)) as spawned:
        await until(lambda: not alive(spawned.process.pid), "it to end", 30)
        spawned.send_config(settings)
        with pytest.raises(EngineError, match="ended with status 1"):
            await connect(settings, spawned)
