"""Engines that compute prompts for others, on loopback: every answer is that of one engine, whatever fails."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from penstock.cluster import FleetView, RouteChoice, RouteRequest, choose
from penstock.cluster.client import FleetClient
from penstock.messages import GenerateRequest
from tests.e2e.fleet.engines import EngineHostProcess, engines
from tests.e2e.fleet.requests import made, said
from tests.e2e.fleet.test_faults import front, joined
from tests.engine.simulated import ask
from tests.patience import until

REQUESTS = 20
FLAGS = ("--max-num-seqs", "16", "--max-num-batched-tokens", "64")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineHostProcess]]:
    roles = [("--role", "prefill"), ("--role", "decode"), ()]
    with engines(tmp_path_factory.mktemp("apart"), 3, *FLAGS, flags=roles) as running:
        yield running


def apart(view: FleetView, request: RouteRequest, seed: int) -> RouteChoice:
    """The production route, but each prompt is computed by the engine for prompts if that is there."""
    choice = choose(view, request, seed)
    prefills = [one.name for one in view.replicas if one.role == "prefill" and one.status == "ready"]
    if not prefills or not choice.replicas or prefills[0] == choice.replicas[0]:
        return choice
    return replace(choice, source=prefills[0], computes=True)


def long(number: int, salt: str) -> GenerateRequest:
    """A request of some kind, with a prompt of many steps."""
    drawn = random.Random(number)
    prompt = tuple(drawn.randrange(300, 3000) for _ in range(drawn.randrange(200, 700)))
    return replace(made(number, 30), prompt_ids=prompt, cache_salt=salt)


async def answers(fleet: FleetClient, salt: str) -> list[tuple[object, ...]]:
    return [said(one) for one in await asyncio.gather(*(ask(fleet, long(i, salt)) for i in range(REQUESTS)))]


@pytest.fixture(scope="module")
def expected(hosts: list[EngineHostProcess]) -> list[tuple[object, ...]]:
    """What one engine answers."""

    async def alone() -> list[tuple[object, ...]]:
        async with front(hosts[2].address) as fleet:
            await joined(fleet, 1)
            return await answers(fleet, "alone")

    return asyncio.run(alone())


async def nothing_held(fleet: FleetClient) -> None:
    await until(lambda: not any(sum(one.stats.blocks_held) for one in fleet.replicas), "all blocks to be given back")


async def test_prompts_are_computed_by_one_engine_and_answered_by_another(hosts, expected) -> None:
    async with front(f"{hosts[0].address},{hosts[1].address}", apart) as fleet:
        await joined(fleet, 2)
        prefill, decode = sorted(fleet.replicas, key=lambda one: one.engine.info.role, reverse=True)
        assert await answers(fleet, "apart") == expected
        blocks = sum(len(long(i, "").prompt_ids) // 16 for i in range(REQUESTS))
        await nothing_held(fleet)
        assert decode.stats.peer_reads == prefill.stats.peer_sends == blocks and not decode.stats.peer_failures
        assert decode.stats.prefill_tokens < 40 * REQUESTS, "only what is left of each last block"
        again = [await ask(fleet, long(i, "new")) for i in range(3)]
        assert [one.ends[0].cached_tokens for one in again] == [0, 0, 0], "they were computed for these requests"
        for i, one in enumerate(again):  # what a choice has used counts both engines
            used = [end.timing.usage for end in one.ends.values()]
            computed, prompt = sum(each.computed for each in used), len(long(i, "").prompt_ids)
            assert prompt <= computed <= prompt + 16 + sum(map(len, one.choices.values())), used
            assert all(each.step_seconds > 0 and each.block_seconds > 0 for each in used)
        assert not prefill.parts and not decode.parts


@pytest.mark.parametrize(
    "fault", ["kill prefill", *(pytest.param(each, marks=pytest.mark.rare) for each in ("stop prefill", "kill decode"))]
)
async def test_a_fault_costs_no_token(hosts, expected, fault: str) -> None:
    async with front(f"{hosts[0].address},{hosts[1].address}", apart) as fleet:
        await joined(fleet, 2)
        reading = asyncio.create_task(answers(fleet, fault))
        decode = next(one for one in fleet.replicas if one.engine.info.role == "decode")
        before = decode.stats.peer_reads
        await until(lambda: decode.stats.peer_reads > before, "blocks to be read")
        pid = hosts["decode" in fault].engine_pid
        os.kill(pid, signal.SIGSTOP if "stop" in fault else signal.SIGKILL)
        assert await reading == expected
        if "stop" in fault:
            os.kill(pid, signal.SIGCONT)
        await joined(fleet, 2)
        await nothing_held(fleet)
        assert await answers(fleet, fault) == expected
