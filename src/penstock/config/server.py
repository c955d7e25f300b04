"""The configuration of the API server: its address, its key and its limits."""

from typing import Literal

import msgspec

WIRE_NAMES = ("openai", "anthropic", "ollama", "tgi", "kserve", "rerank", "pages")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in bytes, times in seconds. Every limit is checked before anything is allocated for a request."""

    served_model_name: str = "penstock"
    aliases: tuple[str, ...] = ()  # other names of the model
    host: str = "127.0.0.1"
    port: int = 8000
    api_processes: int = 1  # that speak HTTP
    grpc_port: int | None = None  # of KServe's gRPC service; None: there is none
    api_key: str | None = None
    admin_key: str | None = None  # of the operator's routes
    allowed_host: tuple[str, ...] = ()  # names in the Host header, besides those of loopback
    tls_certificate: str = ""  # PEM file; "": HTTP without TLS
    tls_key: str = ""  # PEM file; "": the key is in the certificate's file
    cors_origin: tuple[str, ...] = ()  # web origins that may use the server from a browser
    wires: tuple[str, ...] = WIRE_NAMES  # the APIs that are served
    manage_models: bool = False  # clients of Ollama's API may download and delete models
    state_dir: str = "auto"  # for stored responses, files and batches; auto: by the port; none: nothing is stored
    seed: int | None = None  # of requests without one; None: each draws its own
    max_body_bytes: int = 4 << 20
    max_prompts: int = 64  # in one completions request
    max_choices: int = 32  # n
    max_sequences: int = 256  # prompts x n
    max_logprobs: int = 20
    max_answer_bytes: int = 32 << 20  # that a request may have, estimated from tokens and log-probabilities
    max_stop_strings: int = 16
    max_priority: int = 10  # `priority` is from -max_priority to max_priority
    tool_format: str = "auto"  # how the model writes tool calls: a format's name, auto or none
    reasoning_format: str = "auto"  # how it marks its reasoning
    thinking_budget: int | None = None  # most tokens of reasoning in an answer; None: any number
    max_in_flight: int = 2048  # requests being answered; more get 429
    request_timeout: float | None = None  # of a request in seconds, at most; None: no limit
    first_token_timeout: float | None = None
    otlp_endpoint: str = ""  # URL of an OpenTelemetry collector; "": no traces
    log_format: Literal["text", "json"] = "text"
    sleep_after: float | None = None  # seconds without a request after which the engine sleeps; None: it never does
    drain_timeout: float = 30.0  # that requests may take to finish at shutdown
