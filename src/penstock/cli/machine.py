"""Estimates what a model's steps cost on this machine, for metrics."""

import os
import re
import threading
from collections.abc import Collection
from typing import TYPE_CHECKING

from penstock.config.machine.devices import FLOPS, this_machine
from penstock.config.weights import WeightFormat, cpu_format
from penstock.families.step_cost import model_costs
from penstock.observe.costs import CostModel, IdlePeak, MachinePeak

if TYPE_CHECKING:
    from penstock.config import EngineConfig, Hardware, ModelFacts
    from penstock.prepare.model import PreparedModel


def cost_model(prepared: "PreparedModel", hardware: "Hardware") -> CostModel:
    """Returns the costs of the model's steps, and the peak of this machine. A CPU's is measured when it is idle, a
    GPU's is the maker's, if the GPU is known."""
    facts, engine = prepared.facts, prepared.resolved.engine
    cpus = os.sched_getaffinity(0)
    return CostModel(
        model_costs(facts, engine),
        IdlePeak(lambda: _gpu_peak(engine, hardware) if engine.device == "cuda" else _cpu_peak(facts, engine, cpus)),
    )


def _gpu_peak(engine: "EngineConfig", hardware: "Hardware") -> MachinePeak:
    known = [name for name in FLOPS if name in re.split(r"[^A-Z0-9]", hardware.name.upper())]
    if not known:
        return MachinePeak()
    ranks = engine.split.world
    return MachinePeak(float(this_machine(hardware).bandwidth * ranks), FLOPS[known[0]] * ranks)


def _cpu_peak(facts: "ModelFacts", engine: "EngineConfig", cpus: Collection[int]) -> MachinePeak:
    """Measures with these processors for 0.3 s: this process's threads are kept off one of them."""
    from penstock.cli.plan.bandwidth import read_bandwidth
    from penstock.kernels.native.product_rate import product_rate

    os.sched_setaffinity(threading.get_native_id(), cpus)
    threads = engine.threads * engine.split.world or len(cpus)
    return MachinePeak(float(read_bandwidth()), product_rate(_layer_format(facts, engine), min(threads, len(cpus))))


def _layer_format(facts: "ModelFacts", engine: "EngineConfig") -> WeightFormat:
    """The format of the largest matrices of the layers, which take most of a token's products."""
    from penstock.kernels.native.loader import instruction_sets

    largest = max((m for m in facts.matrices if not m.vocabulary), key=lambda m: m.count * m.share * m.rows * m.columns)
    isa = next(iter(instruction_sets()), "")
    return cpu_format("matrix", largest.stored, engine.dtype, engine.quantization, engine.quantization_group, isa)
