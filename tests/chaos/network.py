"""Clients that break off, read slowly, or send what is too much."""

import asyncio
import contextlib
import json
import random
import time
import zlib
from pathlib import Path
from typing import Any

import aiohttp

from penstock.bench.workload import percentile
from tests.chaos.load import ask, ask_all, quietly, request, require_same
from tests.chaos.place import Place, place, require
from tests.chaos.proxy import Link, proxied, reset

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
MIB = 1 << 20


async def resets(folder: Path) -> dict[str, Any]:
    """Clients whose connections are reset while their requests are queued, prefilled and decoded."""
    rounds = 150
    choose = random.Random(7)
    async with place(folder, "--max-num-seqs", "8") as site, proxied(site.server.port) as proxy:
        bodies = [request(number, 300) for number in range(4)]
        undisturbed = await ask_all(site, bodies)
        before = await site.baseline()
        bystanders = asyncio.create_task(ask_all(site, bodies))
        clients = []
        for number in range(rounds):
            proxy.link = Link(reset_after=choose.choice((0, 1, 200, 2_000, 20_000)))
            stream = bool(number % 3)
            body = request(number, 400, stream=stream, prompt="x = 1\n" * choose.choice((1, 100, 300)))
            clients.append(asyncio.create_task(quietly(ask(site, body, f"http://127.0.0.1:{proxy.port}"))))
            if not stream:  # it answers only at its end: break off before
                asyncio.get_running_loop().call_later(choose.uniform(0.0, 0.5), clients[-1].cancel)
            await asyncio.sleep(0.01)
        await asyncio.gather(*clients, return_exceptions=True)
        require_same(await bystanders, undisturbed)
        return {"requests": rounds, "resets": proxy.resets} | await site.require_baseline(before)


async def disconnects(folder: Path, count: int) -> dict[str, Any]:
    """Clients that leave while sequences are preempted."""
    choose = random.Random(8)
    at_once = asyncio.Semaphore(48)
    async with place(folder, "--max-model-len", "512", "--kv-cache-memory", str(6 * MIB)) as site:
        before = await site.baseline()
        memory = site.resident()

        async def leave(number: int) -> None:
            async with at_once:
                _, writer = await asyncio.open_connection("127.0.0.1", site.server.port)
                sent = json.dumps({**request(number, 300), "model": site.model}).encode()
                writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(sent) + sent)
                await asyncio.sleep(choose.expovariate(1 / 0.15))
                reset(writer)

        await asyncio.gather(*(leave(number) for number in range(count)))
        preempted = await site.value("penstock_num_preemptions_total")
        require(preempted, "nothing was preempted, so nothing was tried")
        back = await site.require_baseline(before)
        return {
            "disconnects": count,
            "preemptions": int(preempted),
            "memory_mb": round((site.resident() - memory) / 1e6, 1),
            **back,
        }


async def gaps(site: Place, count: int) -> list[float]:
    """Seconds between events of some streams that are read at full speed."""
    found: list[float] = []

    async def read(number: int) -> None:
        body = {**request(number, 200), "model": site.model}
        async with site.http.post(site.url + "/v1/completions", json=body) as answer:
            last = 0.0
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    now = time.monotonic()
                    if last:
                        found.append(now - last)
                    last = now

    await asyncio.gather(*(read(number) for number in range(count)))
    return found


async def slow_readers(folder: Path) -> dict[str, Any]:
    """200 readers at a byte a second: the server's memory is bounded, and others are as fast as without them."""
    readers = 200
    async with place(folder, "--max-num-seqs", "256") as site, proxied(site.server.port) as proxy:
        await gaps(site, 4)
        before, memory = await site.baseline(), site.resident(engine=False)
        without = [await gaps(site, 4) for _ in range(3)]
        proxy.link = Link(bytes_per_second=1.0)
        url = f"http://127.0.0.1:{proxy.port}"
        slow = [asyncio.create_task(quietly(ask(site, request(n, 400), url))) for n in range(readers)]
        await asyncio.sleep(1.0)
        await site.idle(240)  # their tokens are computed, and lie in buffers
        beside = [await gaps(site, 4) for _ in range(3)]
        grown = site.resident(engine=False) - memory
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        proxy.close()
        p99 = [min(percentile(one, 0.99) for one in some) for some in (without, beside)]
        require(grown < 64 * MIB, f"{grown / 1e6:.0f} MB more for {readers} slow readers")
        require(p99[1] < 1.2 * p99[0] + 0.005, f"P99 gap {p99[1]:.4f} s beside them, {p99[0]:.4f} s without")
        figures = {"grown_mb": round(grown / 1e6, 1), "p99_ratio": round(p99[1] / p99[0], 2)}
        return figures | await site.require_baseline(before)


async def large_bodies(folder: Path) -> dict[str, Any]:
    """A body of 1 GB, one of a million chunks, and a small one that unpacks to a large one."""
    async with place(folder) as site:
        before = await site.baseline()
        memory, peak = site.resident(engine=False), 0
        bomb = zlib.compress(b" " * (256 * MIB), wbits=31)

        async def send(head: bytes, pieces: list[bytes], repeat: int) -> int:
            nonlocal peak
            reader, writer = await asyncio.open_connection("127.0.0.1", site.server.port)
            writer.write(HEAD + head)
            with contextlib.suppress(OSError):
                for number in range(repeat):
                    writer.writelines(pieces)
                    await writer.drain()
                    if number % 256 == 0:
                        peak = max(peak, site.resident(engine=False))
            answer = b""
            with contextlib.suppress(OSError):
                answer = await asyncio.wait_for(reader.read(4096), 20)
            writer.transport.abort()
            return int(answer.split()[1]) if answer else 0

        chunk = b"1\r\n \r\n"
        statuses = {
            "1 GB": await send(b"content-length: 1000000000\r\n\r\n", [b" " * 65_536], 15_259),
            "chunks": await send(b"transfer-encoding: chunked\r\n\r\n", [chunk] * 100, 50_000),
            "gzip": await send(b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(bomb), [bomb], 1),
        }
        grown = peak - memory
        # The refusal is lost if the socket is reset while the client still writes.
        require(set(statuses.values()) <= {0, 400, 408, 413, 415}, f"statuses {statuses}")
        require(statuses["gzip"] == 415, f"gzip: {statuses['gzip']}")
        require(grown < 50 * MIB, f"{grown / 1e6:.0f} MB more")
        return {"peak_grown_mb": round(grown / 1e6, 1), **statuses} | await site.require_baseline(before)


async def descriptors(folder: Path) -> dict[str, Any]:
    """More connections than the server may have files."""
    limit = ("/bin/sh", "-c", 'ulimit -n 96; exec "$0" "$@"')
    async with place(folder, wrapper=limit) as site:
        before = await site.baseline()
        undisturbed = await ask_all(site, [request(1)])
        held = []
        for _ in range(200):
            with contextlib.suppress(OSError, TimeoutError):
                held.append(await asyncio.wait_for(asyncio.open_connection("127.0.0.1", site.server.port), 5))
        await asyncio.sleep(1.0)
        for _, writer in held:
            writer.transport.abort()
        began, told = time.monotonic(), []
        while not told and time.monotonic() - began < 30.0:  # connections that waited to be accepted are closed
            with contextlib.suppress(aiohttp.ClientError):
                told = await ask_all(site, [request(1)])
        require_same(told, undisturbed)
        return {"connections": len(held), "answers_after_s": round(time.monotonic() - began, 2)} | (
            await site.require_baseline(before)
        )
