"""The repository of a server: one-shot models, and language models with an engine each."""

import asyncio
import logging
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

from penstock.cli.machine import cost_model
from penstock.cli.options import Flags
from penstock.cli.serving.shares import EngineShares
from penstock.cli.serving.text_judges import TEXT_TOLERANCES
from penstock.cli.serving.text_members import TextMember, TokenizerMember
from penstock.cli.serving.text_rollouts import GOLDEN, TextComparison
from penstock.config import ConfigError, ServerConfig
from penstock.declared.settings import ENGINE, SETTINGS
from penstock.frontend import APIError, ModelRegistry, RequestLimits, ServedModel, Serving
from penstock.frontend.kserve.shared_memory import ClientMemory
from penstock.frontend.local import LocalRequests
from penstock.frontend.registry import OnDemand
from penstock.frontend.versions.room import EngineRoom
from penstock.frontend.versions.series import Series
from penstock.frontend.versions.serving import Version
from penstock.messages import LATER_PRIORITY, EngineClient
from penstock.messages.tensors import LoadFailed, MemberModel
from penstock.observe.metrics import Metrics
from penstock.prepare.device import detect_device
from penstock.prepare.model import AnswerSettings, FoundModel, PreparedModel, find_given, read_given
from penstock.prepare.served import load_tokenizer, served_model, text_digest
from penstock.repository.entry import Target
from penstock.repository.metrics import RepositoryMetrics
from penstock.repository.rollouts.rollout import Rollout
from penstock.repository.service import Repository
from penstock.weights.manifest import ManifestCheck

_log = logging.getLogger("penstock.repository")
# Settings of a language model that model.yaml may have. Those of the server are the server's.
_ALLOWED = {setting.name for rows in ENGINE.values() for setting in rows} | {
    *("tool_format", "reasoning_format", "thinking_budget", "truncate_embeddings", "max_waiting", "max_waiting_tokens"),
    *("served_model_name", "target_itl"),
}


class EngineModel:
    """A version of a language model that is ready. It gets all new requests of a `serving`, or it is the candidate of a
    rollout. A new version of the same name takes its place among requests."""

    note = ""
    judges = TEXT_TOLERANCES

    def __init__(self, target: Target, version: Version, loader: "LanguageModelLoader") -> None:
        self.usage = version
        self.serving: Serving | None = None  # None: a rollout decides which requests it gets
        self.own_judge = target.settings.judge
        self._target, self._loader = target, loader
        self._sleeping: asyncio.Task[None] | None = None

    def serve(self, serving: Serving) -> None:
        """Called when the serving has this version."""
        self.serving = serving
        self._sleeping = asyncio.create_task(serving.sleep_when_unused())

    def promote(self, serving: Serving) -> None:
        """Makes a candidate the version for all new requests."""
        serving.promote(self.usage)
        self.serve(serving)

    def compare(self, rollout: Rollout, candidate: "EngineModel") -> TextComparison:
        """See ComparedModel."""
        assert self.serving is not None
        arms = self._loader.copies(self.usage), self._loader.copies(candidate.usage)
        promote = partial(candidate.promote, self.serving)
        comparison = TextComparison(rollout, self.serving, candidate.usage, arms, promote)
        comparison.begin(self._target.folder.parent / GOLDEN)
        return comparison

    def withdraw(self) -> None:
        """Takes the version away from new requests."""
        if self._current is not None:
            self._loader.registry.remove(self._current)

    async def close(self) -> None:
        """Ends the engine. One that was replaced ends by itself, after its last request."""
        if self._sleeping is not None:
            self._sleeping.cancel()
        if self._current is not None:
            self._loader.room.remove(self._target.name)
            await self._current.close()
            self.usage.series.forget()
        elif self.serving is None:
            await self.usage.close()
            self.usage.series.forget()

    @property
    def _current(self) -> Serving | None:
        """The model with this version; None once another version has taken its place."""
        return self.serving if self.serving is not None and self.serving.version is self.usage else None


class LanguageModelLoader:
    """Starts an engine for each language model, with its share of the machine."""

    registry: ModelRegistry  # of the server
    copies: Callable[[Version], LocalRequests]  # runs copies of requests on a version
    is_candidate: Callable[[Target], bool]  # of a rollout

    def __init__(self, flags: Flags, metrics: Metrics, server: ServerConfig, shares: EngineShares) -> None:
        """`flags` are those of the command line, which hold for models that set nothing else. The attributes above must
        be set before the first load."""
        self.room = EngineRoom(server.max_loaded, server.min_stay)
        self._keep_alive = server.sleep_after
        self._flags = flags
        self._metrics, self._drain_timeout = metrics, server.drain_timeout
        self._shares = shares
        self.answers: WeakKeyDictionary[EngineClient, AnswerSettings] = WeakKeyDictionary()  # by engine

    async def load(self, target: Target) -> EngineModel:
        """Returns a model whose engine has computed a token, and adds it to the registry, unless it is the candidate of
        a rollout. Raises what `prepare` raises, and EngineError."""
        if self.is_candidate(target):
            model = await self._start(target)
            name = f"{model.name} version {target.version}"
            return EngineModel(target, Version(model, Series(self._metrics, model, name)), self)
        async with self.room.starting(target.name):
            model = await self._start(target)
            try:
                serving = await self._serve(target, model)
            except BaseException:
                await model.client.close()
                raise
            own = target.settings.keep_alive
            serving.keep_alive = self._keep_alive if own is None else own
            served = EngineModel(target, serving.version, self)
            served.serve(serving)
            self.room.add(target.name, serving)
            return served

    async def _start(self, target: Target) -> ServedModel:
        before = self._serving(target.name)
        # No request waits for a candidate, nor for a new version beside one that answers.
        replaces = self.is_candidate(target) or (before is not None and before.has_engine)
        prepared = (await asyncio.to_thread(self._prepare, target)).with_engine(replaces=replaces)
        check = await asyncio.to_thread(ManifestCheck, prepared.path)
        client = await self._shares.start_engine(prepared, check, target.settings.weight)
        try:
            answers = self.answers[client] = prepared.answers
            costs = cost_model(prepared, prepared.hardware)
            texts = await asyncio.to_thread(text_digest, answers)
            tokenizer = None if before is None else await load_tokenizer(answers, texts, before.model)
            return await asyncio.to_thread(served_model, answers, client, tokenizer, costs, texts)
        except BaseException:
            await client.close()
            raise

    async def _serve(self, target: Target, model: ServedModel) -> Serving:
        """Gives new requests this version."""
        if (serving := self._serving(target.name)) is not None:
            while serving.versions.before is not None:  # its last requests
                await asyncio.sleep(0.1)
            serving.exchange(model)
            return serving
        room = partial(self.room.starting, target.name)
        serving = Serving(model, self._metrics, self._drain_timeout, room=room)
        self.registry.add(serving)
        return serving

    def _serving(self, name: str) -> Serving | None:
        return next((each for each in self.registry.all if each.model.name == name), None)

    def _prepare(self, target: Target) -> PreparedModel:
        found = find_language_model(target, self._flags)
        return self._shares.prepare(found, detect_device(found.given.settings.device))


def find_language_model(target: Target, flags: Flags) -> FoundModel:
    """Finds the model of a repository and its settings. `flags` are those of the command line. Raises LoadFailed, and
    what `find_given` raises."""
    settings = {name.replace("-", "_"): value for name, value in target.settings.settings.items()}
    if unknown := settings.keys() - _ALLOWED:
        name = min(unknown)
        why = "it is a setting of the server" if name in SETTINGS else "there is no such setting"
        raise LoadFailed(f"settings has {name}: {why}; leave it out")
    where = target.settings.model or str(_model_path(target.folder))
    values = {name: value for name, value in flags.items() if name in _ALLOWED}
    values |= {"served_model_name": target.name, **settings, "state_dir": "none"}
    source = f"model.yaml of {target.name}"
    return find_given(read_given(where, {name: _text(value) for name, value in values.items()}, source))


class ServedRepository:
    """What `penstock serve --repository` adds to a server."""

    def __init__(
        self,
        server: ServerConfig,
        flags: Flags,
        metrics: Metrics,
        served: Serving | None,
        shares: EngineShares,
        taken: Collection[str] = (),
    ) -> None:
        """`served` is the model on the command line, if there is one, which also has one of the `shares`. `taken` are
        names of other models of the server. Raises ConfigError."""
        self._names, self._on_demand = server.load_model, frozenset[str]()
        self._loader, self._budgets = LanguageModelLoader(flags, metrics, server, shares), shares.budgets
        taken = taken if served is None else served.model.names
        resources = {
            name: int(units) for name, _, units in (each.partition(":") for each in server.rate_limit_resource)
        }
        try:
            self.repository = Repository(
                shares.folder,
                {"llm": self._loader.load},
                taken=taken,
                resources=resources,
                text_member=self._text_member,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        models = () if served is None else (served,)
        memory = None if server.client_shared_memory is None else ClientMemory(server.client_shared_memory)
        self.registry = self._loader.registry = ModelRegistry(*models, tensors=self.repository, memory=memory)
        if server.max_loaded is not None:
            self._on_demand = shares.languages
            self.registry.absent_models = self._absent
            self.registry.on_demand = OnDemand(self._load_on_demand, self._loader.room)
        rollouts, limits = self.repository.rollouts, RequestLimits.of(server)
        self._loader.is_candidate = lambda target: rollouts.candidate(target.name) == target.version
        later = limits.max_priority + LATER_PRIORITY
        self._loader.copies = lambda version: LocalRequests(self.registry, limits, None, later, version=version)
        self._requests = LocalRequests(self.registry, limits, server.seed)
        metrics.registry.register(RepositoryMetrics(self.repository.ready, rollouts))
        self._following: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Loads the models that the server starts with. A model that cannot be loaded is logged."""
        names = None if not self._names else [] if "none" in self._names else list(self._names)
        if names is None and self._on_demand:
            names = [name for name in self.repository.folder.names() if name not in self._on_demand]
        if names is not None or not await self.repository.read_generation():
            await self.repository.load_all(names)
        rows = await self.repository.index(ready=False)
        ready = sum(row.get("state") == "READY" for row in rows)
        _log.info("the repository has %d models; %d versions are ready", len({row["name"] for row in rows}), ready)
        self._following = [asyncio.create_task(self.repository.follow()), asyncio.create_task(self._budgets.follow())]

    def _absent(self) -> Collection[str]:
        return self._on_demand - self._loader.room.names

    async def _load_on_demand(self, name: str) -> None:
        """Loads a model for its first request. One that cannot be loaded waits for the operator from then on. Raises
        APIError 503."""
        try:
            await self.repository.load(name)
        except LoadFailed as error:
            self._on_demand = self._on_demand - {name}
            raise APIError(503, str(error), code="load_failed") from None

    def _text_member(self, name: str, version: str, kind: str) -> MemberModel | None:
        """A language model or its tokenizer as a member of a pipeline; None if there is none of this name."""
        found = next((serving for serving in self.registry.all if name in serving.model.names), None)
        if found is None:
            return None
        if kind == "model":
            return TextMember(found, self._requests)
        return TokenizerMember(found.model.tokenizer, kind)

    def answers(self, model: ServedModel) -> AnswerSettings:
        """Returns the settings that answers of one of the language models depend on."""
        return self._loader.answers[model.client]

    async def close(self) -> None:
        for task in self._following:
            task.cancel()
        await self.repository.close()


def _model_path(folder: Path) -> Path:
    """A version's folder, or the GGUF file in it."""
    files = sorted(folder.glob("*.gguf"))
    return files[0] if files else folder


def _text(value: object) -> object:
    """A value as the command line has it: settings are read from text."""
    return value if isinstance(value, bool | list) else str(value)
