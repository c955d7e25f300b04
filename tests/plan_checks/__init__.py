"""An executor without a model that checks every plan, and a clock that a test sets."""

from tests.plan_checks.clock import VirtualClock
from tests.plan_checks.executor import SimulatedExecutor
from tests.plan_checks.slots import PlanError
from tests.plan_checks.tokens import (
    VOCABULARY,
    SimulatedSequence,
    hashed_token,
    logprob_row,
    mix,
    prefix_hashes,
    sample,
)

__all__ = [
    "VOCABULARY",
    "PlanError",
    "SimulatedExecutor",
    "SimulatedSequence",
    "VirtualClock",
    "hashed_token",
    "logprob_row",
    "mix",
    "prefix_hashes",
    "sample",
]
