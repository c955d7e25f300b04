"""A client process to be killed: python -m tests.engine.deserted MOMENT. Prints the engine's pid when it is there."""

import asyncio
import contextlib
import os
import sys
import time

from penstock.engine.link.engine_child import EngineChild
from penstock.engine.link.ipc import spawn
from tests.engine.processes import children
from tests.engine.simulated import ENGINE, Scenario, ask, config
from tests.patience import until
from tests.schedule.simulated import request

MOMENTS = {
    "told": Scenario(),
    "starting": Scenario(),
    "loading": Scenario(load_seconds=60),
    "idle": Scenario(),
    "stepping": Scenario(step_seconds=0.01),
    "in a long step": Scenario(stuck_at=3),
    "in a long step that holds the GIL": Scenario(stuck_at=3, holding_the_gil=True),
}


def engine_pid() -> int:
    (pid,) = children(os.getpid())
    return pid


async def main(moment: str) -> None:
    if moment == "told":
        child = EngineChild(ENGINE)
        child.send_config(config(MOMENTS[moment]))
        print(child.process.pid, flush=True)
        time.sleep(60)
    starting = asyncio.create_task(spawn(config(MOMENTS[moment]), ENGINE))
    await asyncio.sleep(0)
    if moment == "starting":
        print(engine_pid(), flush=True)
        time.sleep(60)  # and never looks at what the engine says
    if moment == "loading":
        await asyncio.sleep(1)
        print(engine_pid(), flush=True)
        await asyncio.sleep(60)
    client = await starting
    if moment != "idle":
        consumer = asyncio.create_task(ask(client, request("a", 4, 500)))
        await until(lambda: client.stats().steps >= 1, "a step")
        await asyncio.sleep(0.1)
        assert not consumer.done()
    print(client.info.pid, flush=True)
    await asyncio.sleep(60)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1]))
