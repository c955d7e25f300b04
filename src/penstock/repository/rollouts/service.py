"""The rollouts of a repository: which version requests get, and what the operator may change."""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.messages.tensors import LoadFailed, TensorModel
from penstock.repository.rollouts.command import OWN, OWN_TOLERANCE, CommandJudge
from penstock.repository.rollouts.decision import RolloutRules, RolloutState, Status
from penstock.repository.rollouts.record import RolloutRecord, RolloutRecords
from penstock.repository.rollouts.rollout import ComparedModel, Comparison, Rollout

SAVE_SECONDS = 10.0  # between saves of the evidence
_log = logging.getLogger("penstock.repository")


class _OpenRollout(NamedTuple):
    rollout: Rollout
    comparison: Comparison


class RepositoryRollouts:
    """See `penstock.messages.tensors.Rollouts`."""

    def __init__(
        self,
        folder: Path,
        ready: Callable[[str], Mapping[int, tuple[str, ComparedModel]]],
        load: Callable[[str], Awaitable[None]],
    ) -> None:
        """`ready` returns the digest and the model of each version that is ready. `load` makes the versions of a model
        ready that `versions` names. Raises ValueError if the rollouts that are stored cannot be read."""
        self._folder, self._records = folder, RolloutRecords(folder)
        self._ready, self._load = ready, load
        self._running: dict[str, _OpenRollout] = {}
        self._ended: set[str] = set()  # rollouts whose other version is still there
        self._saved = time.monotonic()

    def pick(self, name: str, key: str) -> TensorModel | None:
        """Returns the version for a request; None if the model has no rollout, or is a language model. See
        `Rollout.takes`."""
        running = self._running.get(name)
        return None if running is None else running.comparison.arm(running.rollout.takes(key))

    def candidate(self, name: str) -> int | None:
        """Returns the version that has yet to take over; None if there is none."""
        record = self._records.records.get(name)
        return None if record is None or not record.state.is_open else record.candidate

    def versions(self, name: str, there: list[int]) -> tuple[int, ...]:
        """Returns the versions to load; () if the settings of the model decide."""
        record = self._records.records.get(name)
        return () if record is None else record.versions(there)

    def begin(self, name: str) -> None:
        """Begins a rollout, or goes on, if there is one of the model. Called when versions of it have become ready."""
        record = self._records.records.get(name)
        if record is None or not record.state.is_open or name in self._running:
            return
        ready = self._ready(name)
        if record.incumbent not in ready or record.candidate not in ready:
            return
        (old, incumbent), (new, candidate) = ready[record.incumbent], ready[record.candidate]
        own = CommandJudge(incumbent.own_judge, self._folder / name) if incumbent.own_judge else None
        rollout = Rollout(record, self._changed, own)
        self._running[name] = _OpenRollout(rollout, incumbent.compare(rollout, candidate))
        if record.digests not in (("", ""), (old, new)):
            self._end(rollout, "aborted", "the files of a version have changed")
        record.digests = old, new

    async def leave(self, name: str) -> None:
        """Ends the comparisons of a model that is unloaded. The rollout goes on when it is loaded again."""
        running = self._running.pop(name, None)
        if running is not None:
            await running.rollout.close()

    async def look(self) -> None:
        """Decides by the time that has passed, and unloads the version that has lost. Called once a second."""
        for running in self._running.values():
            running.rollout.look()
        if self._running and time.monotonic() > self._saved + SAVE_SECONDS:
            self._save()
        while self._ended:
            name = self._ended.pop()
            if name in self._running:
                rollout, comparison = self._running[name]
                comparison.end(promoted=rollout.record.state.status == "promoted")
            try:
                await self._load(name)
            except LoadFailed as error:
                _log.error("%s", error)
            await self.leave(name)

    async def close(self) -> None:
        for name in list(self._running):
            await self.leave(name)
        self._save()

    async def start(self, name: str, candidate: int, rules: Mapping[str, Any]) -> None:
        try:
            found = msgspec.convert(rules, RolloutRules)
        except msgspec.ValidationError as error:
            raise LoadFailed(str(error)) from None
        ready = self._ready(name)
        if not ready:
            raise LoadFailed(f"no ready model is named {name!r}, or it is a pipeline: those have no rollouts")
        if name in self._running:
            other = self._running[name].rollout.record.candidate
            raise LoadFailed(f"model {name!r} has a rollout of version {other}; abort it first")
        if candidate == (incumbent := max(ready)):
            raise LoadFailed(f"version {candidate} of {name!r} serves already; name another one as the candidate")
        model = ready[incumbent][1]
        judges = {**model.judges, **({OWN: OWN_TOLERANCE} if model.own_judge else {})}
        if "tolerances" not in rules:
            found = msgspec.structs.replace(found, tolerances={name: judges[name] for name in judges if judges[name]})
        if unknown := set(found.tolerances) - set(judges):
            raise LoadFailed(f"there is no judge {min(unknown)!r:.60} for it; there are {', '.join(judges)}")
        records, before = self._records.records, self._records.records.get(name)
        state = RolloutState(since=time.time())
        records[name] = RolloutRecord(
            name=name, incumbent=incumbent, candidate=candidate, rules=found, state=state, evidence=found.evidence()
        )
        try:
            self._records.save()
            await self._load(name)
            if name not in self._running:
                raise LoadFailed(f"version {candidate} of {name!r} is not in its folder")
        except (LoadFailed, OSError) as error:
            del records[name]
            records.update({} if before is None else {name: before})
            self._save()
            raise LoadFailed(f"the rollout cannot begin: {error}") from None
        _log.info("%s: version %d is rolled out in place of version %d", name, candidate, incumbent)

    async def steer(self, name: str, what: str) -> None:
        running = self._running.get(name)
        if running is None or not running.rollout.record.state.is_open:
            raise LoadFailed(f"model {name!r} has no rollout that runs")
        rollout = running.rollout
        state = rollout.record.state
        if what == "abort":
            self._end(rollout, "aborted", "by the operator")
        elif what == "pause":
            rollout.set_state(msgspec.structs.replace(state, status="paused"))
        else:
            rollout.set_state(msgspec.structs.replace(state, status="running", since=time.time()))

    async def label(self, name: str, request_id: str, label: Any) -> bool:
        running = self._running.get(name)
        return running is not None and running.comparison.label(request_id, label)

    async def show(self) -> list[dict[str, Any]]:
        return self.rows()

    def rows(self) -> list[dict[str, Any]]:
        """Returns what `show` does."""
        return [_shown(record) for record in self._records.records.values()]

    def _end(self, rollout: Rollout, status: Status, reason: str) -> None:
        rollout.set_state(msgspec.structs.replace(rollout.record.state, status=status, reason=reason))

    def _changed(self, rollout: Rollout) -> None:
        record = rollout.record
        _log.info("%s: the rollout of version %d %s", record.name, record.candidate, _told(record))
        if not record.state.is_open:
            self._ended.add(record.name)
        self._save()

    def _save(self) -> None:
        self._saved = time.monotonic()
        try:
            self._records.save()
        except OSError as error:
            _log.error("the state of rollouts cannot be stored: %s", error)


def _told(record: RolloutRecord) -> str:
    state = record.state
    where = f"at {f'{record.share}%' if record.share else 'shadow'}" if state.status == "running" else state.status
    return f"is {where}: {state.reason}" if state.reason else f"is {where}"


def _shown(record: RolloutRecord) -> dict[str, Any]:
    rules, state = record.rules, record.state
    judges = []
    for judge, tolerance in rules.tolerances.items():
        evidence = record.evidence[judge]
        low, high = evidence.interval
        found = {"requests": evidence.count, "mean": evidence.mean, "low": low, "high": high, "tolerance": tolerance}
        judges.append({"name": judge, **found})
    return {
        "name": record.name,
        "incumbent": str(record.incumbent),
        "candidate": str(record.candidate),
        "status": state.status,
        "share": record.share,
        "plan": rules.plan,
        "seconds": max(time.time() - state.since, 0.0),
        "reason": state.reason,
        "judges": judges,
    }
