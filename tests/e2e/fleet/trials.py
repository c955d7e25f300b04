"""Faults of random kinds at random moments under 50 streams, again and again: python -m tests.e2e.fleet.trials

Every stream must be complete and have the tokens, logprobs and ends that it has without a fault. Three engines of
python-8m on loopback, each behind a proxy that can make its link slow. Prints a row for each kind of fault:

detection   seconds from the fault until requests leave the engine; a drain's grace is part of it
gap         the longest time from the detection, or from the last tokens after it, to the next tokens of a stream that
            moved, less the prefill of what is not cached of those that moved to the same engine, at its measured rate.
            What is left is the front's work, steps, and what else the other engines have to do
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from penstock.cluster.client import FleetClient
from penstock.cluster.members import Members, find_addresses
from penstock.cluster.replica import Replica
from penstock.engine.remote.connector import connect_engine
from penstock.messages import Drain
from tests.chaos.proxy import Proxy, proxied
from tests.e2e.fleet.engines import KEY, EngineHostProcess, engines, start_engine
from tests.e2e.fleet.requests import made, said
from tests.engine.simulated import Answer, ask
from tests.patience import until

ENGINES, STREAMS, TOKENS = 3, 50, 120
GRACE = 0.3  # of a drain, and of an engine whose machine is taken away
SLOW = 0.4  # seconds before each piece of a slow link
# What happens, and the most seconds until it may be noticed; None: it need not be.
KINDS: dict[str, float | None] = {
    "engine killed": 2.0,
    "engine stopped": 5.0,  # it accepts requests and makes no step
    "host killed": 2.0,
    "host stopped": 5.0,
    "drained": 2.0,
    "machine taken away": 2.0,
    "slow link": None,
}
ENDS = {"host killed", "drained", "machine taken away"}  # after which the engine is started again


class Trial(NamedTuple):
    kind: str
    same: bool
    moved: int
    detection: float | None
    gap: float | None  # of streams that moved, less detection and prefill
    whole_gap: float  # of any stream


class FleetUnderFaults:
    """Three engines, and a front."""

    def __init__(self, folder: Path, hosts: list[EngineHostProcess], proxies: list[Proxy], fleet: FleetClient) -> None:
        self._folder, self.hosts, self._proxies, self.fleet = folder, hosts, proxies, fleet
        self._started: list[EngineHostProcess] = []
        self.expected: list[tuple[object, ...]] = []

    async def ready(self) -> None:
        await until(lambda: sum(one.status == "ready" for one in self.fleet.replicas) == ENGINES, "all engines")

    async def trial(self, kind: str, moment: float, target: int) -> Trial:
        """Send the streams, and do it when they have `moment` of their tokens, as a share."""
        fleet = self.fleet
        replica = next(one for one in fleet.replicas if one.name.endswith(f":{self._proxies[target].port}"))
        answers = [Answer(made(number, TOKENS)) for number in range(STREAMS)]
        whole = sum(len(ids) for choices, *_ in self.expected for ids in choices.values())  # type: ignore[attr-defined]
        got, reached = 0, asyncio.Event()
        gaps: list[tuple[bool, float, float]] = []  # whether it moved meanwhile, begin, end
        fault_at = float("inf")

        async def read(answer: Answer, number: int) -> None:
            nonlocal got
            last, moves = time.monotonic(), 0
            stream = None
            async for delta in fleet.generate(made(number, TOKENS)):
                now = time.monotonic()
                stream = stream or fleet._requests._streams[f"r{number}"]
                if now > fault_at:
                    gaps.append((stream.moves > moves, max(last, fault_at), now))
                last, moves = now, stream.moves
                answer.take(delta)
                got += len(delta.token_ids)
                if got >= moment * whole:
                    reached.set()

        reading = [asyncio.create_task(read(answer, number)) for number, answer in enumerate(answers)]
        waiting = asyncio.create_task(reached.wait())
        await asyncio.wait([waiting, *reading], return_when=asyncio.FIRST_COMPLETED)
        before = sum(fleet.moves.values())
        fault_at = time.monotonic()
        watching = asyncio.create_task(self._detected(before))
        await self._harm(kind, target, replica)
        await asyncio.gather(*reading)
        moved = sum(fleet.moves.values()) - before
        detected_at, prefill = await watching if moved else (None, 0.0)
        watching.cancel()
        same = [said(answer) for answer in answers] == self.expected
        gap = None
        if detected_at is not None:
            after = max((end - max(begin, detected_at) for did_move, begin, end in gaps if did_move), default=0.0)
            gap = max(after - prefill, 0.0)
        await self._mend(kind, target)
        detection = None if detected_at is None else detected_at - fault_at
        return Trial(kind, same, moved, detection, gap, max((end - begin for _, begin, end in gaps), default=0.0))

    async def _detected(self, before: int) -> tuple[float, float]:
        """Return when requests have moved, and the longest prefill of them at an engine, in seconds."""
        while sum(self.fleet.moves.values()) == before:
            await asyncio.sleep(0.002)
        now = time.monotonic()
        tokens = [
            (sum(part.uncached for part in one.parts if part.owner.moves), one._rates.prefill_seconds)
            for one in self.fleet.replicas
        ]
        return now, max(count * seconds for count, seconds in tokens)

    async def _harm(self, kind: str, target: int, replica: Replica) -> None:
        host = self.hosts[target]
        match kind:
            case "engine killed":
                os.kill(host.engine_pid, signal.SIGKILL)
            case "engine stopped":
                os.kill(host.engine_pid, signal.SIGSTOP)
            case "host killed":
                host.kill(signal.SIGKILL)
            case "host stopped":
                host.kill(signal.SIGSTOP)
            case "drained":
                await replica.engine.control(Drain(GRACE))
            case "machine taken away":
                (self._folder / f"notice-{target}").touch()
            case "slow link":
                self._proxies[target].slow = SLOW

    async def _mend(self, kind: str, target: int) -> None:
        """Undo it, or start an engine in the place of one that has ended."""
        host = self.hosts[target]
        self._proxies[target].slow = 0.0
        if kind in ENDS:
            await until(lambda: host.process.poll() is not None, "the engine to end")
            (self._folder / f"notice-{target}").unlink(missing_ok=True)
            log = self._folder / f"again-{len(self._started)}"
            process = start_engine(log, *flags_of(self._folder, target), port=host.port)
            self.hosts[target] = await asyncio.to_thread(EngineHostProcess, process, log)
            self._started.append(self.hosts[target])
        else:
            host.kill(signal.SIGCONT)
            with contextlib.suppress(ProcessLookupError, StopIteration):
                os.kill(host.engine_pid, signal.SIGCONT)
        await self.ready()

    def end(self) -> None:
        for host in self._started:
            host.process.kill()
            host.process.wait()


def flags_of(folder: Path, number: int) -> tuple[str, ...]:
    notice = str(folder / f"notice-{number}")
    return ("--max-num-seqs", "96", "--drain-timeout", str(GRACE), "--preemption-notice", notice)


@contextlib.asynccontextmanager
async def under_faults(folder: Path) -> AsyncIterator[FleetUnderFaults]:
    """Engines that are ready, with the answers that they give without a fault."""
    async with contextlib.AsyncExitStack() as held:
        hosts = held.enter_context(engines(folder, ENGINES, flags=[flags_of(folder, n) for n in range(ENGINES)]))
        proxies = [await held.enter_async_context(proxied(host.port)) for host in hosts]
        fleet = FleetClient(clock=time.monotonic)
        addresses = find_addresses(",".join(f"127.0.0.1:{proxy.port}" for proxy in proxies))
        keeping = asyncio.create_task(Members(fleet, addresses, lambda one: connect_engine(one, KEY)).run())
        found = FleetUnderFaults(folder, hosts, proxies, fleet)
        try:
            await found.ready()
            requests = [made(number, TOKENS) for number in range(STREAMS)]
            found.expected = [said(each) for each in await asyncio.gather(*(ask(fleet, one) for one in requests))]
            yield found
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await fleet.close()
            found.end()


async def run(folder: Path, count: int, seed: int) -> list[Trial]:
    """Trials of all kinds in turn, at random moments and engines."""
    drawn, trials = random.Random(seed), []
    async with under_faults(folder) as fleet:
        for number in range(count):
            kind = list(KINDS)[(number + seed) % len(KINDS)]
            trials.append(await fleet.trial(kind, drawn.uniform(0.05, 0.8), drawn.randrange(ENGINES)))
            print(number, *trials[-1], flush=True)
            if not trials[-1].same:
                break
    return trials


def summary(trials: list[Trial]) -> dict[str, Any]:
    """A row for each kind: how many trials, and of how many the streams were complete and the same."""
    rows: dict[str, Any] = {}
    for kind in KINDS:
        own = [trial for trial in trials if trial.kind == kind]
        row: dict[str, Any] = {"trials": len(own), "same": sum(trial.same for trial in own)}
        row["moved"] = sum(trial.moved for trial in own)
        for name in ("detection", "gap", "whole_gap"):
            values = [value for trial in own if (value := getattr(trial, name)) is not None]
            if values:
                row[name] = {"median": round(statistics.median(values), 3), "most": round(max(values), 3)}
        rows[kind] = row
    return rows


def main(
    folder: Annotated[Path, typer.Argument(help="For logs of the engines.")],
    trials: int = 21,
    seed: int = 0,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Run trials, add them to those in the file, and print the table of all."""
    folder.mkdir(parents=True, exist_ok=True)
    found = asyncio.run(run(folder, trials, seed))
    if json_file is not None:
        earlier = json.loads(json_file.read_text())["trials"] if json_file.exists() else []
        found = [Trial(**each) for each in earlier] + found
        written = {"trials": [trial._asdict() for trial in found], "summary": summary(found)}
        json_file.write_text(json.dumps(written, indent=1))
    print(msgspec.json.format(msgspec.json.encode(summary(found))).decode())
    raise SystemExit(not all(trial.same for trial in found))


if __name__ == "__main__":
    typer.run(main)
