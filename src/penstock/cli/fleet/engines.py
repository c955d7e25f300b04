"""Implements `penstock fleet status` and `penstock fleet drain`, which connect to engines as a front does."""

import asyncio
import sys
from collections.abc import Awaitable, Callable

from penstock.cli.serving.front import engines_tls
from penstock.cluster.members import find_addresses
from penstock.config.texts import checked_flag
from penstock.engine.client import StreamingClient
from penstock.engine.remote.connector import connect_engine
from penstock.messages import Drain, EngineError

Row = tuple[str, ...]  # of the table, without the address


def show_status(engines: str, key: str | None, authority: str) -> int:
    """Prints a table of the engines. Returns the exit status. Raises ValueError and OSError."""

    async def describe(client: StreamingClient) -> Row:
        info, state, stats = client.info, client.state, client.stats()
        status = "draining" if state.leave_within is not None else state.status
        cached = sum(stats.blocks_cached) / max(sum(stats.blocks_total), 1)
        return (
            status,
            f"{info.region} {1000 * client.round_trip():.1f} ms".lstrip(),
            info.model,
            info.identity.fingerprint[:8],
            f"{stats.running} of {info.max_num_seqs}",
            str(stats.waiting),
            f"{stats.kv_usage:.0%} + {cached:.0%}",
            str(state.restarts),
        )

    rows = asyncio.run(_call_each(engines, key, authority, describe))
    from rich.console import Console
    from rich.table import Table

    titles = ("engine", "status", "region, away", "model", "pool", "running", "waiting", "KV held + cached", "restarts")
    table = Table(*titles, box=None, padding=(0, 2, 0, 0), header_style="dim")
    for address, row, error in rows:
        table.add_row(address, *(row or ("no answer", error)))
    Console().print(table)
    return int(any(error for *_, error in rows))


def drain(engines: str, grace: float, key: str | None, authority: str) -> int:
    """Drains the engines: after `grace` seconds, their unfinished requests move to others. Returns the exit status.
    Raises ValueError and OSError."""

    async def order(client: StreamingClient) -> Row:
        await client.control(Drain(grace))
        return ()

    rows = asyncio.run(_call_each(engines, key, authority, order))
    for address, _, error in rows:
        print(f"{address}: {error or f'drains; requests move after {grace:g} s'}", file=sys.stderr if error else None)
    return int(any(error for *_, error in rows))


async def _call_each(
    engines: str, key: str | None, authority: str, function: Callable[[StreamingClient], Awaitable[Row]]
) -> list[tuple[str, Row, str]]:
    """Calls a function with a client of each engine. Returns (address, its result, error) for each; the result is empty
    if there is an error."""
    tls, checked = engines_tls(authority), checked_flag("--fleet-key", key) or ""

    async def one(address: str) -> tuple[str, Row, str]:
        try:
            client = await connect_engine(address, checked, tls, front="penstock fleet")
            try:
                return address, await function(client), ""
            finally:
                await client.close()
        except (EngineError, ValueError) as error:
            return address, (), str(error)

    return list(await asyncio.gather(*map(one, await find_addresses(engines)())))
