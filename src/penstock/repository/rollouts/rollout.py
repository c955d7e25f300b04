"""A rollout while it runs: which version a request gets, what its judges have found, and where that leads."""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Set
from typing import Any, Protocol

from penstock.messages.tensors import TensorModel
from penstock.repository.rollouts.command import OWN, CommandJudge
from penstock.repository.rollouts.decision import RolloutState, decide
from penstock.repository.rollouts.record import RolloutRecord
from penstock.tasks import spawn

MAX_COPIES = 4  # in flight. Copies yield to requests of users: while so many run, requests are not compared


class Comparison(Protocol):
    """Runs requests on both versions of a model, and gives its rollout what the judges find."""

    def arm(self, candidate: bool) -> TensorModel | None:
        """Returns one of two one-shot models; None for language models."""

    def label(self, request_id: str, label: Any) -> bool:
        """See `penstock.messages.tensors.Rollouts`."""

    def end(self, *, promoted: bool) -> None:
        """Ends the comparison, and gives new requests the version that serves from now on."""


class ComparedModel(Protocol):
    """A version that may have a rollout."""

    own_judge: tuple[str, ...]  # the operator's command that judges answers; () if there is none

    @property
    def judges(self) -> Mapping[str, float]:
        """By name: what a judge tolerates by default. 0: it is used only if the rules name it."""

    def compare(self, rollout: "Rollout", candidate: Any) -> Comparison:
        """Begins to compare the candidate, another version of the same model, with this one."""


class Rollout:
    """Used from one event loop."""

    def __init__(self, record: RolloutRecord, changed: Callable[["Rollout"], None], own: CommandJudge | None) -> None:
        """`changed` is called after each change of the state. `own` is the operator's judge."""
        self.record = record
        self.preparing = False  # requests of the golden set run: no user gets the candidate, and nothing is decided
        self._changed, self._own = changed, own
        self._copies: set[asyncio.Task[None]] = set()

    @property
    def judges(self) -> Set[str]:
        return self.record.evidence.keys()

    def takes(self, key: str) -> bool:
        """Returns whether a request gets the candidate. Requests with one `key` stay on a version, and once they have
        moved to the candidate, they stay there as the share grows. "": a random version."""
        text = f"{self.record.name}\0{self.record.candidate}\0{key or secrets.token_hex(8)}"
        place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / 2**32 * 100
        return place < self.record.share and not self.preparing

    def set_state(self, state: RolloutState) -> None:
        if state != self.record.state:
            self.record.state = state
            self._changed(self)

    def look(self) -> None:
        """Decides anew."""
        if not self.preparing:
            self.set_state(decide(self.record.evidence, self.record.state, self.record.rules, time.time()))

    def add(self, judge: str, difference: float | None) -> None:
        """Counts what a judge finds of a pair of answers; None: nothing."""
        if difference is not None:
            self.record.evidence[judge].add(difference)

    async def ask(self, pair: Callable[[], Mapping[str, Any]]) -> None:
        """Counts what the operator's own judge finds of a pair of answers, if the rollout has this judge."""
        if OWN in self.judges and self._own is not None:
            self.add(OWN, await self._own.score(pair))

    def copy(self, work: Callable[[], Coroutine[Any, Any, None]], *, always: bool = False) -> None:
        """Begins a comparison, unless enough of them run; `always`: in any case."""
        if self.record.state.is_open and (always or len(self._copies) < MAX_COPIES):
            spawn(self._copies, work())

    async def close(self) -> None:
        for copy in self._copies:
            copy.cancel()
        await asyncio.gather(*self._copies, return_exceptions=True)
        if self._own is not None:
            await self._own.close()
