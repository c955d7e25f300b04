"""Counts what steps read from memory and compute, and how much of the machine that is. `families/step_cost.py` computes
the costs from a model's sizes."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from operator import mul

from penstock.messages import EngineStats

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepCosts:
    """The costs of a step of a model, all ranks together."""

    weight_bytes: Callable[[int], float]  # read by a step of so many tokens
    block_bytes: tuple[int, ...]  # of a KV block, per group
    layer_flops: float  # of a token, in products with the layers' weights
    head_flops: float  # of a token whose logits are computed


@dataclass(frozen=True)
class MachinePeak:
    """The most that the machine's memory and processors do in a second; 0 if it is not known."""

    read_bytes: float = 0.0
    flops: float = 0.0


class WorkTotals:
    """Sums the bytes that steps read and the operations that they compute.

    A step reads its weights once, and once each KV block that a sequence holds. Operations are those of products with
    weights; a multiply-add is two. So both are lower bounds: activations and attention are not counted.
    """

    __slots__ = ("_costs", "flops", "read_bytes")

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self.read_bytes = 0.0
        self.flops = 0.0

    def add(self, before: EngineStats, now: EngineStats) -> None:
        """Adds the steps between two stats. Those of several steps are taken as equal."""
        costs, steps = self._costs, now.steps - before.steps
        tokens = now.computed_tokens - before.computed_tokens
        if steps <= 0:
            return
        held = sum(map(mul, now.blocks_held, costs.block_bytes))
        self.read_bytes += steps * (costs.weight_bytes(-(-tokens // steps)) + held)
        sampled = now.decode_tokens - before.decode_tokens + now.draft_tokens - before.draft_tokens
        self.flops += tokens * costs.layer_flops + sampled * costs.head_flops


class IdlePeak:
    """Measures the machine once, on a thread, at the first look that finds it idle. While requests run, a measurement
    would be wrong, and would slow them."""

    def __init__(self, measure: Callable[[], MachinePeak]) -> None:
        self._measure = measure
        self._peak: MachinePeak | None = None
        self._begun = False

    def look(self, *, idle: bool) -> MachinePeak | None:
        """Returns the peak as far as it is known; None until it was measured."""
        if idle and not self._begun:
            self._begun = True
            threading.Thread(target=self._run, name="measure", daemon=True).start()
        return self._peak

    def _run(self) -> None:
        try:
            self._peak = self._measure()
        except Exception:
            self._peak = MachinePeak()
            log.exception("the machine's speed could not be measured, so the shares of it are not known")


@dataclass(frozen=True)
class CostModel:
    """The costs of a model's steps, and the machine that executes them."""

    costs: StepCosts
    peak: IdlePeak
