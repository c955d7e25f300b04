"""A virtual clock and an executor without a model, to simulate the production scheduler and engine loop."""

from penstock.simulate.clock import VirtualClock
from penstock.simulate.executor import SimulatedExecutor
from penstock.simulate.slots import PlanError
from penstock.simulate.tokens import (
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
