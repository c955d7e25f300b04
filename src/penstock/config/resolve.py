"""One pure function from the given settings, the model's sizes and the hardware to a complete configuration."""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock.config.checks.device import check_device_settings
from penstock.config.checks.kv_disk import check_kv_disk
from penstock.config.checks.model import check_model
from penstock.config.checks.speculation import check_speculation
from penstock.config.defaults import DEFAULTS, DefaultInputs, Divide
from penstock.config.engine import EngineConfig
from penstock.config.facts import ModelFacts
from penstock.config.machine.hardware import Hardware
from penstock.config.memory import MemoryPlan, size_ranks
from penstock.config.server import ServerConfig
from penstock.config.sizes import replica_limits
from penstock.config.sources import SECRET, ConfigError, Given
from penstock.config.split import Split
from penstock.declared.settings import DEFAULTS as CONSTANTS
from penstock.declared.settings import ENGINE, SETTINGS

# Settings of servers that belong to their engine.
_OF_ENGINES = (
    *("replicas", "api_processes", "manage_models", "watermark", "watermark_key", "max_waiting", "max_waiting_tokens"),
    *("scale_down_after", "target_itl", "step_deadline", "sleep_after", "event_log"),
    *("kv_disk", "kv_host", "prefill_replicas"),
)
GPU_DEPTH = 2  # plans outstanding without speculation: the next one is made while the device computes


@dataclass(frozen=True)
class Resolved:
    """A complete configuration. `ranks` has each rank's memory plan; with Ray, as if the rank had this machine to
    itself. `provenance` maps every setting to (value, source); secret values are hidden."""

    engine: EngineConfig
    server: ServerConfig
    ranks: tuple[MemoryPlan, ...]
    provenance: Mapping[str, tuple[Any, str]]

    @property
    def memory(self) -> MemoryPlan:
        """The plan of the rank with the least free memory."""
        return min(self.ranks, key=lambda plan: plan.rows[-1].bytes)


def resolve(given: Given, divide: Divide, hardware: Hardware, *, folder: str, local_name: str = "") -> Resolved:
    """Choose the settings that were not given. `divide` returns the model's sizes, whole or divided among ranks;
    `folder` has its files, or is its file. `local_name` is the model's name if it is not from a hub; without one, the
    folder's.

    Raises ConfigError for settings that contradict the model, the machine or each other, DoesNotFit, and what `divide`
    raises.
    """
    divide = lru_cache(divide)
    (facts,) = divide(Split(), 1)
    values: dict[str, Any] = {"model": given.settings.model, **_given_values(given)}
    sources = dict(given.sources)
    values.setdefault("kv_cache_memory", None)
    _check_given(values, sources, facts)
    check_device_settings(values, sources, hardware)
    local_name = local_name or Path(folder).name or "model"
    inputs = DefaultInputs(facts, hardware, folder, local_name, values, divide)
    for name, default in DEFAULTS.items():
        if values.get(name) is None or (name == "speculation" and values[name] == "auto"):
            values[name], reason = default(inputs)
            sources[name] = f"default: {reason}"
    _check(values, sources, inputs)
    check_speculation(values, sources, facts)
    name, *aliases = _names(values["served_model_name"], sources["served_model_name"])
    engine, server = _engine(values, name, folder, hardware), _server(values, name, aliases)
    ranks = size_ranks(inputs.ranks, engine, [inputs.memory] * inputs.split.world)
    sources.setdefault("model", "default: the model for a first try")
    shown = {name: "(hidden)" if name in SECRET and value else value for name, value in values.items()}
    return Resolved(engine, server, ranks, {name: (shown[name], sources[name]) for name in SETTINGS})


def resolve_server(given: Given) -> ServerConfig:
    """Choose the settings of a server without a model of its own, which has a repository or providers. Raises
    ConfigError."""
    values, sources = _server_values(given)
    for name in ("event_log", "kv_disk", "kv_host"):
        if name in given.sources:
            raise ConfigError(
                f"--{name.replace('_', '-')} ({sources[name]}) is for one engine, and each language model of a "
                "repository has one: serve this model on the command line, with --repository for the others"
            )
    _check_server(values, sources)
    return _server(values, "", ())


def resolve_front(given: Given, model: str) -> ServerConfig:
    """Return the settings of a server whose engines are elsewhere. `model` is the name of their model. Raises
    ConfigError, also for a setting that is an engine's."""
    values, sources = _server_values(given)
    for name in (*(row.name for rows in ENGINE.values() for row in rows), *_OF_ENGINES, "model"):
        if name in given.sources:
            raise ConfigError(
                f"--{name.replace('_', '-')} ({given.sources[name]}) is a setting of engines, and this server's are "
                "elsewhere (--engines): give it to penstock engine"
            )
    if values["repository"]:
        source = sources["repository"]
        raise ConfigError(f"--repository ({source}) does not go with --engines: start a server for each of them")
    values.setdefault("served_model_name", model)
    sources.setdefault("served_model_name", "default")
    _check_server(values, sources)
    name, *aliases = _names(values["served_model_name"], sources["served_model_name"])
    return _server(values, name, aliases)


def _server_values(given: Given) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings of a server without a model, and their sources."""
    values = {**CONSTANTS, **{name: value for name, value in _given_values(given).items() if value is not None}}
    return values, {name: given.sources.get(name, "default") for name in values}


def _given_values(given: Given) -> dict[str, Any]:
    values = {name: getattr(given.settings, name) for name in given.sources}
    for name in ("device", "dtype"):
        if values.get(name) == "auto":
            del values[name]
    return values


def _names(text: str, source: str) -> Sequence[str]:
    """The model's name in responses, and then its aliases."""
    if source.startswith("default"):  # a folder's name, which may have a comma
        return (text,)
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len({*names}) < len(names):
        raise ConfigError(
            f"--served-model-name ({source}) is {text!r}; give one name, or different ones with commas between them"
        )
    return names


def _engine(values: Mapping[str, Any], name: str, folder: str, hardware: Hardware) -> EngineConfig:
    same = {name: values[name] for name in EngineConfig.__struct_fields__ if name in values}
    # Drafts follow the last step's tokens, so with speculation a step is planned only when these are known.
    ahead = hardware.device == "cuda" and values["speculation"] == "off"
    others = {
        "model": folder,
        "name": name,
        "device": hardware.device,
        "kv_cache_bytes": values["kv_cache_memory"],
        "depth": max(values["pipeline_parallel_size"], GPU_DEPTH if ahead else 1),
        "has_tenants": bool(values["tenants"]),
    }
    return EngineConfig(**{**same, **others})


def _server(values: Mapping[str, Any], name: str, aliases: Sequence[str]) -> ServerConfig:
    same = {field: values[field] for field in ServerConfig.__struct_fields__ if field in values}
    sizes = {"max_body_bytes": values["max_body_size"], "max_answer_bytes": values["max_answer_size"]}
    others = {"served_model_name": name, "aliases": tuple(aliases), **sizes}
    others["wires"] = tuple(values["wires"].split(","))
    return ServerConfig(**{**same, **others})


def _check_given(values: Mapping[str, Any], sources: Mapping[str, str], facts: ModelFacts) -> None:
    length = values.get("max_model_len")
    if length is not None and length > facts.max_position:
        raise ConfigError(
            f"--max-model-len ({sources['max_model_len']}) is {length}, but the model was made for at most "
            f"{facts.max_position} tokens; set --max-model-len {facts.max_position} or less"
        )


def _check(values: Mapping[str, Any], sources: Mapping[str, str], inputs: DefaultInputs) -> None:
    seqs, tokens = values["max_num_seqs"], values["max_num_batched_tokens"]
    if tokens < seqs:
        raise ConfigError(
            f"--max-num-batched-tokens ({sources['max_num_batched_tokens']}) is {tokens}, but {seqs} sequences "
            f"decode one token each in a step; set --max-num-batched-tokens {seqs} or more"
        )
    check_model(values, sources, inputs.facts, inputs.hardware.device)
    check_kv_disk(values, sources, inputs.facts, inputs.hardware.device)
    if values["quantization"] != "int4" and not sources["quantization_group"].startswith("default"):
        raise ConfigError(
            f"--quantization-group ({sources['quantization_group']}) is {values['quantization_group']}, but only int4 "
            f"has groups, and --quantization ({sources['quantization']}) is {values['quantization']}; leave it out, "
            "or set --quantization int4"
        )
    most, cores = max(inputs.hardware.cores // inputs.local_ranks, 1), inputs.hardware.cores
    if values["threads"] > most and values["distributed_executor"] != "ray":
        by = f" and {inputs.local_ranks} ranks share them" if inputs.local_ranks > 1 else ""
        raise ConfigError(
            f"--threads ({sources['threads']}) is {values['threads']}, but this process may use {cores} cores{by}: "
            f"more threads would wait for each other; set --threads {most} or less"
        )
    if values["watermark"] != "none" and not values["watermark_key"]:
        raise ConfigError(
            f"--watermark ({sources['watermark']}) is {values['watermark']}, but there is no key; set "
            "PENSTOCK_WATERMARK_KEY"
        )
    _check_server(values, sources)


def _check_server(values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    for name in ("client_shared_memory", "manage_models"):
        if values[name] and values["api_processes"] > 1:
            raise ConfigError(
                f"--{name.replace('_', '-')} ({sources[name]}) works with one API process, and --api-processes "
                f"({sources['api_processes']}) is {values['api_processes']}; leave one of them out"
            )
    for name in ("load_model", "client_shared_memory", "max_loaded", "rate_limit_resource"):
        if values[name] and not values["repository"]:
            value = values[name][0] if isinstance(values[name], tuple) else values[name]
            raise ConfigError(
                f"--{name.replace('_', '-')} ({sources[name]}) is {value}, but there is no --repository; add it"
            )
    if values["grpc_port"] is not None and "kserve" not in values["wires"].split(","):
        raise ConfigError(
            f"--grpc-port ({sources['grpc_port']}) is {values['grpc_port']}, but --wires ({sources['wires']}) has no "
            "kserve, whose service it is; add kserve, or leave out --grpc-port"
        )
    if values["tls_key"] and not values["tls_certificate"]:
        raise ConfigError(
            f"--tls-key ({sources['tls_key']}) is {values['tls_key']}, but there is no certificate; "
            "set --tls-certificate, or leave it out"
        )
    _check_tenants(values, sources)
    least, most = replica_limits(values["replicas"])
    several = (least, most) != (1, 1)
    one_file = values["event_log"] or values["kv_disk"]  # which one engine can use at a time
    if several and (values["api_processes"] > 1 or (values["sleep_after"] and least) or one_file):
        raise ConfigError(
            f"--replicas ({sources['replicas']}) is {values['replicas']}, which does not go with --api-processes, "
            "--event-log, --kv-disk and, unless it is 0:MAX, --sleep-after: leave them out, or start engines with "
            "penstock engine"
        )
    prefill = values["prefill_replicas"]
    if prefill and not prefill < least == most:
        raise ConfigError(
            f"--prefill-replicas ({sources['prefill_replicas']}) is {prefill}, and --replicas ({sources['replicas']}) "
            f"is {values['replicas']}; set --replicas to a number above {prefill}, since others must decode"
        )
    if values["repository"] and several:
        raise ConfigError(
            f"--repository ({sources['repository']}) does not go with --replicas ({sources['replicas']}): leave one of "
            "them out, or start a server for each"
        )
    has_key = values["api_key"] or values["api_key_file"] or values["tenants"]
    if not (has_key or values["allow_insecure_bind"] or is_loopback(values["host"])):
        raise ConfigError(
            f"--host ({sources['host']}) is {values['host']}, which other machines can reach, and no key is required; "
            "set --api-key, or --allow-insecure-bind if anyone who reaches it may use it"
        )


def _check_tenants(values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    for name in ("api_key", "api_key_file"):
        if values["tenants"] and values[name]:
            flag = name.replace("_", "-")
            raise ConfigError(
                f"--tenants ({sources['tenants']}) has the keys of all clients, and --{flag} ({sources[name]}) is "
                f"given, too; leave --{flag} out, and make keys with penstock tenants add"
            )
    for name in ("quota_redis", "request_log", "audit"):
        if values[name] not in ("", "none") and not values["tenants"]:
            flag = name.replace("_", "-")
            value = "(hidden)" if name in SECRET else values[name]
            raise ConfigError(
                f"--{flag} ({sources[name]}) is {value}, which is about tenants, but there is no --tenants; add it"
            )
    for name in ("audit_file", "audit_heads", "audit_key_file"):
        if values[name] and values["audit"] == "none":
            flag = name.replace("_", "-")
            raise ConfigError(
                f"--{flag} ({sources[name]}) is {values[name]}, but there is no --audit; set --audit on, or leave "
                f"--{flag} out"
            )
    if values["audit"] != "none" and values["state_dir"] == "none" and not values["audit_file"]:
        raise ConfigError("--audit needs a file, and --state-dir is none; set --audit-file")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
