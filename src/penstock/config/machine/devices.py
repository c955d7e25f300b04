"""Hardware by name, so that `penstock plan` can compare splits on machines other than this one."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from msgspec.structs import replace as with_fields

from penstock.config.machine.hardware import Hardware
from penstock.config.sizes import format_bytes, parse_bytes

# Memory, its bandwidth and one direction of the link to its neighbours (NVLink, or PCIe 4 x16), as their makers say.
NAMED: Mapping[str, str] = {
    "A100": "80GiB:2039GB/s:300GB/s",
    "H100": "80GiB:3350GB/s:450GB/s",
    "H200": "141GB:4800GB/s:450GB/s",
    "B200": "180GB:8000GB/s:900GB/s",
    "L4": "24GB:300GB/s:32GB/s",
    "L40S": "48GB:864GB/s:32GB/s",
}
# CUDA's compute capability of each.
CAPABILITIES: Mapping[str, str] = MappingProxyType(
    {"A100": "8.0", "H100": "9.0", "H200": "9.0", "B200": "10.0", "L4": "8.9", "L40S": "8.9"}
)
# Operations per second in products of bf16 without sparsity, as their makers say.
FLOPS: Mapping[str, float] = MappingProxyType(
    {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "L4": 121e12, "L40S": 362e12}
)
ASSUMED_BANDWIDTH = 20_000_000_000  # bytes a second of an unknown machine: two memory channels,
ASSUMED_LINK = 5_000_000_000  # and ranks that copy through memory
MAX_DEVICES = 4096

_COUNTED = re.compile(r"(?:(\d{1,9})x)?(.+)", re.IGNORECASE)


@dataclass(frozen=True)
class Devices:
    """Equal devices with room for one rank each. Sizes in bytes, speeds in bytes a second, in one direction."""

    name: str
    count: int
    memory: int  # of each; if `shared`, memory and bandwidth of all together
    bandwidth: int
    link: int  # of each
    shared: bool = False
    device: Literal["cpu", "cuda"] = "cpu"
    capability: str = ""  # of GPUs; "" if unknown

    def machine(self, here: Hardware) -> Hardware:
        """The hardware for `resolve`: these devices, with this machine's processor."""
        return with_fields(
            here,
            memory_total=self.memory,
            memory_available=self.memory,
            device=self.device,
            name=self.name,
            gpus=self.count if self.device == "cuda" else 0,
            capability=self.capability,
            shared=self.shared,
        )

    def __str__(self) -> str:
        """For people: '8xH100: 80.00 GiB, 3350 GB/s, link 450 GB/s each'."""
        speeds = f"{self.bandwidth / 1e9:.4g} GB/s, link {self.link / 1e9:g} GB/s"
        return f"{self.name}: {format_bytes(self.memory)}, {speeds}{'' if self.shared else ' each'}"


def this_machine(hardware: Hardware) -> Devices:
    """This machine: a rank per GPU, with the maker's speeds if the GPU is in NAMED; without a GPU, a rank per core.
    Other speeds are assumed, not measured."""
    if hardware.device == "cuda":
        known = [name for name in NAMED if name in re.split(r"[^A-Z0-9]", hardware.name.upper())]
        named = parse_devices(known[0]) if known else None
        return Devices(
            hardware.name,
            max(hardware.gpus, 1),
            hardware.memory_total,
            named.bandwidth if named else ASSUMED_BANDWIDTH,
            named.link if named else ASSUMED_LINK,
            device="cuda",
            capability=hardware.capability,
        )
    return Devices(
        "this machine",
        hardware.cores,
        hardware.memory_available,
        ASSUMED_BANDWIDTH,
        ASSUMED_LINK,
        shared=hardware.shared,
    )


def parse_devices(text: str, device: Literal["cpu", "cuda"] = "cpu") -> Devices:
    """The devices named '8xH100' or 'L4', or described as '4x64GiB:200GB/s:3GB/s': memory, its bandwidth and the
    link's, of the kind `device`. Raises ValueError for other text."""
    match = _COUNTED.fullmatch(text.strip())
    count, kind = (int(match[1] or 1), match[2]) if match else (0, "")
    parts = NAMED.get(kind.upper(), kind).split(":")
    if len(parts) != 3:
        raise ValueError(
            f"--hardware {text!r} is not known: name {', '.join(NAMED)}, with a number as in 8xH100, or say memory, "
            "its bandwidth and the link's, as in 4x64GiB:200GB/s:3GB/s"
        )
    if not 1 <= count <= MAX_DEVICES:
        raise ValueError(f"--hardware {text!r} has {count} devices: name 1 to {MAX_DEVICES}")
    memory, bandwidth, link = parts
    capability = CAPABILITIES.get(kind.upper(), "")
    speeds = parse_speed("--hardware", bandwidth), parse_speed("--hardware", link)
    device = "cuda" if capability else device
    return Devices(text.strip(), count, parse_bytes(memory), *speeds, device=device, capability=capability)


def with_link(devices: Devices, link: str | None) -> Devices:
    """The devices with another link speed, if one is given."""
    return devices if link is None else replace(devices, link=parse_speed("--link", link))


def parse_speed(flag: str, text: str) -> int:
    """Bytes a second of '25GB/s' or '25GB', at least 1. ValueError names the flag."""
    try:
        speed = parse_bytes(text.strip().removesuffix("/s"))
    except ValueError:
        speed = 0
    if speed < 1:
        raise ValueError(f"{flag}: {text!r} is no speed; write for example 25GB/s")
    return speed
