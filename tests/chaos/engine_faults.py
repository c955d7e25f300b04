"""Engines that end, stall, run out of memory or compute what is no number."""

import asyncio
import itertools
import random
import time
from pathlib import Path
from typing import Any

from tests.chaos.engine import Fault, fault_seed
from tests.chaos.load import Told, ask, ask_all, request, require_same
from tests.chaos.place import place, require
from tests.chaos.server import TOKENIZER_FAULT

STREAMS = 12
TOKENS = 160
SMALL_POOL = str(int(1.2 * 1024 * 4096))  # bytes: 1.2 times a sequence of 1,024 tokens of the embedded model


async def poison(folder: Path) -> dict[str, Any]:
    """A prompt that crashes the engine, sent 100 times among bystanders."""
    bodies = [request(number, 400) for number in range(STREAMS)]
    bad = {**request(0, 8, stream=False), "prompt": "# poison", "seed": fault_seed(Fault.SEGFAULT, repeated=True)}
    async with place(folder) as site:
        before = await site.baseline()
        undisturbed = await ask_all(site, bodies)
        bystanders = asyncio.create_task(ask_all(site, bodies))
        await asyncio.sleep(0.2)
        first = await ask(site, bad)
        rest = [await ask(site, bad) for _ in range(99)]
        require_same(await bystanders, undisturbed)
        deaths = await site.value("penstock_engine_restarts_total")
        require(deaths <= 2, f"the prompt ended {deaths:g} engines")
        require(all(told.status == 400 for told in (first, *rest)), f"not all were refused: {first}")
        require("ended twice" in rest[-1].error, rest[-1].error)
        async with site.http.post(site.url + "/v1/completions", json={"model": site.model, **bad}) as answer:
            require(answer.headers.get("x-should-retry") == "false", f"clients may send it again: {answer.headers}")
        return {"engine_deaths": int(deaths), "refused": len(rest) + 1, **await site.require_baseline(before)}


async def faults_at_steps(folder: Path) -> dict[str, Any]:
    """An exception, an exit and a crash in random steps: all streams go on."""
    choose = random.Random(17)
    bodies = [request(number, TOKENS) for number in range(STREAMS)]
    figures: dict[str, Any] = {}
    async with place(folder, "--speculation", "off") as site:  # so that every stream has as many steps as tokens
        before = await site.baseline()
        undisturbed = await ask_all(site, bodies)
        for count, fault in enumerate((Fault.EXCEPTION, Fault.EXIT, Fault.SEGFAULT), 1):
            began = time.monotonic()
            # A greedy request: the seed changes nothing in it.
            with_fault = [{**bodies[0], "seed": fault_seed(fault, choose.randrange(1, TOKENS - 1))}, *bodies[1:]]
            require_same(await ask_all(site, with_fault), undisturbed)
            restarts = await site.value("penstock_engine_restarts_total")
            require(restarts == count, f"{fault.name}: {restarts:g} restarts instead of {count}")
            figures[f"{fault.name.lower()}_s"] = round(time.monotonic() - began, 1)
        return {"streams_same": 3 * STREAMS, **figures, **await site.require_baseline(before)}


async def no_memory(folder: Path) -> dict[str, Any]:
    """Failed allocations before and after random steps: one request fails each time, and the engine goes on."""
    failures = 12
    steps = random.Random(29).sample(range(1, 1 + failures // 2), failures // 2)  # drafts leave a stream few steps
    bodies = [request(number, TOKENS) for number in range(STREAMS)]
    bodies[2:4] = [{**body, "temperature": 1.0, "seed": 7} for body in bodies[2:4]]
    bodies[4] |= {"ignore_eos": False, "response_format": {"type": "json_object"}}
    long = request(0, 40, prompt="x = [1, 2, 3]\n" * 100)
    async with place(folder) as site:
        before = await site.baseline()
        undisturbed = await ask_all(site, bodies)
        for fault, step in itertools.product((Fault.NO_MEMORY, Fault.NO_MEMORY_AT_END), steps):
            told = await ask_all(site, [{**bodies[0], "seed": fault_seed(fault, step)}, *bodies[1:]])
            failed = [i for i, each in enumerate(told) if each.error]
            require(len(failed) == 1, f"{len(failed)} requests failed: {told}")
            require("memory did not suffice" in told[failed[0]].error, told[failed[0]].error)
            for i in failed:
                del told[i]
            require_same(told, [each for i, each in enumerate(undisturbed) if i not in failed])
            # A prompt that needs most in its own step is the one that fails.
            streams = asyncio.create_task(ask_all(site, bodies))
            await asyncio.sleep(0.1)
            refused = await ask(site, {**long, "seed": fault_seed(fault, repeated=True)})
            require("memory did not suffice" in refused.error, f"the long prompt did not fail: {refused}")
            require_same(await streams, undisturbed)
        restarts = await site.value("penstock_engine_restarts_total")
        require(restarts == 0, f"{restarts:g} restarts")
        return {"failed_alone": 2 * failures, "restarts": 0} | await site.require_baseline(before)


async def stall(folder: Path) -> dict[str, Any]:
    """A step that never ends."""
    bodies = [request(number, TOKENS) for number in range(STREAMS)]
    async with place(folder, "--step-deadline", "3") as site:
        undisturbed = await ask_all(site, bodies)
        before = await site.baseline()
        with_fault = [{**bodies[0], "seed": fault_seed(Fault.STALL, 40)}, *bodies[1:]]
        streams = asyncio.create_task(ask_all(site, with_fault))
        began = time.monotonic()
        await site.until_ready(False)
        noticed = time.monotonic() - began
        back = await site.until_ready()
        require_same(await streams, undisturbed)
        return {"noticed_s": round(noticed, 1), "back_s": round(noticed + back, 1)} | (
            await site.require_baseline(before)
        )


async def not_finite(folder: Path) -> dict[str, Any]:
    """Keys and values that are not finite: one request fails, nothing of it is cached, and its blocks can be used."""
    failures = 12
    bodies = [request(number, TOKENS) for number in range(STREAMS)]
    async with place(folder) as site:
        undisturbed = await ask_all(site, bodies)
        before = await site.baseline()
        for step in range(1, failures + 1):
            bad = {**bodies[0], "seed": fault_seed(Fault.NOT_FINITE, step)}
            told, *others = await ask_all(site, [bad, *bodies[1:]])
            require(told.error and told.text != undisturbed[0].text, f"the request did not fail: {told}")
            require_same(others, undisturbed[1:])
            require_same([await ask(site, bodies[0])], undisturbed[:1])  # on the same blocks, and from the cache
        require(await site.value("penstock_engine_restarts_total") == 0, "the engine was started again")
        return {"failed_alone": failures, "streams_same": failures * STREAMS} | await site.require_baseline(before)


async def tokenizer(folder: Path) -> dict[str, Any]:
    """A tokenizer that panics in its native code: this request fails, and others do not notice."""
    bodies = [request(number, TOKENS) for number in range(STREAMS)]
    async with place(folder) as site:
        undisturbed = await ask_all(site, bodies)
        before = await site.baseline()
        streams = asyncio.create_task(ask_all(site, bodies))
        slowest, statuses = 0.0, set()
        for size in itertools.islice(itertools.cycle((0, 20_000)), 40):  # the second in a thread
            began = time.monotonic()
            told = await ask(site, request(0, 4, stream=False, prompt="x" * size + TOKENIZER_FAULT))
            slowest = max(slowest, time.monotonic() - began)
            statuses.add(told.status)
        require(statuses == {400}, f"statuses {statuses}")
        require_same(await streams, undisturbed)
        return {"failed": 40, "slowest_s": round(slowest, 2)} | await site.require_baseline(before)


async def saturation(folder: Path, seconds: float) -> dict[str, Any]:
    """More streams than the engine takes, and long prompts: nothing is restarted, and answers are right."""
    async with place(folder, "--max-num-seqs", "32") as site:
        bodies = [request(number, 48) for number in range(64)]
        long = request(0, 4, prompt="x = [1, 2, 3]\n" * 250)
        undisturbed = await ask_all(site, bodies)
        before = await site.baseline()
        began, rounds = time.monotonic(), 0
        while time.monotonic() - began < seconds:
            told: list[Told] = await ask_all(site, [*bodies, long])
            require(not told[-1].error, f"the long prompt failed: {told[-1]}")
            require_same(told[:-1], undisturbed)
            rounds += 1
        restarts = await site.value("penstock_engine_restarts_total")
        require(restarts == 0, f"{restarts:g} false restarts")
        return {"seconds": round(time.monotonic() - began), "answers": rounds * 65, "restarts": 0} | (
            await site.require_baseline(before)
        )


async def small_pool(folder: Path) -> dict[str, Any]:
    """A KV pool of little more than the longest request: all finish, with what they say in a large one."""
    bodies = [request(number, 800) for number in range(STREAMS)]
    async with place(folder / "large") as site:
        undisturbed = await ask_all(site, bodies)
    async with place(folder / "small", "--max-model-len", "1024", "--kv-cache-memory", SMALL_POOL) as site:
        before = await site.baseline()
        require_same(await ask_all(site, bodies), undisturbed)
        preempted = await site.value("penstock_num_preemptions_total")
        require(preempted, "nothing was preempted, so nothing was tried")
        return {"streams_same": STREAMS, "preemptions": int(preempted)} | await site.require_baseline(before)
