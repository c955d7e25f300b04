"""A repository that serves: what is wanted of it, what is loaded, and the work that makes them agree."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType

from penstock.config import detect_hardware
from penstock.config.yaml_file import read_yaml
from penstock.messages.tensors import LoadFailed, MemberModel, NotReady, TensorModel
from penstock.repository.entry import GENERATION, Entry, Folder, Target
from penstock.repository.lifecycle import Key, Observed, State, Wanted, reconcile
from penstock.repository.loader import Load, ReadyModel
from penstock.repository.oneshot import OneShotModel, ProcessLoader
from penstock.repository.pipelines.nodes import Find
from penstock.repository.pipelines.pipeline import load_pipeline
from penstock.repository.rollouts.rollout import ComparedModel
from penstock.repository.rollouts.service import RepositoryRollouts
from penstock.repository.settings import FILES, Kind, members
from penstock.schedule.resources import ResourcePool
from penstock.tasks import spawn

WAIT_SECONDS = 300.0  # for memory that a version lacks
DRAIN_SECONDS = 300.0  # for the requests of a version that is unloaded
LOOK_SECONDS = 1.0  # between looks at that file
MAX_GENERATION_BYTES = 1 << 20
_log = logging.getLogger("penstock.repository")


class _RepositoryVersion:
    """A version, from the begin of its loading to its end."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.state: State = "loading"
        self.model: ReadyModel | None = None
        self.error = ""

    def observed(self) -> Observed:
        requests = 0 if self.model is None else self.model.usage.requests
        return Observed(self.target.key, self.state, self.target.size, requests)


class Repository:
    """See `penstock.messages.tensors.TensorModels`. Used from one event loop."""

    def __init__(
        self,
        folder: Folder,
        loaders: Mapping[Kind, Load] = MappingProxyType({}),
        *,
        free: Callable[[], int] = lambda: detect_hardware().memory_available,
        taken: Collection[str] = (),
        resources: Mapping[str, int] = MappingProxyType({}),
        text_member: Find = lambda name, version, kind: None,
    ) -> None:
        """`loaders` are those of kinds besides one-shot models. `free` returns the bytes of memory that are available.
        `taken` are names that models of the server have. For `resources` see ResourcePool. `text_member` returns a
        language model, or its tokenizer, as a member of a pipeline. Raises ValueError if stored rollouts are broken."""
        self.folder = folder
        pool = ResourcePool(resources)
        self._processes = {kind: ProcessLoader(kind, pool, self._pump) for kind in FILES}
        ours: dict[Kind, Load] = {kind: process.load for kind, process in self._processes.items()}
        self._loaders = {**ours, "pipeline": self._load_pipeline, **loaders}
        self._free = free
        self._taken = frozenset(taken)
        self._text_member = text_member
        self._wanted: dict[str, Entry] = {}
        self._versions: dict[Key, _RepositoryVersion] = {}
        self._serving: dict[str, dict[int, _RepositoryVersion]] = {}  # what requests get
        self._reasons: dict[str, str] = {}  # why a model is not loaded, by name
        self._changed = asyncio.Condition()
        self._changing: dict[str, asyncio.Lock] = {}
        self._reading = asyncio.Semaphore(2)  # models whose folders are read at a time, each in a thread
        self._loading_for: Counter[str] = Counter()  # members that pipelines which are being loaded need
        self._tasks: set[asyncio.Task[None]] = set()
        self._waits: dict[Key, int] = {}  # versions that lack memory, and how many bytes
        self._generation: object = None  # of the file: what changes with its content
        self._unread = ""  # why the file could not be read
        self.rollouts = RepositoryRollouts(self.folder.path, self._compared, self._load_named)

    # -- TensorModels -----------------------------------------------------------------------------------------

    def find(self, name: str, version: str = "", key: str = "") -> TensorModel | None:
        if not version and (picked := self.rollouts.pick(name, key)) is not None:
            return picked
        there = self._serving.get(name)
        if not there:
            if name in self._wanted or name in self._reasons:
                raise NotReady.model(name, self._why(name))
            return None
        found = there.get(max(there)) if not version else self._named(name, version, there)
        if found is None:
            raise NotReady.version(name, version, there)
        return found.model if isinstance(found.model, OneShotModel) else None

    def ready(self) -> list[TensorModel]:
        found = (version.model for there in self._serving.values() for version in there.values())
        return [model for model in found if isinstance(model, OneShotModel)]

    async def index(self, *, ready: bool) -> list[dict[str, str]]:
        words = {"loading": "LOADING", "ready": "READY", "draining": "UNLOADING", "dropping": "UNLOADING"}
        found = []
        names = self.folder.names()
        for name in sorted({*names, *self._wanted, *self._serving, *self._reasons}):
            versions = [each for key, each in self._versions.items() if key[0] == name]
            for each in sorted(versions, key=lambda each: each.target.version):
                row = {"name": name, "version": str(each.target.version), "state": words.get(each.state, "UNAVAILABLE")}
                if each.error:
                    row["reason"] = each.error
                found.append(row)
            if not versions:
                row = {"name": name}
                if name in self._reasons:
                    row |= {"version": "1", "state": "UNAVAILABLE", "reason": self._reasons[name]}
                found.append(row)
        return [row for row in found if not ready or row.get("state") == "READY"]

    def unready(self) -> dict[str, str]:
        """Returns why models of the repository are not ready, by name."""
        return {name: self._why(name) for name in {*self._wanted, *self._reasons} if name not in self._serving}

    def labels(self) -> dict[str, dict[str, int]]:
        """Returns the names that models have for their versions."""
        return {name: dict(entry.settings.labels) for name, entry in self._wanted.items() if entry.settings.labels}

    async def load(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """See TensorModels. The members of a pipeline that are not loaded are loaded first, and stay until it is."""
        await self._load_with_members(name, frozenset(), config, files)

    async def _load_with_members(
        self, name: str, users: frozenset[str], config: str | None = None, files: Mapping[str, bytes] | None = None
    ) -> None:
        """Loads a model after what it needs. `users` are the pipelines that need it. A member that cannot be loaded is
        found by the check of the pipeline."""
        async with self._reading:
            needs = await asyncio.to_thread(self.folder.members, name) - users
        self._loading_for.update(needs)
        try:
            for member in sorted(needs - self._serving.keys()):
                with contextlib.suppress(LoadFailed):
                    await self._load_with_members(member, users | {name})
            await self._load_named(name, config, files)
        finally:
            self._loading_for -= Counter(needs)  # which removes counts of zero
            await self._notify()

    async def _load_named(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        if name in self._taken:
            raise LoadFailed(f"model {name!r} is served already, without the repository; rename the folder")
        async with self._changing.setdefault(name, asyncio.Lock()):
            try:
                async with self._reading:
                    entry = await asyncio.to_thread(self.folder.read, name, config, files, self.rollouts.versions)
            except LoadFailed as error:
                if name not in self._serving:
                    self._reasons[name] = str(error)
                raise
            for key in [key for key, each in self._versions.items() if key[0] == name and each.state == "failed"]:
                del self._versions[key]
            before = self._wanted.get(name)
            self._wanted[name] = entry
            self._reasons.pop(name, None)
            errors = await self._settled(entry)
            if errors:
                # What serves stays; a restart of the process must not load what has failed.
                if before is not None and name in self._serving:
                    self._wanted[name] = before
                else:
                    del self._wanted[name]
                    self._reasons[name] = errors
                self._reconcile()
                raise LoadFailed(f"load failed for model {name!r}, version {errors}")
            self.rollouts.begin(name)

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        """See TensorModels. Waits while a pipeline that needs the model is being loaded."""
        async with self._changed:
            await self._changed.wait_for(lambda: name not in self._loading_for)
        for user in self._users(name):
            _log.info("%s is unloaded, because it needs %s", user, name)
            await self.unload(user)
        async with self._changing.setdefault(name, asyncio.Lock()):
            entry = self._wanted.pop(name, None)
            if entry is None:
                return
            self._reasons[name] = "unloaded"
            await self.rollouts.leave(name)
            self._reconcile()
            async with self._changed:
                await self._changed.wait_for(lambda: not any(key[0] == name for key in self._versions))
            self.folder.forget(name)
        if dependents:
            for member in sorted(members(entry.settings.steps)):
                if member in self._wanted and not self._users(member):
                    await self.unload(member, dependents=True)

    # -- the server ---------------------------------------------------------------------------------------------

    async def load_all(self, names: Collection[str] | None = None) -> list[str]:
        """Loads these models, by default all in the folder. Returns the errors."""
        wanted = self.folder.names() if names is None else names
        results = await asyncio.gather(*(self.load(name) for name in wanted), return_exceptions=True)
        return [str(result) for result in results if isinstance(result, Exception)]

    async def follow(self) -> None:
        """Follows the file `generation`, and decides on rollouts. Never returns."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.read_generation()
            await self.rollouts.look()

    async def read_generation(self) -> bool:
        """Makes what is loaded agree with the file `generation` if that is new. Returns False if there is none."""
        try:
            if (found := await asyncio.to_thread(self.folder.generation)) is None:
                return False
            now, path = found
            if now != self._generation:
                self._generation = now
                await self._follow(path)
            self._unread = ""
        except (OSError, ValueError) as error:
            if str(error) != self._unread:  # which is so again at each look
                _log.error("the file %s cannot be used: %s", GENERATION, error)
            self._unread = str(error)
        return True

    async def close(self) -> None:
        """Ends all models. May be called twice."""
        await self.rollouts.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._processes.values():
            await process.close()
        for name in list(self._wanted):
            self.folder.forget(name)

    async def _follow(self, path: Path) -> None:
        """Loads and unloads what the file says: a list of names. Models that cannot be loaded are logged."""
        wanted = read_yaml(path, MAX_GENERATION_BYTES, GENERATION) or []
        if not isinstance(wanted, list) or not all(isinstance(name, str) for name in wanted):
            raise ValueError(f"{GENERATION} must be a list of names of models")
        errors = await self.load_all(wanted)
        gone = set(self._wanted) - set(wanted)
        while unused := [name for name in gone if not self._users(name)]:  # pipelines go before their members
            gone.difference_update(unused)
            for name in unused:
                await self.unload(name)
        for text in errors:
            _log.error("%s", text)
        _log.info("the models of %s are loaded: %s", path, ", ".join(wanted) or "none")

    async def _settled(self, entry: Entry) -> str:
        """Waits until every version of an entry is ready or has failed. Returns the errors of those that failed."""
        self._reconcile()
        keys = {target.key: target for target in entry.targets}

        def settled() -> bool:
            return all(key in self._versions and self._versions[key].state in ("ready", "failed") for key in keys)

        try:
            async with asyncio.timeout(WAIT_SECONDS if self._lacking(keys) else None), self._changed:
                await self._changed.wait_for(settled)
        except TimeoutError:
            key, lacks = next(iter(self._lacking(keys).items()))
            return f"{key[1]}: it needs {lacks} bytes of memory more than are free; unload another model"
        failed = (
            (keys[key].version, self._versions[key].error) for key in keys if self._versions[key].state == "failed"
        )
        return "; ".join(f"{version}: {error}" for version, error in failed)

    def _lacking(self, keys: Collection[Key]) -> dict[Key, int]:
        return {key: lacks for key, lacks in self._waits.items() if key in keys}

    def _reconcile(self) -> None:
        """Begins what is to be done now."""
        targets = {target.key: target for entry in self._wanted.values() for target in entry.targets}
        wanted = [Wanted(target.key, target.size) for target in targets.values()]
        observed = [version.observed() for version in self._versions.values()]
        self._waits.clear()
        for action in reconcile(wanted, observed, self._free()):
            match action.kind:
                case "load":
                    version = self._versions[action.key] = _RepositoryVersion(targets[action.key])
                    spawn(self._tasks, self._load(version))
                case "drain":
                    self._drain(self._versions[action.key])
                case "drop":
                    self._drop(self._versions[action.key])
                case "wait":
                    self._waits[action.key] = action.lacks
        spawn(self._tasks, self._notify())

    async def _load(self, version: _RepositoryVersion) -> None:
        target = version.target
        kind = target.settings.kind or "onnx"
        try:
            if kind not in self._loaders:
                raise LoadFailed(f"kind {kind} is not served here")
            version.model = await self._loaders[kind](target)
        except Exception as error:
            if not isinstance(error, LoadFailed):
                _log.exception("loading %s failed", target.name)
            version.error = str(error) or type(error).__name__
            version.state = "failed"
            _log.error("%s version %d could not be loaded: %s", target.name, target.version, version.error)
        else:
            version.state = "ready"
            before = self._serving.setdefault(target.name, {}).get(target.version)
            self._serving[target.name][target.version] = version
            note = version.model.note
            how = ", in place of its old files" if before is not None else ""
            why = f": requests run one at a time, because {note}" if note else ""
            _log.info("%s version %d is ready%s%s", target.name, target.version, how, why)
        self._reconcile()

    def _pump(self) -> None:
        for process in self._processes.values():
            process.pump()

    async def _load_pipeline(self, target: Target) -> OneShotModel:
        return load_pipeline(target, self._member)

    def _drain(self, version: _RepositoryVersion) -> None:
        """Takes a version away from new requests, and drops it after its last one."""
        version.state = "draining"
        if version.model is not None:
            version.model.withdraw()
        there = self._serving.get(version.target.name, {})
        if there.get(version.target.version) is version:
            del there[version.target.version]
        if not there:
            self._serving.pop(version.target.name, None)
        spawn(self._tasks, self._drained(version))

    async def _drained(self, version: _RepositoryVersion) -> None:
        if version.model is not None:
            try:
                async with asyncio.timeout(DRAIN_SECONDS):
                    await version.model.usage.unused()
            except TimeoutError:
                _log.warning("%s is unloaded while requests are in flight", version.target.name)
        if version.state == "draining":
            self._drop(version)

    def _drop(self, version: _RepositoryVersion) -> None:
        version.state = "dropping"
        if version.model is None:
            del self._versions[version.target.key]
        else:
            spawn(self._tasks, self._dropped(version.target, version.model))

    async def _dropped(self, target: Target, model: ReadyModel) -> None:
        try:
            await model.close()
        finally:
            self._versions.pop(target.key, None)
        _log.info("%s version %d is unloaded", target.name, target.version)
        self._reconcile()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _member(self, name: str, version: str, kind: str) -> MemberModel | None:
        found: MemberModel | None = self.find(name, version) if kind == "model" else None
        return found or self._text_member(name, version, kind)

    def _compared(self, name: str) -> dict[int, tuple[str, ComparedModel]]:
        """The versions of a model that are ready and may have rollouts, with their digests."""
        return {
            number: (version.target.digest, version.model)
            for number, version in self._serving.get(name, {}).items()
            if version.model is not None
        }

    def _named(self, name: str, version: str, there: dict[int, _RepositoryVersion]) -> _RepositoryVersion | None:
        if version.isdigit() and len(version) < 10:
            return there.get(int(version))
        entry = self._wanted.get(name)
        number = None if entry is None else entry.settings.labels.get(version)
        return None if number is None else there.get(number)

    def _why(self, name: str) -> str:
        lacks = self._lacking([key for key in self._waits if key[0] == name])
        if lacks:
            return f"it lacks {sum(lacks.values())} bytes of memory"
        return self._reasons.get(name, "it is being loaded")

    def _users(self, name: str) -> list[str]:
        """The pipelines that need a model."""
        return [other for other, entry in self._wanted.items() if name in members(entry.settings.steps)]
