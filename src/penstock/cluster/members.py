"""Keeps the engines of a fleet: finds their addresses, connects, and connects again when a connection is lost."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from penstock.cluster.client import FleetClient
from penstock.cluster.replica import FleetEngine
from penstock.config.addresses import split_address
from penstock.messages import EngineError

LOOK_SECONDS = 2.0  # between looks at a file or a name
FIRST_DELAY = 0.2  # seconds before the second try to connect; each later one is twice as long
LONGEST_DELAY = 5.0
MOST_ENGINES = 1024
MOST_BYTES = 1 << 18  # of a file

Addresses = Callable[[], Awaitable[list[str]]]  # raises OSError or ValueError

log = logging.getLogger(__name__)


def find_addresses(engines: str) -> Addresses:
    """Return what finds the addresses that the setting `engines` means: HOST:PORT,... or file:PATH or dns:NAME:PORT.
    Raises ValueError for anything else."""
    kind, _, rest = engines.partition(":")
    if kind == "file":
        path = Path(rest)
        return lambda: asyncio.to_thread(_read_file, path)
    if kind == "dns":
        host, port = split_address(rest)
        return lambda: _look_up(host, port)
    given = _checked(engines.split(","))

    async def same() -> list[str]:
        return given

    return same


class Members:
    """Connects a fleet to the engines at some addresses, which may change."""

    def __init__(
        self, fleet: FleetClient, addresses: Addresses, connect: Callable[[str], Awaitable[FleetEngine]]
    ) -> None:
        """`connect` returns a client of the engine at an address when that is ready. Raises EngineError."""
        self._fleet, self._addresses, self._connect = fleet, addresses, connect
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self.troubles: dict[str, str] = {}  # why engines are not connected, by address

    async def run(self) -> None:
        """Keep the engines connected, until it is cancelled."""
        trouble = ""
        try:
            while True:
                try:
                    self._follow(await self._addresses())
                    trouble = ""
                except (OSError, ValueError) as error:
                    if str(error) != trouble:  # once
                        trouble = str(error)
                        log.error("the engines' addresses cannot be read, and stay as they were: %s", trouble)
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            for task in self._keeping.values():
                task.cancel()
            await asyncio.gather(*self._keeping.values(), return_exceptions=True)

    def _follow(self, addresses: list[str]) -> None:
        for address in addresses:
            if address not in self._keeping:
                self._keeping[address] = asyncio.create_task(self._keep(address))
        for address in self._keeping.keys() - set(addresses):
            log.info("engine %s is no longer named, and leaves the fleet", address)
            self._keeping.pop(address).cancel()

    async def _keep(self, address: str) -> None:
        delay = FIRST_DELAY
        while True:
            try:
                engine = await self._connect(address)
            except EngineError as error:
                self._note(address, str(error))
                await asyncio.sleep(delay)
                delay = min(2 * delay, LONGEST_DELAY)
                continue
            try:
                replica = self._fleet.join(address, engine, split_address(address)[0])
                self._note(address, "")
                log.info("engine %s has joined: %s", address, engine.info.model)
                delay = FIRST_DELAY
                await replica.gone.wait()
                self._note(address, engine.failure)
            except EngineError as error:  # another model
                self._note(address, str(error))
            finally:
                self._fleet.leave(address)
                await engine.close()
            await asyncio.sleep(delay)

    def _note(self, address: str, trouble: str) -> None:
        """Log why an engine is not there, once for each reason."""
        if trouble and trouble != self.troubles.get(address):
            log.warning("engine %s is not in the fleet: %s", address, trouble)
        self.troubles[address] = trouble


def _read_file(path: Path) -> list[str]:
    """The addresses in a file: one a line; # begins a comment."""
    with path.open(encoding="utf-8") as file:
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise ValueError(f"{path}: more than {MOST_BYTES} characters of addresses")
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return _checked([line for line in lines if line])


async def _look_up(host: str, port: int) -> list[str]:
    """The addresses that a name has now."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    hosts = sorted({str(address[0]) for *_, address in found})
    return [f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts[:MOST_ENGINES]]


def _checked(addresses: list[str]) -> list[str]:
    found = list(dict.fromkeys(address.strip() for address in addresses))
    if len(found) > MOST_ENGINES:
        raise ValueError(f"--engines names {len(found)} engines; at most {MOST_ENGINES} are possible")
    for address in found:
        split_address(address)
    return found
