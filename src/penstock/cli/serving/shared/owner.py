"""The supervisor's repository, as API processes call it.

The supervisor has all engines and decides which version a request gets, as a server with one process does. API
processes count their requests with it, and speak to the engines over hubs.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import msgspec

from penstock.cli.serving.process_slot import ProcessSlot
from penstock.cli.serving.repository import ServedRepository
from penstock.cli.serving.shared.calls import CallServer
from penstock.cli.serving.shared.catalogue import (
    Catalogue,
    LanguageEntry,
    NewVersion,
    OneShotEntry,
    VersionEntry,
    read_request,
    tensor_fields,
)
from penstock.engine.client import StreamingClient
from penstock.engine.shared.hub import Hub
from penstock.frontend.errors import APIError
from penstock.frontend.versions.serving import Serving, Version
from penstock.messages import Completed, ControlAnswer, ControlMessage, EngineError, Sleep, Wake
from penstock.messages.tensors import InferResult, NotReady, TensorModel

_log = logging.getLogger("penstock.serving")
FIRST_CHANNEL = 1 << 16  # lower ones are those of the model on the command line
LOOK_SECONDS = 0.5  # between looks at what changes without a notice, such as a rollout that begins
PUBLISH_SECONDS = 30.0  # for processes to follow a change


class RepositoryOwner:
    """A repository and the API processes that serve it."""

    def __init__(self, served: ServedRepository) -> None:
        self.served, self.registry, self.repository = served, served.registry, served.repository
        self._versions: dict[int, tuple[Version, Hub]] = {}
        self._channels: dict[Version, int] = {}
        self._last_channel = FIRST_CHANNEL
        self._entries: WeakKeyDictionary[TensorModel, OneShotEntry] = WeakKeyDictionary()
        self._begun = False
        self.catalogue = Catalogue()
        self.changed = asyncio.Condition()
        self.desks: dict[int, Desk] = {}  # by the number of the process
        self._following = asyncio.create_task(self._follow())

    async def start(self) -> None:
        """Loads the models that the server starts with."""
        await self.served.start()
        self._begun = True
        await self.look()

    def join(self, slot: ProcessSlot) -> None:
        """Lets a process that has been started call."""
        self.desks[slot.number] = Desk(self, slot)

    def leave(self, slot: ProcessSlot) -> None:
        """Ends the requests of a process that has ended."""
        if (desk := self.desks.pop(slot.number, None)) is not None:
            desk.close()

    async def close(self) -> None:
        self._following.cancel()
        for _, hub in self._versions.values():
            hub.close()
        await self.registry.close()
        await self.served.close()

    def channel(self, version: Version) -> int:
        """Returns the channel of a version."""
        if version not in self._channels:
            self._last_channel += 1
            client = cast(StreamingClient, version.model.client)
            hub = Hub(client, self._last_channel)
            hub.on_step = lambda stats: version.series.of_model.observe_steps(version.series.engines.stats())
            self._channels[version] = self._last_channel
            self._versions[self._last_channel] = version, hub
        return self._channels[version]

    def version(self, channel: int) -> tuple[Version, Hub]:
        """Returns the version of a channel. Raises EngineError if it has ended."""
        if channel not in self._versions:
            raise EngineError("the version of the model was unloaded; send the request again")
        return self._versions[channel]

    def serving(self, version: Version) -> Serving | None:
        """Returns the model that gives new requests this version."""
        return next((serving for serving in self.registry.all if serving.version is version), None)

    async def look(self) -> None:
        """Publishes what has changed."""
        found = self._look()
        if found != self.catalogue:
            self.catalogue = msgspec.structs.replace(found, number=found.number + 1)
            async with self.changed:
                self.changed.notify_all()

    async def published(self) -> None:
        """Publishes what has changed, and returns when all processes follow."""
        await self.look()
        number = self.catalogue.number
        try:
            async with asyncio.timeout(PUBLISH_SECONDS), self.changed:
                await self.changed.wait_for(lambda: all(desk.seen >= number for desk in self.desks.values()))
        except TimeoutError:
            _log.warning("an API process has not followed a change of the repository within %g s", PUBLISH_SECONDS)

    def _look(self) -> Catalogue:
        for channel, (version, hub) in list(self._versions.items()):
            if hub.client.failure and not version.requests and self.serving(version) is None:
                hub.close()
                del self._versions[channel], self._channels[version]
        return Catalogue(
            number=self.catalogue.number,
            begun=self._begun,
            models={
                serving.model.name: LanguageEntry(
                    self.channel(serving.version), serving.keep_alive, serving.rollout is not None
                )
                for serving in self.registry.all
            },
            live=frozenset(self._versions),
            absent=frozenset(self.registry.absent_names()),
            one_shot=tuple(map(self._entry, self.repository.ready())),
            unready=self.repository.unready(),
            labels=self.repository.labels(),
        )

    def _entry(self, model: TensorModel) -> OneShotEntry:
        if model not in self._entries:
            self._entries[model] = OneShotEntry.of(model)
        return self._entries[model]

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()


class Desk:
    """The functions that one API process calls."""

    def __init__(self, owner: RepositoryOwner, slot: ProcessSlot) -> None:
        self.seen = 0  # the number of the catalogue that the process follows
        self._owner, self._slot = owner, slot
        self._held: Counter[Version] = Counter()  # versions by the number of requests that the process has there
        self._server = CallServer(slot.mux, self)

    def close(self) -> None:
        self._server.close()
        for version in self._held.elements():
            version.leave()
        self._held.clear()

    async def follow(self, seen: int) -> Catalogue:
        """Returns the catalogue when it is newer than the one that the process follows."""
        owner, self.seen = self._owner, seen
        async with owner.changed:
            owner.changed.notify_all()
            await owner.changed.wait_for(lambda: owner.catalogue.number > seen)
        return owner.catalogue

    async def describe(self, channel: int) -> VersionEntry:
        """Returns how to load a version."""
        version, _ = self._owner.version(channel)
        model = version.model
        answers = self._owner.served.answers(model)
        settings = NewVersion(answers=answers, texts=model.texts, created=model.created)
        return VersionEntry(msgspec.json.encode(settings), version.metrics.name)

    async def connect(self, channel: int) -> None:
        """Connects the process to the engine of a version. Its end of the channel is open."""
        version, hub = self._owner.version(channel)
        self._slot.join(hub, partial(self._operate, version))

    async def enter(self, name: str, key: str, within: float | None) -> tuple[int, int]:
        """Counts a request. Returns the channel of the version that it gets, and the catalogue that has it."""
        version = await self._owner.registry.enter_within(name, lambda: key, within)
        self._held[version] += 1
        channel = self._owner.channel(version)
        if channel not in self._owner.catalogue.live:
            await self._owner.look()
        return channel, self._owner.catalogue.number

    async def leave(self, channel: int) -> None:
        """Ends a request."""
        version, _ = self._owner.version(channel)
        if self._held[version] > 0:
            self._held[version] -= 1
            version.leave()

    async def stay(self, name: str, seconds: float) -> None:
        self._owner.registry.find(name).stay(seconds)

    async def compare(self, name: str, path: str, body: bytes) -> None:
        """Compares both versions of a rollout on a request."""
        if (rollout := self._owner.registry.find(name).rollout) is not None:
            rollout.compare(path, body)

    # -- one-shot models, see TensorModels ------------------------------------------------------------------------

    async def infer(self, name: str, version: str, key: str, request: Any) -> Any:
        model = self._find(name, version, key)
        return _result(model, await model.infer(read_request(request)))

    async def stream(self, name: str, version: str, key: str, request: Any) -> AsyncGenerator[Any, None]:
        model = self._find(name, version, key)
        async for result in model.stream(read_request(request)):
            yield _result(model, result)

    async def load(self, name: str, config: str | None, files: Mapping[str, bytes] | None) -> None:
        try:
            await self._owner.repository.load(name, config, files)
        finally:
            await self._owner.published()

    async def unload(self, name: str, dependents: bool) -> None:
        await self._owner.repository.unload(name, dependents=dependents)
        await self._owner.published()

    async def index(self, ready: bool) -> list[dict[str, str]]:
        return await self._owner.repository.index(ready=ready)

    async def statistics(self, name: str, version: str) -> dict[str, Any]:
        return await self._find(name, version, "").statistics()

    async def start_rollout(self, name: str, candidate: int, rules: Mapping[str, Any]) -> None:
        await self._owner.repository.rollouts.start(name, candidate, rules)
        await self._owner.published()

    async def steer_rollout(self, name: str, what: str) -> None:
        await self._owner.repository.rollouts.steer(name, what)

    async def label(self, name: str, request_id: str, label: Any) -> bool:
        return await self._owner.repository.rollouts.label(name, request_id, label)

    async def show_rollouts(self) -> Sequence[dict[str, Any]]:
        return await self._owner.repository.rollouts.show()

    def _find(self, name: str, version: str, key: str) -> TensorModel:
        if (model := self._owner.repository.find(name, version, key)) is None:
            raise NotReady(f"model {name!r} was unloaded; send the request again")
        return model

    async def _operate(self, version: Version, message: ControlMessage) -> ControlAnswer:
        """Executes an operator's message for an engine. Raises ValueError or EngineError."""
        serving = self._owner.serving(version)
        if serving is None or not isinstance(message, Sleep | Wake):
            return await version.model.client.control(message)
        try:
            await (serving.sleep() if isinstance(message, Sleep) else serving.wake())
        except APIError as error:
            raise EngineError(error.message) from error
        return Completed()


def _result(model: TensorModel, result: InferResult) -> Any:
    return model.version, tensor_fields(result.outputs), result.final
