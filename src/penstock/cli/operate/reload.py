"""Reads a server's settings and model again, and starts the engine of the next version."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace as with_changes
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from msgspec.structs import replace

from penstock.cli.machine import cost_model
from penstock.cli.options import Flags
from penstock.config import ConfigError, DoesNotFit, Given, Hardware, ServerConfig
from penstock.config.settings import GivenSettings
from penstock.engine.client import StreamingClient
from penstock.engine.link.ipc import spawn
from penstock.engine.processors import running_on
from penstock.frontend import ServedModel
from penstock.frontend.versions.reloads import Start
from penstock.frontend.versions.series import Model
from penstock.messages import EngineClient, EngineInfo
from penstock.observe.costs import CostModel
from penstock.observe.processes import usage
from penstock.prepare.device import detect_device
from penstock.prepare.engine import verified
from penstock.prepare.model import FoundModel, PreparedModel, find_given, prepare_found, read_given
from penstock.prepare.served import load_tokenizer, served_model, text_digest
from penstock.weights.files import FileState, file_states
from penstock.weights.manifest import ManifestCheck

if TYPE_CHECKING:
    from penstock.cli.serving.shares import EngineShares

_log = logging.getLogger("penstock.serving")
M = TypeVar("M", bound=Model)

# The fields of ServerConfig that belong to the model: a reload changes them. The others are the server's own.
_OF_THE_MODEL = {"served_model_name", "aliases", "tool_format", "reasoning_format", "thinking_budget"}
_FLAGS = {"max_body_bytes": "max_body_size", "max_answer_bytes": "max_answer_size"}


class LoadedVersion(NamedTuple):
    """The settings and files from which a version was loaded."""

    prepared: PreparedModel
    settings: GivenSettings
    states: tuple[FileState, ...]
    texts: str  # of `text_digest`

    @classmethod
    def of(cls, prepared: PreparedModel, given: Given) -> "LoadedVersion":
        return cls(prepared, given.settings, file_states(prepared.path), text_digest(prepared.answers))


# Loads a version whose engine has computed a token, with the costs of its steps. Raises EngineError, OSError or
# ValueError.
Load = Callable[[StreamingClient, CostModel | None], Awaitable[M]]
# Does the work that does not need the new engine, and returns what loads the version. The second argument is the model
# that is served.
Loader = Callable[[LoadedVersion, M], Awaitable[Load[M]]]


async def load_here(new: LoadedVersion, before: ServedModel) -> Load[ServedModel]:
    """The Loader of a server that has one API process, this one."""
    answers = new.prepared.answers
    tokenizer = await load_tokenizer(answers, new.texts, before)

    async def load(client: StreamingClient, costs: CostModel | None) -> ServedModel:
        return await asyncio.to_thread(served_model, answers, client, tokenizer, costs, new.texts)

    return load


class Reloader:
    """Prepares new versions of what a server serves, from the command line that it was started with."""

    def __init__(
        self,
        model: str | None,
        flags: Flags,
        loaded: LoadedVersion,
        processors: Collection[int],
        shares: "EngineShares | None" = None,
    ) -> None:
        """`loaded` is what is served now. Engines may run on `processors`, and have one of the
        `shares` if there are others."""
        self._model, self._flags, self._shares = model, flags, shares
        self._prepare = prepare_found if shares is None else shares.prepare
        self._processors = processors
        self._loaded = loaded

    async def prepare(self, served: M, beside: bool, loader: Loader[M]) -> Start[M] | None:
        """See `penstock.frontend.versions.reloads.Prepare`. `loader` is how these processes load a version."""
        new = await asyncio.to_thread(self._read, served.client, beside)
        if new is None:
            return None
        load = await loader(new, served)

        async def start() -> M:
            client, costs = await self._start_engine(new, served.client.info)
            try:
                model = await load(client, costs)
            except BaseException:
                await client.close()
                raise
            self._loaded = new
            return model

        return start

    async def _start_engine(self, new: LoadedVersion, before: EngineInfo) -> tuple[StreamingClient, CostModel | None]:
        """Returns the client of a new engine that has computed a token, and the costs of its steps. Raises EngineError
        and CheckpointError."""
        prepared = new.prepared
        check = await asyncio.to_thread(ManifestCheck, prepared.path)
        if self._shares is not None:
            client = await self._shares.start_engine(prepared, check)
        else:
            client = await verified(spawn(prepared.resolved.engine, resumes=True, processors=self._processors), check)
        try:
            _warn_of_less(before, client.info)
            return client, cost_model(prepared, prepared.hardware)
        except BaseException:
            await client.close()
            raise

    def _read(self, running: EngineClient, beside: bool) -> LoadedVersion | None:
        """Returns what a new version would be loaded from, or None if it is what the version served was loaded from.
        With `beside`, its engine must fit beside the one that runs. Raises ValueError or OSError."""
        given = read_given(self._model, self._flags)
        if self._loaded.prepared.resolved.server.replicas != "1":
            raise ConfigError("a server with --replicas is not reloaded: start another one, and end this one")
        found = find_given(given)
        if (given.settings, file_states(found.path)) == (self._loaded.settings, self._loaded.states):
            return None
        with running_on(self._processors):  # this process's own threads may be kept off one
            hardware = detect_device(given.settings.device)
        prepared = self._fit(found, hardware, running, beside).with_engine(replaces=beside)
        self._check_server(prepared.resolved.server, given)
        engine = prepared.resolved.engine
        if beside and engine.event_log:
            raise ConfigError("--event-log: two engines cannot write one file at a time; use --drain-first")
        if beside and engine.kv_disk:
            raise ConfigError("--kv-disk: two engines cannot use one folder at a time; use --drain-first")
        return LoadedVersion.of(prepared, given)

    def _check_server(self, new: ServerConfig, given: Given) -> None:
        """Raises ConfigError if a setting of the server itself has changed."""
        old = self._loaded.prepared.resolved.server
        for field in ServerConfig.__struct_fields__:
            if field not in _OF_THE_MODEL and getattr(new, field) != getattr(old, field):
                name = _FLAGS.get(field, field)
                source = f" ({given.sources[name]})" if name in given.sources else ""
                raise ConfigError(
                    f"--{name.replace('_', '-')}{source} has changed, which takes a restart of the server; set it back "
                    "to reload the rest"
                )

    def _fit(self, found: FoundModel, hardware: Hardware, running: EngineClient, beside: bool) -> PreparedModel:
        """Resolves the settings for the memory that the running engine leaves when its KV cache has filled up; without
        `beside`, for the memory that is there when it has ended. Raises DoesNotFit."""
        on_gpu = hardware.device == "cuda"
        ranks = self._loaded.prepared.resolved.ranks
        plans = [sum(row.bytes for row in plan.rows[:-1]) for plan in ranks]  # the last row is free memory
        asleep = running.state.status == "asleep"
        planned = 0 if asleep else max(plans) if on_gpu else sum(plans)
        used = None if asleep else usage(running.info.pid)
        resident = 0 if used is None else used[0]
        if not beside:
            more = 0 if on_gpu else resident  # all of a GPU counts as available
            return self._prepare(found, replace(hardware, memory_available=hardware.memory_available + more))
        taken = planned if on_gpu else max(planned - resident, 0)  # what it holds already is not available
        left = replace(hardware, memory_available=max(hardware.memory_available - taken, 0))
        try:
            prepared = self._prepare(found, left)
        except DoesNotFit as error:
            raise DoesNotFit(
                f"beside the engine that runs, {error}; or use --drain-first, which ends it first"
            ) from None
        resolved = prepared.resolved
        engine = replace(resolved.engine, kv_cache_bytes=min(plan.kv_bytes for plan in resolved.ranks))
        return with_changes(prepared, resolved=with_changes(resolved, engine=engine))


def _warn_of_less(old: EngineInfo, new: EngineInfo) -> None:
    """Logs that the KV cache is smaller than the one before, and than its sequences may need together."""
    before, now = ((min(info.num_blocks) - 1) * info.block_size for info in (old, new))
    if now < min(before, new.max_num_seqs * new.max_model_len):
        _log.warning(
            "the KV cache has %s tokens; before the reload it had %s. It gets a share of what the old engine "
            "leaves: --kv-cache-memory sets its size, and a reload with --drain-first gives it all",
            f"{now:,}",
            f"{before:,}",
        )
