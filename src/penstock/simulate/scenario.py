"""Scenarios: what a YAML file may say, checked before anything runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.config.yaml_file import read_yaml
from penstock.messages import EngineRole
from penstock.simulate.autoscale import AutoscaleSpec
from penstock.simulate.claims import Claim
from penstock.simulate.faults import Fault
from penstock.simulate.traffic.workload import TrafficSpec

MAX_BYTES = 1 << 20  # of a scenario's file
MAX_REPLICAS = 1000
READY = Path(__file__).parent / "scenarios"  # the scenarios that come with Penstock


class ReplicaSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group of equal replicas."""

    model: str = "llama-3.1-8b"  # a name in models.yaml, or a folder with config.json
    device: str = "H100"
    count: int = 1
    tensor: int = 1
    pipeline: int = 1
    quantization: Literal["none", "int8", "int4", "fp8"] = "none"
    kv_cache: Literal["auto", "int8", "fp8"] = "auto"
    kv: Literal["paged", "contiguous"] = "paged"  # contiguous: a sequence reserves max_model_len tokens
    kv_tokens: int = 0  # 0: what the device's memory holds
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 8192
    max_waiting: int = 1024
    block_size: int = 16
    prefix_caching: bool = True
    target_step_ms: float = 0.0  # of a step with prompts, while others decode; 0: none
    batching: Literal["continuous", "static", "dynamic"] = "continuous"
    batch: int = 32  # of static and dynamic batching
    window: float = 0.05  # seconds that these wait for a full batch
    machines: int = 0  # that the replicas share; 0: each has its own
    own_models: bool = False  # each replica has a model of its own, named GROUP-0, GROUP-1, ...
    role: EngineRole = "alone"  # with the router cluster: what it computes (docs/disaggregation.md)
    region: str = ""
    round_trip: float = 0.0  # seconds from the router to this region and back
    price: float | None = None  # of a device for an hour; null: that of the price book
    spot: bool = False  # the price book's spot price
    start_seconds: float = 60.0  # from an order until it is ready
    tenants: bool = False  # share each replica among the tenants of the traffic
    cost: str = ""  # a file of penstock simulate --fit, instead of a model and a device

    def __post_init__(self) -> None:
        counts = ("count", "tensor", "pipeline", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "batch")
        for name in (*counts, "block_size"):
            if not 1 <= getattr(self, name) <= 10**7:
                raise ValueError(f"{name} {getattr(self, name)}: give a whole number from 1 to {10**7}")
        if self.count > MAX_REPLICAS:
            raise ValueError(f"count {self.count}: give at most {MAX_REPLICAS} replicas")
        seconds = ("window", "start_seconds", "target_step_ms", "round_trip")
        for name in (*seconds, "kv_tokens", "max_waiting", "machines", "price"):
            if not 0 <= (getattr(self, name) or 0) <= 1e9:
                raise ValueError(f"{name} {getattr(self, name)}: give a number from 0 to 1e9")
        if self.machines > self.count:
            raise ValueError(f"machines {self.machines}: {self.count} replicas share at most as many")


class Targets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a good request keeps to, in seconds. null: any."""

    ttft: float | None = None
    tpot: float | None = None
    latency: float | None = None


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run. `seed` decides everything that is random."""

    title: str
    traffic: dict[str, TrafficSpec]
    replicas: dict[str, ReplicaSpec]
    about: str = ""
    seed: int = 1
    duration: float = 60.0  # seconds in which requests come; 0: as long as the traces
    drain: float = 600.0  # seconds after that, for what is still open
    router: str = "least_loaded"
    front_seconds: float = 0.0  # from a request to its engine
    slo: Targets = Targets()
    faults: dict[str, Fault] = {}
    autoscale: dict[str, AutoscaleSpec] = {}

    def __post_init__(self) -> None:
        if not (self.traffic and self.replicas):
            raise ValueError("there is no traffic or no replica: give at least one of both")
        if not (0 <= self.duration <= 1e7 and 0 <= self.drain <= 1e7 and 0 <= self.front_seconds <= 10):
            raise ValueError("duration and drain: give 0 to 1e7 seconds; front_seconds: 0 to 10")
        if self.duration == 0 and any(each.trace is None for each in self.traffic.values()):
            raise ValueError("duration is 0, but not all traffic is a trace: give the seconds in which requests come")
        for name, spec in self.autoscale.items():
            if spec.group not in self.replicas:
                known = sorted(self.replicas)
                raise ValueError(f"autoscale {name!r} is of {spec.group!r}, which does not exist: name one of {known}")


class ScenarioFile(msgspec.Struct, frozen=True):
    """The runs of a file, by name, and what is claimed of them."""

    name: str
    title: str
    about: str
    variants: dict[str, Scenario]
    claims: list[Claim]
    folder: Path


def load_scenario(name: str, changes: Mapping[str, Any] | None = None) -> ScenarioFile:
    """Returns the scenario of a file, or a ready one by its name. `changes` replace fields of every variant.

    Raises ValueError, which names the file, the field and what it takes.
    """
    path = READY / f"{name}.yaml" if name in ready_scenarios() else Path(name)
    if not path.is_file():
        raise ValueError(f"there is no scenario {name!r}: give a file, or one of {', '.join(ready_scenarios())}")
    raw = read_yaml(path, MAX_BYTES, f"the scenario {path}")
    if not isinstance(raw, dict):
        raise ValueError(f"the scenario {path} is no mapping: give title, traffic and replicas")
    variants = raw.pop("variants", None) or {"": {}}
    claims = raw.pop("claims", [])
    runs: dict[str, Scenario] = {}
    try:
        for variant, overlay in variants.items():
            runs[str(variant)] = _scenario(_merged(_merged(raw, overlay or {}), changes or {}))
        read = msgspec.convert(claims, list[Claim])
    except (msgspec.ValidationError, AttributeError) as error:
        raise ValueError(f"the scenario {path} is wrong: {error}") from None
    first = next(iter(runs.values()))
    for claim in read:
        claim.check(list(runs))
    return ScenarioFile(path.stem, first.title, first.about, runs, read, path.parent)


def _scenario(fields: dict[str, Any]) -> Scenario:
    traffic = fields.get("traffic")
    if isinstance(traffic, dict):
        fields["traffic"] = {name: {"name": name, **(each or {})} for name, each in traffic.items()}
    return msgspec.convert(fields, Scenario)


def _merged(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` with the fields of `overlay`. Mappings are merged, and null removes a field."""
    merged = dict(base)
    for key, value in overlay.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(merged.get(key), Mapping) and "kind" not in value:
            merged[key] = _merged(merged[key], value)
        else:
            merged[key] = value
    return merged


def ready_scenarios() -> list[str]:
    """Returns the names of the scenarios that come with Penstock."""
    return sorted(path.stem for path in READY.glob("*.yaml"))
