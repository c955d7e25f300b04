"""Several ranks: one dies, stops, is stuck or fails; the engine says which, where and why, and nothing is left."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from penstock.engine.client import StreamingClient
from penstock.engine.ranks.local import LocalRanks
from penstock.engine.ranks.sizes import RankSizes
from penstock.engine.ranks.supervision import SILENCE_SHARE, STEP_SHARE
from penstock.engine.ranks.worker import BEAT_SECONDS
from penstock.engine.ranks.workers import WorkersExecutor, combine
from penstock.messages import Capacity, EngineError, Identity, KVGroup, MemoryRow
from tests.engine.processes import alive, children, descriptors
from tests.engine.simulated import Scenario, ask, config, expected, simulated_ranks, simulated_sizes, start
from tests.patience import until, wait_for
from tests.schedule.simulated import request

DEADLINE = 4.0  # step_deadline: ranks that a busy machine lets wait must not count as silent
SILENCE = SILENCE_SHARE * DEADLINE


class Engine:
    """An engine with two ranks, and their processes."""

    def __init__(self, client: StreamingClient) -> None:
        self.client = client
        self.ranks = sorted(children(client.info.pid))

    async def busy(self) -> list[asyncio.Task[object]]:
        tasks = [asyncio.create_task(ask(self.client, request(f"r{i}", 6, 500))) for i in range(8)]
        await until(lambda: self.client.stats().steps >= 3, "some steps")
        return tasks

    async def said_what_they_do(self) -> None:
        await asyncio.sleep(6 * BEAT_SECONDS)  # a beat may come late on a busy machine

    async def is_gone(self) -> None:
        for pid in (*self.ranks, self.client.info.pid):
            await until(lambda pid=pid: not alive(pid), "every process to end")


@pytest.fixture
async def started(scratch: Path):  # type: ignore[no-untyped-def]
    clients = []

    async def starter(scenario: Scenario | None = None, **fields: object) -> Engine:
        clients.append(await start("ranks", scenario, step_deadline=DEADLINE, **fields))
        return Engine(clients[-1])

    yield starter
    for client in clients:
        await client.close()
    assert not list(scratch.iterdir())


Starter = Callable[..., Awaitable[Engine]]


async def ends(tasks: list[asyncio.Task[object]]) -> list[str]:
    """What every stream ended with."""
    ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5 * DEADLINE)
    assert all(isinstance(end, EngineError) for end in ends), ends
    return list(map(str, ends))


@pytest.mark.parametrize(("rank", "moment"), [(1, "at rest"), (0, "in a step"), (1, "in a step")])
async def test_a_rank_that_is_killed_is_named(started: Starter, moment: str, rank: int) -> None:
    engine = await started(Scenario(step_seconds=0.05))
    tasks = await engine.busy() if moment == "in a step" else []
    await engine.said_what_they_do()
    pid = engine.ranks[rank]
    os.kill(pid, signal.SIGKILL)
    doing = "waiting for a plan, " if moment == "at rest" else r"(plan \d+|waiting for a plan), "
    await until(lambda: engine.client.state.status == "ended", "the report")
    message = rf"^rank {rank} \(pid {pid}\) was killed by SIGKILL.*; last known of it: {doing}"
    with pytest.raises(EngineError, match=message):
        await ask(engine.client, request("late"))
    assert len(set(await ends(tasks))) <= 1
    await engine.is_gone()


@pytest.mark.parametrize(("rank", "moment"), [(0, "at rest"), (1, "in a step")])
async def test_a_rank_that_is_stopped_is_named_and_killed(started: Starter, moment: str, rank: int) -> None:
    engine = await started(Scenario(step_seconds=0.05))
    tasks = await engine.busy() if moment == "in a step" else []
    await engine.said_what_they_do()
    pid = engine.ranks[rank]
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: engine.client.state.status == "ended", "the report")
    doing = "waiting for a plan, " if moment == "at rest" else r"(plan \d+|waiting for a plan), "
    message = rf"^rank {rank} \(pid {pid}\) has not been heard of for {SILENCE:g} s: .* last known of it: {doing}"
    with pytest.raises(EngineError, match=message):
        await ask(engine.client, request("late"))
    await ends(tasks)
    await engine.is_gone()


async def test_a_rank_that_is_stuck_is_named_before_those_that_wait_for_it(started: Starter) -> None:
    rank = 1
    engine = await started(Scenario(stuck_at=5, rank=rank))
    (message, *_) = await ends([asyncio.create_task(ask(engine.client, request("a", 6, 500)))])
    first, second = message.splitlines()
    stuck = f"rank {rank} (pid {engine.ranks[rank]}) is stuck"
    assert first.startswith(f"{stuck}: no step for {STEP_SHARE * DEADLINE:g} s (80% of step_deadline")
    assert "plan 5" in first
    assert second.startswith(f"rank {1 - rank} (pid {engine.ranks[1 - rank]}) is in plan 5, ")
    assert second.endswith("in meet")
    await engine.is_gone()


async def test_a_rank_that_holds_the_interpreter_falls_silent(started: Starter) -> None:
    engine = await started(Scenario(stuck_at=5, rank=1, holding_the_gil=True))
    (message, *_) = await ends([asyncio.create_task(ask(engine.client, request("a", 6, 500)))])
    assert message.startswith(f"rank 1 (pid {engine.ranks[1]}) has not been heard of")
    await engine.is_gone()


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_fails_is_named_with_its_reason(started: Starter, rank: int) -> None:
    engine = await started(Scenario(fail_at=5, rank=rank))
    (message, *_) = await ends([asyncio.create_task(ask(engine.client, request("a", 6, 500)))])
    head, *trace = message.splitlines()
    assert head == f"rank {rank} (pid {engine.ranks[rank]}) failed in plan 5: RuntimeError: the device has burnt out"
    assert "in result" in "".join(trace)
    await engine.is_gone()


@pytest.mark.parametrize(("tensor", "stages"), [(1, 2), (2, 2), (3, 1)])
async def test_every_split_gives_the_same_tokens(started: Starter, tensor: int, stages: int) -> None:
    engine = await started(tensor_parallel_size=tensor, pipeline_parallel_size=stages)
    assert len(engine.ranks) == tensor * stages
    asked = [request(f"r{i}", 5 + 30 * i, 20 + i, n=1 + i % 2, logprobs=0) for i in range(6)]
    answers = await asyncio.gather(*(ask(engine.client, one) for one in asked))
    for one, answer in zip(asked, answers, strict=True):
        assert answer.choices == {choice: expected(one, choice) for choice in range(one.n)}


# -- while starting ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [-1, 1])
async def test_what_a_user_did_wrong_is_told_as_without_ranks(started: Starter, rank: int) -> None:
    with pytest.raises(EngineError) as caught:
        await started(Scenario(refuse="there is no such file", rank=rank))
    assert str(caught.value) == "there is no such file"


@pytest.mark.parametrize("rank", [0, 1])
async def test_what_else_goes_wrong_while_loading_names_the_rank(started: Starter, rank: int) -> None:
    with pytest.raises(EngineError, match=rf"^rank {rank} \(pid \d+\) failed in loading: KeyError: 'a bug'"):
        await started(Scenario(crash="a bug", rank=rank))


async def test_a_rank_that_vanishes_while_loading_is_named(started: Starter) -> None:
    with pytest.raises(EngineError, match=r"^rank 1 \(pid \d+\) ended with status 3"):
        await started(Scenario(exit=3, rank=1))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("/nonexistent/python",), "No such file"),
        ((sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"), r"rank 0 \(pid \d+\) was killed by SIGSEGV"),
    ],
)
def test_processes_that_are_no_ranks_are_told(scratch: Path, command: tuple[str, ...], message: str) -> None:
    before, children_before = descriptors(), children(os.getpid())
    executor = WorkersExecutor(config(), lambda config: LocalRanks(2, command), simulated_sizes)
    with pytest.raises((EngineError, OSError), match=message):
        executor.start()
    executor.close()
    assert descriptors() == before
    assert not list(scratch.iterdir())
    assert children(os.getpid()) == children_before


def test_a_rank_whose_beats_come_late_is_waited_for(scratch: Path) -> None:
    """Before nobody can connect any more, both of its sockets have."""
    code = """
import sys, time
from penstock.engine.ranks import worker
from tests.engine.ranks import simulated_rank
ready, connect, run = [], worker.connect, worker.Pulse.run

def later(context, endpoint, keys, name=b""):
    if name:
        return connect(context, endpoint, keys, name)
    socket = context.socket(worker.zmq.DEALER)
    ready.append(lambda: socket.connect(endpoint))
    return socket

def late(pulse):
    time.sleep(1)
    ready.pop()()
    run(pulse)

worker.connect, worker.Pulse.run = later, late
sys.exit(worker.work(simulated_rank.load))
"""
    executor = WorkersExecutor(
        config(tensor_parallel_size=2), lambda config: LocalRanks(2, (sys.executable, "-c", code)), simulated_sizes
    )
    try:
        executor.start()
        deadline = time.monotonic() + SILENCE
        while time.monotonic() < deadline:
            executor.health()  # which raises where one is silent
            time.sleep(0.05)
        assert all(rank.beat is not None and rank.beat.doing == "waiting for a plan" for rank in executor._states)
    finally:
        executor.close()
    assert not list(scratch.iterdir())


# -- the engine dies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["at rest", "in a step", "with a stopped rank"])
async def test_ranks_without_an_engine_end_at_once(started: Starter, moment: str) -> None:
    engine = await started(Scenario(step_seconds=0.05, stuck_at=5))
    tasks = [] if moment == "at rest" else await engine.busy()
    if moment == "with a stopped rank":
        os.kill(engine.ranks[1], signal.SIGSTOP)
    os.kill(engine.client.info.pid, signal.SIGKILL)
    await engine.is_gone()
    await ends(tasks)


def test_ranks_whose_engine_dies_before_they_are_told_what_to_do_leave_no_socket(scratch: Path) -> None:
    code = """
import sys, time
from penstock.engine.ranks.local import LocalRanks
from tests.engine.simulated import RANK
ranks = LocalRanks(2, RANK)
said = []
while len(said) < 2:
    said += [rank for rank, report in ranks.receive(1.0) if type(report).__name__ == "Hello"]
print(flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ})
    assert parent.stdout is not None
    with parent.stdout:
        parent.stdout.readline()
        ranks = children(parent.pid)
        assert len(ranks) == 2
        parent.kill()
        parent.wait()
    wait_for(lambda: not any(map(alive, ranks)), "the ranks to end")
    assert not list(scratch.iterdir())


# -- what ranks can do together ---------------------------------------------------------------------------------------


def capacity(**changes: object) -> Capacity:
    fields = {"block_size": 4, "groups": (KVGroup(5),), "vocab_size": 50, "memory": (MemoryRow("weights", 7),)}
    return Capacity(**{**fields, **changes})


def test_stages_take_as_many_plans_and_no_late_ids() -> None:
    one = combine([capacity(identity=Identity("w", "a")), capacity(identity=Identity("", "b"))], 1)
    assert (one.depth, one.late_ids, one.memory[0].bytes) == (1, True, 14)
    two = combine([capacity(identity=Identity("w", "a")), capacity(identity=Identity("", "c"))], 2)
    assert (two.depth, two.late_ids) == (2, False)
    assert one.identity.weights == two.identity.weights == "w" and one.identity.numerics != two.identity.numerics


def test_ranks_that_do_not_agree_are_refused() -> None:
    with pytest.raises(RuntimeError, match="do not agree"):
        combine([capacity(), capacity(groups=(KVGroup(6),))], 1)


def test_ranks_of_a_machine_share_its_memory() -> None:
    asked = []

    def size(config: object, memory: list[int]) -> RankSizes:
        asked.extend(memory)
        return simulated_sizes(config, memory)

    executor = WorkersExecutor(config(tensor_parallel_size=2), simulated_ranks, size)
    try:
        executor.start()
        total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
        assert len(asked) == 2 and all(0 < share <= total / 2 for share in asked)
    finally:
        executor.close()
