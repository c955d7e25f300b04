"""Requests begin one after the other: of each tenant in turn."""

import asyncio

from penstock.frontend.http.starts import RequestStarts


async def test_a_burst_of_one_tenant_delays_another_by_one_request() -> None:
    starts, begun = RequestStarts(), list[str]()

    async def begin(name: str, *, gone: bool = False) -> None:
        if await starts.next(lambda: gone, name[0]):
            begun.append(name)

    names = [*(f"a{number}" for number in range(5)), "b0", "c0", "b1"]
    await asyncio.gather(*(begin(name, gone=name == "a1") for name in names))
    assert begun == ["a0", "b0", "c0", "b1", "a2", "a3", "a4"]
