"""What is stored of rollouts, so that they go on after a restart where they stood."""

import os
from pathlib import Path

import msgspec

from penstock.repository.rollouts.confidence import ConfidenceSequence
from penstock.repository.rollouts.decision import RolloutRules, RolloutState

FILE = "rollouts.json"  # in the folder of the repository
MAX_BYTES = 16 << 20


class RolloutRecord(msgspec.Struct, kw_only=True):
    """A rollout of a model. The version that it ended on stays the one that serves, until there is a newer one."""

    name: str
    incumbent: int
    candidate: int
    digests: tuple[str, str] = ("", "")  # of both versions; "": not loaded yet
    rules: RolloutRules
    state: RolloutState
    evidence: dict[str, ConfidenceSequence]
    prepared: bool = False  # the golden set has run

    @property
    def share(self) -> int:
        """The percentage of the requests that the candidate answers."""
        if self.state.is_open:
            return self.rules.plan[self.state.stage]
        return 100 if self.state.status == "promoted" else 0

    def versions(self, there: list[int]) -> tuple[int, ...]:
        """The versions to load, of those in the folder; () if the rollout says nothing on them."""
        if not {self.incumbent, self.candidate} <= set(there):
            return ()
        if self.state.is_open:
            return self.incumbent, self.candidate
        if max(there) > max(self.incumbent, self.candidate):
            return ()
        return (self.candidate if self.state.status == "promoted" else self.incumbent,)


class RolloutRecords:
    """The records of a repository, the last one for each model."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError for a file that cannot be read."""
        self._path = folder / FILE
        self.records: dict[str, RolloutRecord] = {}
        if self._path.exists():
            try:
                with self._path.open("rb") as file:
                    self.records = msgspec.json.decode(file.read(MAX_BYTES), type=dict[str, RolloutRecord])
            except (OSError, msgspec.MsgspecError) as error:
                raise ValueError(f"{self._path} cannot be read: {error}; repair it, or remove it") from None

    def save(self) -> None:
        """Raises OSError."""
        new = self._path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(self.records))
        os.replace(new, self._path)
