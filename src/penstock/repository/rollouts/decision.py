"""Decides how far a rollout goes. A pure function: evidence in, state out.

The evidence of a judge is an interval for the mean difference of two versions on the same requests: above 0, the
candidate is worse. It holds at all times, so it is looked at as often as one likes. The rules:

- a judge whose lower bound is above its tolerance rolls the candidate back;
- the next stage begins if the harm that its share can do is within the tolerance: share * upper bound. So small shares
  need little evidence, and all of the traffic needs the most;
- a stage lasts `hold` at least, and `patience` at most: then the rollout is inconclusive, and the candidate gets no
  requests. It never becomes the version that serves by waiting.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from penstock.repository.rollouts.confidence import ConfidenceSequence

SHADOW = 0  # the share of the first stage: the candidate's answers are compared and thrown away
EQUAL = 50  # the share at which both versions have the same load
AT_EQUAL_LOAD = frozenset(("latency",))  # judges that look at this stage only
TOLERANCES = {"errors": 0.01, "latency": 0.1, "disagreement": 0.3}  # of judges that need no labels
ALPHA = 0.05  # the chance that a candidate which is not worse is rolled back, of all judges together
MAX_STAGES = 20
MAX_SECONDS = 90 * 86400.0
Status = Literal["running", "paused", "promoted", "rolled back", "inconclusive", "aborted"]


class RolloutRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a rollout proceeds."""

    plan: tuple[int, ...] = (SHADOW, 1, 5, 25, EQUAL, 100)  # shares of the requests, in percent
    hold: float = 60.0  # seconds
    patience: float = 86400.0  # seconds
    tolerances: dict[str, float] = msgspec.field(default_factory=TOLERANCES.copy)  # by judge

    def __post_init__(self) -> None:
        """Raises ValueError."""
        steps = zip((-1, *self.plan), self.plan, strict=False)
        if not 1 <= len(self.plan) <= MAX_STAGES or self.plan[-1] != 100 or any(a >= b for a, b in steps):
            raise ValueError(
                f"plan is {list(self.plan)!r:.100}: give at most {MAX_STAGES} shares in percent that rise to 100, such "
                "as shadow,1,10,50,100"
            )
        if not 0 <= self.hold <= self.patience <= MAX_SECONDS:
            raise ValueError(
                f"hold is {self.hold} s and patience {self.patience} s; hold must be the smaller one, and both in 0 to "
                f"{MAX_SECONDS:.0f}"
            )
        for judge, tolerance in self.tolerances.items():
            if not 0 < tolerance <= 1:
                raise ValueError(f"the tolerance of {judge} is {tolerance}; it must be above 0, and at most 1")

    def evidence(self) -> dict[str, ConfidenceSequence]:
        """Returns that of a rollout which begins."""
        return {judge: ConfidenceSequence(ALPHA / len(self.tolerances)) for judge in self.tolerances}


class RolloutState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rollout stands."""

    stage: int = 0  # an index of the plan
    since: float  # when the stage began, in seconds since the epoch
    status: Status = "running"
    reason: str = ""

    @property
    def is_open(self) -> bool:
        """False once the rollout has ended."""
        return self.status in ("running", "paused")


def decide(
    evidence: Mapping[str, ConfidenceSequence], state: RolloutState, rules: RolloutRules, now: float
) -> RolloutState:
    """Returns where the rollout stands at `now`, in seconds since the epoch."""
    if not state.is_open:
        return state
    change = msgspec.structs.replace
    for judge, tolerance in rules.tolerances.items():
        low, high = evidence[judge].interval
        if low > tolerance:
            found = f"{judge}: worse by {low:.4f} to {high:.4f} on {evidence[judge].count} requests"
            return change(state, status="rolled back", reason=f"{found}; up to {tolerance} is tolerated")
    waited = now - state.since
    if state.status == "paused" or waited < rules.hold:
        return state
    share = rules.plan[state.stage]
    last = state.stage + 1 == len(rules.plan)
    following = 100 if last else rules.plan[state.stage + 1]
    lacks = []
    for judge, tolerance in rules.tolerances.items():
        if judge in AT_EQUAL_LOAD and (share < EQUAL or EQUAL not in rules.plan):
            continue
        high = evidence[judge].interval[1]
        if following / 100 * high > tolerance:
            lacks.append(f"{judge} may be worse by {high:.4f}")
    if not lacks:
        if last:
            return change(state, status="promoted", reason="all judges are within their tolerances")
        return RolloutState(stage=state.stage + 1, since=now, reason=f"{following}% is safe by all judges")
    if waited >= rules.patience:
        return change(state, status="inconclusive", reason=f"after {waited:.0f} s: {'; '.join(lacks)}")
    return state
