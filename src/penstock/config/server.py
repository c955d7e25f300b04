"""The configuration of the API server: its address, its key and its limits."""

from typing import Literal

import msgspec

from penstock.declared.settings import DEFAULTS, WIRE_NAMES


class ServerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits that an operator can set. Each is checked before anything is allocated for a request. Sizes are in
    bytes, times in seconds."""

    max_body_bytes: int = DEFAULTS["max_body_size"]
    max_prompts: int = DEFAULTS["max_prompts"]  # in one completions request
    max_choices: int = DEFAULTS["max_choices"]  # n
    max_sequences: int = DEFAULTS["max_sequences"]  # prompts x n
    max_logprobs: int = DEFAULTS["max_logprobs"]
    max_answer_bytes: int = DEFAULTS["max_answer_size"]  # estimated from tokens and log-probabilities
    max_stop_strings: int = DEFAULTS["max_stop_strings"]
    max_priority: int = DEFAULTS["max_priority"]  # `priority` is from -max_priority to max_priority
    max_in_flight: int = DEFAULTS["max_in_flight"]  # requests being answered; the next ones get 429
    request_timeout: float | None = DEFAULTS["request_timeout"]  # from a request to its last token; None: no limit
    first_token_timeout: float | None = DEFAULTS["first_token_timeout"]  # from a request to its first token
    drain_timeout: float = DEFAULTS["drain_timeout"]  # for requests in flight to finish after a signal to stop
    context_policy: str = DEFAULTS["context_policy"]  # for a chat that is too long


class ServerConfig(ServerLimits, frozen=True, kw_only=True):
    """The settings of an API server. None and "" mean that there is none of it."""

    served_model_name: str = "penstock"
    aliases: tuple[str, ...] = ()  # other names of the model
    host: str = DEFAULTS["host"]
    port: int = DEFAULTS["port"]
    api_processes: int = DEFAULTS["api_processes"]  # that speak HTTP
    grpc_port: int | None = DEFAULTS["grpc_port"]  # of KServe's gRPC service
    api_key: str | None = DEFAULTS["api_key"]
    api_key_file: str = DEFAULTS["api_key_file"]  # of more keys; "": none
    admin_key: str | None = DEFAULTS["admin_key"]  # of the operator's routes
    tenants: str = DEFAULTS["tenants"]  # a tenants file; "": there are none
    quota_redis: str = DEFAULTS["quota_redis"]  # URL; "": the counters of quotas are in memory
    ledger_days: int = DEFAULTS["ledger_days"]
    request_log: str = DEFAULTS["request_log"]  # a file; "": none
    request_log_share: float = DEFAULTS["request_log_share"]
    audit: Literal["none", "on", "required"] = DEFAULTS["audit"]
    audit_file: str = DEFAULTS["audit_file"]  # "": audit.jsonl in the state folder
    audit_heads: str = DEFAULTS["audit_heads"]  # a file; "": none
    audit_key_file: str = DEFAULTS["audit_key_file"]  # of the secret that signs heads
    allowed_host: tuple[str, ...] = DEFAULTS["allowed_host"]  # names in the Host header, besides those of loopback
    trusted_proxy: tuple[str, ...] = DEFAULTS["trusted_proxy"]  # addresses and networks
    tls_certificate: str = DEFAULTS["tls_certificate"]  # PEM file; "": HTTP without TLS
    tls_key: str = DEFAULTS["tls_key"]  # PEM file; "": the key is in the certificate's file
    cors_origin: tuple[str, ...] = DEFAULTS["cors_origin"]  # web origins that may use the server from a browser
    wires: tuple[str, ...] = WIRE_NAMES  # the APIs that are served
    repository: str = DEFAULTS["repository"]  # a folder or bucket of models; "": none
    repository_cache: int = DEFAULTS["repository_cache"]  # bytes on disk of the files of a bucket
    providers: str = DEFAULTS["providers"]  # a file with models of providers; "": none
    max_loaded: int | None = DEFAULTS["max_loaded"]  # language models of the repository that have an engine; None: all
    min_stay: float = DEFAULTS["min_stay"]  # seconds that one of these has it at least
    load_model: tuple[str, ...] = DEFAULTS["load_model"]  # of the repository, at the start; (): all
    client_shared_memory: int | None = DEFAULTS["client_shared_memory"]  # bytes of all regions; None: off
    manage_models: bool = DEFAULTS["manage_models"]  # clients of Ollama's API may download and delete models
    rate_limit_resource: tuple[str, ...] = DEFAULTS["rate_limit_resource"]  # NAME:COUNT
    state_dir: str = DEFAULTS["state_dir"]  # auto: by the port; none: nothing is stored
    seed: int | None = DEFAULTS["seed"]  # of requests without one; None: each draws its own
    tool_format: str = DEFAULTS["tool_format"]  # how the model writes tool calls: a format's name, auto or none
    reasoning_format: str = DEFAULTS["reasoning_format"]  # how it marks its reasoning
    truncate_embeddings: bool = DEFAULTS["truncate_embeddings"]  # cut texts that are too long instead of refusing them
    thinking_budget: int | None = DEFAULTS["thinking_budget"]  # most tokens of reasoning in an answer
    otlp_endpoint: str = DEFAULTS["otlp_endpoint"]  # URL of an OpenTelemetry collector
    log_format: Literal["text", "json"] = DEFAULTS["log_format"]
    log_level: Literal["debug", "info", "warning", "error"] = DEFAULTS["log_level"]
    access_log: float = DEFAULTS["access_log"]  # the share of answered requests that the log shows
    vllm_metrics: bool = DEFAULTS["vllm_metrics"]  # series have vLLM's names, too
    shutdown_delay: float = DEFAULTS["shutdown_delay"]  # seconds from a signal to stop to the first request refused
    preemption_notice: str = DEFAULTS["preemption_notice"]  # a file or URL; "": none
    replicas: str = DEFAULTS["replicas"]  # engines on this machine, see `replica_limits`
    prefill_replicas: int = DEFAULTS["prefill_replicas"]  # of these, that compute prompts for the others
    scale_down_after: float = DEFAULTS["scale_down_after"]  # seconds for which fewer engines must have been enough
    hold_timeout: float = DEFAULTS["hold_timeout"]  # seconds that a request waits for an engine of the fleet
    engines: str = DEFAULTS["engines"]  # elsewhere; "": the server has its own
    region: str = DEFAULTS["region"]  # where this machine is; "": it has no name
    route: Literal["cost", "round-robin"] = DEFAULTS["route"]
    move_anywhere: bool = DEFAULTS["move_anywhere"]  # requests go on with other weights or numerics
    fleet_key: str = DEFAULTS["fleet_key"]  # between fronts and engines; a secret
    fleet_ca: str = DEFAULTS["fleet_ca"]  # PEM file; "": no TLS to engines
    sleep_after: float | None = DEFAULTS["sleep_after"]  # seconds without a request after which the engine sleeps
