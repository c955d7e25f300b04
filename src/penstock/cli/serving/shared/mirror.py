"""The supervisor's repository as an API process sees it."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec

from penstock.cli.serving.shared.calls import CallClient
from penstock.cli.serving.shared.catalogue import (
    Catalogue,
    LanguageEntry,
    NewVersion,
    OneShotEntry,
    VersionEntry,
    read_result,
    request_fields,
)
from penstock.engine.link.mux import Mux
from penstock.engine.shared.hub_link import HubLink
from penstock.frontend.registry import ModelRegistry
from penstock.frontend.served import ServedModel
from penstock.frontend.versions.series import Series
from penstock.frontend.versions.serving import Serving, Version
from penstock.messages import EngineError
from penstock.messages.tensors import InferRequest, InferResult, NotReady
from penstock.observe.metrics import Metrics
from penstock.prepare.served import load_tokenizer, served_model
from penstock.text import Tokenizer

_log = logging.getLogger("penstock.serving")


class RepositoryMirror:
    """The models of the supervisor's repository in `models`, which has others beside them. See TensorModels, Elsewhere
    and Rollouts."""

    def __init__(self, mux: Mux, models: ModelRegistry, metrics: Metrics, drain_timeout: float) -> None:
        self._mux, self._calls = mux, CallClient(mux)
        self._models, self._metrics, self._drain_timeout = models, metrics, drain_timeout
        self._catalogue = Catalogue()
        self._changed = asyncio.Condition()
        self._servings: dict[str, Serving] = {}
        self._versions: dict[int, Version] = {}  # by channel
        self._loading = asyncio.Lock()
        self.rollouts = _RemoteRollouts(self._calls)
        models.tensors = models.elsewhere = self
        models.absent_models = lambda: self._catalogue.absent  # which `enter` loads, in the supervisor

    async def begin(self) -> None:
        """Returns when the models are there that the server starts with."""
        self._following = asyncio.create_task(self._follow())
        waiting = asyncio.create_task(self._wait_for(lambda: self._catalogue.begun))
        await asyncio.wait((self._following, waiting), return_when=asyncio.FIRST_COMPLETED)
        if self._following.done():
            waiting.cancel()
            self._following.result()

    # -- Elsewhere ------------------------------------------------------------------------------------------------

    async def enter(self, name: str, key: str, within: float | None) -> Version:
        asking = asyncio.create_task(self._calls.call("enter", name, key, within))
        try:
            channel, number = await asyncio.shield(asking)
        except asyncio.CancelledError:  # the supervisor counts the request all the same
            asking.add_done_callback(self._leave_unused)
            raise
        try:
            await self._wait_for(lambda: self._catalogue.number >= number)
            version = self._versions.get(channel) or await self._candidate(channel)
        except BaseException:
            self._calls.notify("leave", channel)
            raise
        return version.enter()

    def _leave_unused(self, asked: "asyncio.Task[Any]") -> None:
        if not asked.cancelled() and asked.exception() is None:
            self._calls.notify("leave", asked.result()[0])

    # -- TensorModels ---------------------------------------------------------------------------------------------

    def find(self, name: str, version: str = "", key: str = "") -> "RemoteModel | None":
        there = {each.version: each for each in self._catalogue.one_shot if each.name == name}
        if not there:
            if (why := self._catalogue.unready.get(name)) is not None:
                raise NotReady.model(name, why)
            return None
        number = str(self._catalogue.labels.get(name, {}).get(version, version)) or max(there, key=int)
        if number not in there:
            raise NotReady.version(name, version, map(int, there))
        return RemoteModel(self._calls, there[number], version, key)

    def ready(self) -> list["RemoteModel"]:
        return [RemoteModel(self._calls, each, each.version, "") for each in self._catalogue.one_shot]

    async def index(self, *, ready: bool) -> list[dict[str, str]]:
        return cast(list[dict[str, str]], await self._calls.call("index", ready))

    async def load(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        await self._calls.call("load", name, config, files)

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        await self._calls.call("unload", name, dependents)

    # -- following the supervisor -----------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Takes each catalogue. Never returns. Raises EngineError when the supervisor has ended."""
        while True:
            found = await self._calls.call("follow", self._catalogue.number)
            catalogue = msgspec.convert(found, Catalogue)
            await self._drop(catalogue)
            for name, entry in catalogue.models.items():
                try:
                    await self._take(name, entry)
                except (EngineError, OSError, ValueError) as error:  # it may have been unloaded meanwhile
                    _log.error("%s could not be loaded: %s", name, error)
            self._catalogue = catalogue
            async with self._changed:
                self._changed.notify_all()

    async def _wait_for(self, holds: Any) -> None:
        async with self._changed:
            await self._changed.wait_for(holds)

    async def _take(self, name: str, entry: LanguageEntry) -> None:
        """Gives new requests for a model this version."""
        serving = self._servings.get(name)
        known = self._versions.get(entry.channel)
        if serving is None:
            model = await self._load(entry.channel, None)
            serving = Serving(model, self._metrics, self._drain_timeout, elsewhere=partial(self._stay, name))
            self._keep(entry.channel, serving.version)
            self._servings[name] = serving
            self._models.add(serving)
        elif known is not serving.version:
            while serving.versions.before is not None:  # its last requests
                await asyncio.sleep(0.05)
            if known is not None:
                serving.promote(known)
            else:
                serving.exchange(await self._load(entry.channel, serving.model))
                self._keep(entry.channel, serving.version)
        serving.keep_alive = entry.keep_alive
        serving.rollout = _CopiedRequests(self._calls, name) if entry.rolls_out else None

    async def _drop(self, catalogue: Catalogue) -> None:
        """Gives models that are unloaded no new requests, and forgets versions that have ended."""
        for name in self._servings.keys() - catalogue.models.keys():
            self._models.remove(self._servings.pop(name))
        for channel in self._versions.keys() - catalogue.live:
            version = self._versions.pop(channel)
            await version.close()
            if version.metrics.name not in self._servings and version.metrics.name in self._metrics.models:
                version.series.forget()

    async def _candidate(self, channel: int) -> Version:
        """Returns the candidate of a rollout, which its first request loads."""
        async with self._loading:
            if channel not in self._versions:
                entry = msgspec.convert(await self._calls.call("describe", channel), VersionEntry)
                model = await self._load(channel, None)
                self._keep(channel, Version(model, Series(self._metrics, model, entry.series)))
            return self._versions[channel]

    def _keep(self, channel: int, version: Version) -> None:
        version.left = partial(self._calls.notify, "leave", channel)
        self._versions[channel] = version

    async def _load(self, channel: int, before: ServedModel | None) -> ServedModel:
        """Returns the model of a version, with a connection to its engine."""
        entry = msgspec.convert(await self._calls.call("describe", channel), VersionEntry)
        new = msgspec.json.decode(entry.settings, type=NewVersion)
        link = HubLink(self._mux, channel)
        try:
            await self._calls.call("connect", channel)
            engine = await link.client()
            if before is None:
                tokenizer = await asyncio.to_thread(Tokenizer.load, Path(new.answers.path))
            else:
                tokenizer = await load_tokenizer(new.answers, new.texts, before)
            return await asyncio.to_thread(served_model, new.answers, engine, tokenizer, None, new.texts, new.created)
        except BaseException:
            await link.close()
            raise

    def _stay(self, name: str, seconds: float) -> None:
        self._calls.notify("stay", name, seconds)


class RemoteModel:
    """See TensorModel. It is in the supervisor."""

    def __init__(self, calls: CallClient, entry: OneShotEntry, asked: str, key: str) -> None:
        """`asked` is the version that the client names; "": a rollout may decide, by `key`."""
        self._calls, self._entry, self._asked, self._key = calls, entry, asked, key
        self.name, self.version, self.labels, self.streams = entry.name, entry.version, entry.labels, entry.streams
        self.inputs, self.outputs = entry.inputs, entry.outputs

    async def infer(self, request: InferRequest) -> InferResult:
        """See TensorModel. Afterwards `version` is the one that has answered."""
        found = await self._calls.call("infer", self.name, self._asked, self._key, request_fields(request))
        self.version, result = read_result(found)
        return result

    async def stream(self, request: InferRequest) -> AsyncGenerator[InferResult, None]:
        async for found in self._calls.stream("stream", self.name, self._asked, self._key, request_fields(request)):
            if found is not None:
                self.version, result = read_result(found)
                yield result

    def metadata(self) -> dict[str, Any]:
        return dict(self._entry.metadata)

    def config(self) -> dict[str, Any]:
        return dict(self._entry.config)

    async def statistics(self) -> dict[str, Any]:
        return cast(dict[str, Any], await self._calls.call("statistics", self.name, self.version))


class _RemoteRollouts:
    """See Rollouts."""

    def __init__(self, calls: CallClient) -> None:
        self._calls = calls

    async def start(self, name: str, candidate: int, rules: Mapping[str, Any]) -> None:
        await self._calls.call("start_rollout", name, candidate, rules)

    async def steer(self, name: str, what: str) -> None:
        await self._calls.call("steer_rollout", name, what)

    async def label(self, name: str, request_id: str, label: Any) -> bool:
        return bool(await self._calls.call("label", name, request_id, label))

    async def show(self) -> list[dict[str, Any]]:
        return cast(list[dict[str, Any]], await self._calls.call("show_rollouts"))


class _CopiedRequests:
    """See VersionRollout. The supervisor picks versions, and compares them."""

    def __init__(self, calls: CallClient, name: str) -> None:
        self._calls, self._name = calls, name

    def pick(self, key: str) -> Version | None:
        return None

    def compare(self, path: str, body: bytes) -> None:
        self._calls.notify("compare", self._name, path, body)
