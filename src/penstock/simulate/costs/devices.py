"""Devices that a simulation can run on: their makers' figures, and the shares of these that kernels reach.

`config.machine.devices` has the sizes of GPUs that Penstock runs on; a simulation knows more, and their prices.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.config.machine.devices import CAPABILITIES, FLOPS, NAMED, parse_speed
from penstock.config.machine.hardware import has_capability
from penstock.config.sizes import parse_bytes


@dataclass(frozen=True)
class SimulatedDevice:
    """One device. Sizes in bytes, speeds in bytes and operations a second.

    The shares and the fixed seconds were fitted to measured steps: see docs/simulator.md.
    """

    name: str
    memory: int
    bandwidth: float
    link: float  # one direction, to its neighbours
    flops: float  # of products of bf16
    flops8: float  # of products of 8 bits; `flops` if the device has none that are faster
    kind: Literal["cpu", "cuda"] = "cuda"
    capability: str = ""
    reads: float = 0.92  # share of the bandwidth that products with few rows reach
    multiplies: float = 0.80  # share of the operations that products with many rows reach
    attends: float = 0.36  # the same for attention of prompts
    reads_pages: float = 0.78  # share of the bandwidth that attention of decodes reaches
    links: float = 1.0  # share of the link's speed that sums over ranks reach
    passes: float = 37.0  # bytes that the small ops of a layer move, for each token and element of its hidden state
    layer_seconds: float = 36e-6  # of each layer, whatever the step: launches, small kernels
    row_seconds: float = 1.6e-6  # of each row that samples
    step_seconds: float = 270e-6  # of each step: inputs, sampling, what of the host is not hidden
    sum_seconds: float = 12e-6  # of each sum over tensor ranks, beside the bytes


# Of those that were measured. The others have the defaults, which are the H200's; an L4 is like an L40S.
_SHARES: Mapping[str, Mapping[str, float]] = {
    "A100": {"reads": 0.742, "multiplies": 0.807, "attends": 0.595, "reads_pages": 0.934, "passes": 10.8}
    | {"layer_seconds": 44.8e-6},
    "B200": {"reads": 1.0, "multiplies": 0.753, "attends": 0.309, "reads_pages": 1.0, "passes": 61.4}
    | {"layer_seconds": 52.2e-6},
    "H100": {"reads": 1.0, "multiplies": 0.866, "attends": 0.267, "reads_pages": 0.686, "passes": 18.1}
    | {"layer_seconds": 45.5e-6},
    "L40S": {"reads": 0.846, "multiplies": 0.903, "attends": 0.337, "reads_pages": 0.738, "passes": 120.0}
    | {"layer_seconds": 52.1e-6, "links": 0.245},
}


def _gpu(name: str) -> SimulatedDevice:
    memory, bandwidth, link = NAMED[name].split(":")
    capability, flops = CAPABILITIES[name], FLOPS[name]
    return SimulatedDevice(
        name,
        parse_bytes(memory),
        float(parse_speed(name, bandwidth)),
        float(parse_speed(name, link)),
        flops,
        2 * flops if has_capability(capability, (8, 9)) else flops,
        capability=capability,
        **_SHARES.get({"L4": "L40S"}.get(name, name), {}),  # type: ignore[arg-type]
    )


DEVICES: Mapping[str, SimulatedDevice] = {
    **{name: _gpu(name) for name in NAMED},
    # The engine has no kernels for it: the capability of an H100 stands for what it could run.
    "MI300X": SimulatedDevice("MI300X", 192 * 10**9, 5300e9, 448e9, 1307e12, 2614e12, capability="9.0"),
    "CPU-2": SimulatedDevice(
        *("CPU-2", 24 * 2**30, 33e9, 5e9, 1.8e12, 3.6e12, "cpu"),
        layer_seconds=15e-6,
        row_seconds=20e-6,
    ),
    "CPU-32": SimulatedDevice(
        *("CPU-32", 256 * 2**30, 250e9, 20e9, 25e12, 50e12, "cpu"),
        layer_seconds=20e-6,
        row_seconds=20e-6,
    ),
}


def find_device(name: str) -> SimulatedDevice:
    """Returns a device by its name. Raises ValueError, which lists them."""
    device = DEVICES.get(name.upper())
    if device is None:
        raise ValueError(f"the device {name!r} is not known: name one of {', '.join(DEVICES)}")
    return device
