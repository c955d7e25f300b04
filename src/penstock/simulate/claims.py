"""What is said about serving, beside what a scenario measures."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure of the variant `of`; with `over`, as a multiple or as a saving of another variant's figure. It should be
    from `low` to `high`."""

    says: str
    figure: str
    of: str
    over: str = ""
    kind: Literal["ratio", "saving", "value"] = "ratio"
    low: float = 0.0
    high: float | None = None
    note: str = ""  # why it does not hold here, or when it does

    def check(self, variants: Sequence[str]) -> None:
        """Raises ValueError if it names a variant that does not exist."""
        for name in (self.of, self.over):
            if name and name not in variants:
                raise ValueError(f"a claim names the variant {name!r}: there are {', '.join(map(repr, variants))}")
        if (self.kind == "value") == bool(self.over):
            raise ValueError(f"the claim {self.says!r} is a {self.kind}: a value has no `over`, others have one")


class Verdict(msgspec.Struct, frozen=True):
    """A claim with the measured value."""

    claim: Claim
    value: float | None  # None: there is no such figure
    holds: bool

    @property
    def text(self) -> str:
        """Returns the value for people."""
        if self.value is None:
            return "not measured"
        shown = {"ratio": f"{self.value:.3g}×", "saving": f"{self.value:.0f}% less", "value": f"{self.value:.4g}"}
        return shown[self.claim.kind]


def judge(claim: Claim, figures: Mapping[str, Mapping[str, float | None]]) -> Verdict:
    """Returns what the figures of all variants say. Raises ValueError for a figure that does not exist."""
    if claim.figure not in figures[claim.of]:
        raise ValueError(f"a claim names the figure {claim.figure!r}: there are {', '.join(figures[claim.of])}")
    value = figures[claim.of][claim.figure]
    if claim.over and value is not None:
        other = figures[claim.over].get(claim.figure)
        if not other:
            value = None
        else:
            value = value / other if claim.kind == "ratio" else 100.0 * (1.0 - value / other)
    return Verdict(
        claim, value, value is not None and claim.low <= value and (claim.high is None or value <= claim.high)
    )
