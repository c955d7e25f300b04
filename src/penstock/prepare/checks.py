"""Checks, before an engine starts, whether this machine can run a model.

`penstock plan` and all commands that start an engine use these checks, so they give the same errors.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import ConfigError, EngineConfig, Hardware, Resolved, ServerConfig
from penstock.config.kv_disk import read_kv_disk
from penstock.config.machine.gpu import too_few_gpus
from penstock.config.tenants.file import read_tenants
from penstock.families import ModelSpec
from penstock.frontend.http.keys import ApiKeys
from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native_limits import has_whole_lines, unsupported_int8_pages, unsupported_quantization
from penstock.observe.tracing import check_endpoint
from penstock.prepare.files import check_file, check_folder
from penstock.weights.checkpoint import check_tensors, stored_tensors

if TYPE_CHECKING:
    from penstock.frontend.http.tls import TLS
    from penstock.prepare.model import FoundModel


def check_start(found: "FoundModel", resolved: Resolved, hardware: Hardware, *, weights: bool = True) -> None:
    """Raises an error if this machine cannot run the model with these settings.

    - ConfigError: too few GPUs, missing native kernels, or missing packages for gRPC.
    - ValueError: an event log or a state folder that cannot be written.
    - CheckpointError: weights that are missing or do not match the model's config. Only the headers of the weight files
      are read. `weights=False` skips this check.
    - ValueError: a file of API keys, of tenants or of providers that cannot be used.
    - WrongCertificate, WrongEndpoint: wrong TLS files, or a wrong --otlp-endpoint.
    """
    engine = resolved.engine
    check_runs(resolved, hardware)
    check_file("--event-log", engine.event_log or None)
    if engine.kv_disk:
        check_folder(f"--kv-disk {engine.kv_disk}: the folder", read_kv_disk(engine.kv_disk).folder)
    if resolved.server.state_dir not in ("auto", "none"):
        check_folder("--state-dir", resolved.server.state_dir)
    check_tls(resolved.server)
    if resolved.server.api_key_file:
        ApiKeys(file=resolved.server.api_key_file)
    check_tenants(resolved.server)
    check_providers(resolved.server)
    check_grpc(resolved.server)
    if resolved.server.otlp_endpoint:
        check_endpoint(resolved.server.otlp_endpoint)
    if engine.device == "cpu":
        _check_kernels(found.spec, engine)
    if weights:
        check_tensors(found.spec, stored_tensors(found.path, found.spec))


def check_tls(server: ServerConfig) -> "TLS | None":
    """Returns the server's certificate and key, or None if the server does not use TLS. Raises WrongCertificate."""
    if not server.tls_certificate:
        return None
    from penstock.frontend.http.tls import TLS

    return TLS(server.tls_certificate, server.tls_key)


def check_tenants(server: ServerConfig) -> None:
    """Raises ValueError for a tenants file, or files of its records, that cannot be used."""
    if not server.tenants:
        return
    read_tenants(Path(server.tenants))
    for name in ("request_log", "audit_file", "audit_heads"):
        check_file(f"--{name.replace('_', '-')}", getattr(server, name) or None)
    if server.quota_redis and not server.quota_redis.startswith(("redis://", "rediss://", "unix://")):
        raise ConfigError("--quota-redis is (hidden): it is no URL of Redis; write for example redis://127.0.0.1:6379")
    if server.quota_redis and not find_spec("redis"):
        raise ConfigError("--quota-redis needs a package: run pip install 'penstock[redis]', or leave it out")
    if server.audit_heads and not server.audit_key_file:
        raise ConfigError("--audit-heads are signed, and there is no key; set --audit-key-file")
    if server.audit_key_file:
        try:
            size = len(Path(server.audit_key_file).read_bytes().strip())
        except OSError as error:
            reason = str(error.strerror).lower()
            raise ConfigError(
                f"--audit-key-file {server.audit_key_file} cannot be read: {reason}; name a file"
            ) from None
        if size < 16:
            raise ConfigError(f"--audit-key-file {server.audit_key_file} has {size} bytes; give 16 or more")


def check_providers(server: ServerConfig) -> None:
    """Raises ValueError for a providers file, or a key that it names, that cannot be used."""
    if server.providers:
        from penstock.frontend.providers.file import read_providers

        read_providers(Path(server.providers))


def check_grpc(server: ServerConfig) -> None:
    """Raises ConfigError if gRPC is enabled and its packages are missing."""
    if server.grpc_port is None:
        return
    if not (find_spec("grpc") and find_spec("google") and find_spec("google.protobuf")):
        raise ConfigError(
            f"--grpc-port is {server.grpc_port}, but gRPC is not installed: run pip install 'penstock[grpc]', "
            "or leave it out"
        )


def check_runs(resolved: Resolved, hardware: Hardware) -> None:
    """Raises ConfigError if the model is split over more ranks than this machine has GPUs.

    Ranks that Ray places are not checked here, but by Ray.
    """
    engine = resolved.engine
    ranks = engine.split.world
    if engine.device == "cuda" and engine.distributed_executor != "ray" and ranks > hardware.gpus:
        raise ConfigError(too_few_gpus(ranks, hardware.gpus))


def _check_kernels(spec: ModelSpec, engine: EngineConfig) -> None:
    native = bool(instruction_sets())
    if engine.quantization != "none" and not native:
        raise ConfigError(unsupported_quantization(engine.quantization, engine.dtype, built=False))
    if engine.kv_dtype == "int8" and not (native and has_whole_lines(engine.block_size, spec.head_dims)):
        raise ConfigError(unsupported_int8_pages(engine.block_size, spec.head_dims))
