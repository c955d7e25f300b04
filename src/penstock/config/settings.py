"""The settings that an operator can give: one schema for flags, environment variables and the keys of a YAML file."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from penstock.config.origins import read_hosts, read_origins
from penstock.config.server import WIRE_NAMES
from penstock.config.sizes import parse_bytes
from penstock.config.texts import check_key, check_revision


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is expected, not true or false")
    return value


def _bytes(value: Any) -> Any:
    try:
        return parse_bytes(value) if isinstance(value, str) else _no_bool(value)
    except ValueError:
        raise ValueError("give an amount of memory, such as 4GiB, 500MB or a number of bytes") from None


def _group(value: Any) -> Any:
    if str(value) not in ("32", "64", "128"):
        raise ValueError("give 32, 64 or 128")
    return value


def _wires(value: Any) -> Any:
    names = [name.strip() for name in str(value).split(",")]
    if not set(names) <= {*WIRE_NAMES} or len(names) > len({*names}):
        raise ValueError(f"give different names of {', '.join(WIRE_NAMES)}, with commas between them")
    return ",".join(names)


Count = Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=2**31 - 1)]
Ranks = Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=1024)]
Seconds = Annotated[float, BeforeValidator(_no_bool), Field(gt=0, le=86400)]
Bytes = Annotated[int, BeforeValidator(_bytes), Field(ge=1, le=2**50)]

# The names of the formats in penstock.text.calls.
ToolFormatName = Literal[
    "auto",
    "none",
    "deepseek-v3",
    "deepseek-v3.1",
    "glm",
    "harmony",
    "hermes",
    "json",
    "kimi-k2",
    "lfm2",
    "llama3-json",
    "minimax",
    "mistral",
    "mistral-list",
    "nemotron",
    "pythonic",
    "qwen3-coder",
    "seed-oss",
]
ReasoningFormatName = Literal["auto", "none", "harmony", "mistral", "seed", "think"]


class Settings(BaseModel):
    """None means not given: defaults.py then declares the value and its reason."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    model: str | None = Field(
        None,
        description="A folder, a GGUF file, a hub id or a name of penstock list; none: the default model",
    )
    served_model_name: str | None = Field(
        None, min_length=1, description="The names clients ask for, with commas between them"
    )
    revision: Annotated[str, Field(min_length=1), BeforeValidator(check_revision)] | None = Field(
        None, description="Branch, tag or commit of a hub id"
    )

    host: str | None = Field(None, min_length=1, description="Address to listen on")
    port: Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=65535)] | None = Field(
        None, description="TCP port; 0 takes any that is free"
    )
    api_processes: Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=64)] | None = Field(
        None, description="Processes that speak HTTP, each with a share of the connections"
    )
    grpc_port: Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=65535)] | None = Field(
        None, description="TCP port of KServe's gRPC service; 0 takes any that is free"
    )
    api_key: Annotated[str, Field(min_length=1), BeforeValidator(check_key)] | None = Field(
        None, description="Key that clients must send"
    )
    admin_key: Annotated[str, Field(min_length=1), BeforeValidator(check_key)] | None = Field(
        None, description="Key of the operator's routes: reload, sleep and wake"
    )
    allowed_host: Annotated[tuple[str, ...], BeforeValidator(read_hosts)] | None = Field(
        None, description="Names of the server in the Host header, with commas between them"
    )
    tls_certificate: str | None = Field(None, min_length=1, description="PEM file of the certificate and its chain")
    tls_key: str | None = Field(None, min_length=1, description="PEM file of the certificate's private key")
    allow_insecure_bind: bool | None = Field(None, description="Listen on other addresses than loopback without a key")
    cors_origin: Annotated[tuple[str, ...], BeforeValidator(read_origins)] | None = Field(
        None, description="Web origins whose pages may use the server, with commas between them"
    )
    wires: Annotated[str, BeforeValidator(_wires)] | None = Field(
        None, description="The APIs that the server speaks, with commas between them"
    )
    manage_models: bool | None = Field(
        None, description="Let clients of Ollama's API download and delete models of this machine"
    )
    state_dir: str | None = Field(
        None, min_length=1, description="Folder for stored responses, files and batches, or none"
    )
    seed: Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=2**64 - 1)] | None = Field(
        None, description="Seed of requests without one"
    )
    generation_config: Literal["model", "none"] | None = Field(
        None, description="Sampling values of requests that set none; model: those that the model recommends"
    )

    device: Literal["auto", "cpu", "cuda"] | None = Field(
        None, description="Device that computes; auto: a GPU if there is one"
    )
    gpu_memory_utilization: Annotated[float, BeforeValidator(_no_bool), Field(gt=0, le=1)] | None = Field(
        None, description="The share of a GPU's memory that the engine may take"
    )
    enforce_eager: bool | None = Field(None, description="Capture no CUDA graphs")
    deterministic: bool | None = Field(None, description="Tokens do not depend on what else is in the batch")
    attention_backend: Literal["auto", "triton", "flashinfer"] | None = Field(
        None, description="Kernels of attention on a GPU; auto: triton"
    )
    dtype: Literal["auto", "float32", "bfloat16"] | None = Field(
        None, description="Dtype of weights, activations and KV cache; auto: the checkpoint's"
    )
    quantization: Literal["none", "int8", "int4", "fp8"] | None = Field(
        None, description="Quantise the weights while they are loaded"
    )
    quantization_group: Annotated[int, BeforeValidator(_group)] | None = Field(
        None, description="Values that share a scale in int4: 32, 64 or 128"
    )
    max_model_len: Count | None = Field(None, description="Tokens of prompt and output together")
    max_num_seqs: Count | None = Field(None, description="Sequences that run at once")
    max_num_batched_tokens: Count | None = Field(None, description="Tokens computed in one step")
    block_size: Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=1024)] | None = Field(
        None, description="Tokens per KV block"
    )
    kv_cache_memory: Bytes | None = Field(None, description="Memory for the KV cache of each rank: 4GiB, 500MB, ...")
    kv_cache_dtype: Literal["auto", "int8", "fp8"] | None = Field(
        None, description="Dtype of the KV cache; auto: that of --dtype"
    )
    enable_prefix_caching: bool | None = Field(None, description="Share the KV cache of equal prefixes")
    speculation: Literal["auto", "off", "ngram", "suffix"] | None = Field(
        None,
        description="Where speculative tokens come from; auto (default): suffix on a CPU with one pipeline stage, "
        "else off",
    )
    num_speculative_tokens: Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=64)] | None = Field(
        None, description="Speculative tokens of one sequence in a step, at most"
    )
    watermark: Literal["none", "green-list", "gumbel"] | None = Field(None, description="Mark outputs")
    watermark_key: Annotated[str, Field(min_length=16, max_length=1024)] | None = Field(
        None, description="The secret of the watermark; detection needs it"
    )
    max_waiting: Count | None = Field(None, description="Requests queued before new ones are refused")
    max_waiting_tokens: Count | None = Field(None, description="Prompt tokens queued before new requests are refused")
    target_itl: Annotated[float, BeforeValidator(_no_bool), Field(ge=0, le=60000)] | None = Field(
        None,
        description="Target for the milliseconds between tokens: longer prompts are prefilled in small chunks; 0: none",
    )
    threads: Count | None = Field(None, description="Threads of each rank that compute")
    tensor_parallel_size: Ranks | None = Field(None, description="Ranks that share every layer")
    pipeline_parallel_size: Ranks | None = Field(None, description="Stages that share the layers")
    expert_parallel: bool | None = Field(None, description="Each tensor rank holds whole experts")
    distributed_executor: Literal["auto", "process", "ray"] | None = Field(
        None, description="What starts the ranks: auto, process or ray"
    )
    step_deadline: Seconds | None = Field(
        None, description="Seconds without a step, while there is work, after which the engine counts as hung"
    )
    log_format: Literal["text", "json"] | None = Field(None, description="Lines of the log: text, or JSON objects")
    otlp_endpoint: str | None = Field(
        None, min_length=1, description="URL of an OpenTelemetry collector that gets a trace of each request"
    )
    event_log: str | None = Field(None, min_length=1, description="File for the scheduler's events; it holds token ids")

    max_body_size: Bytes | None = Field(None, description="Largest body of an HTTP request: 4MiB, ...")
    max_answer_size: Bytes | None = Field(None, description="Largest answer that a request may ask for: 32MiB, ...")
    max_prompts: Count | None = Field(None, description="Prompts in one completions request")
    max_choices: Count | None = Field(None, description="Choices (n) of one request")
    max_sequences: Count | None = Field(None, description="Prompts times choices of one request")
    max_logprobs: Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=1000)] | None = Field(
        None, description="Alternatives per token that a request may ask for"
    )
    max_stop_strings: Count | None = Field(None, description="Stop strings of one request")
    max_priority: Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=86400)] | None = Field(
        None, description="Seconds by which a request's priority may move its place in the queue, either way"
    )
    tool_format: ToolFormatName | None = Field(None, description="How the model writes tool calls")
    reasoning_format: ReasoningFormatName | None = Field(None, description="How the model marks its reasoning")
    thinking_budget: Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=2**31 - 1)] | None = Field(
        None, description="Tokens of reasoning in an answer, at most"
    )
    max_in_flight: Count | None = Field(None, description="Requests answered at once before new ones get 429")
    request_timeout: Seconds | None = Field(None, description="Seconds from a request to its last token, at most")
    first_token_timeout: Seconds | None = Field(None, description="Seconds from a request to its first token, at most")
    sleep_after: Seconds | None = Field(None, description="Seconds without a request after which the engine sleeps")
    drain_timeout: Seconds | None = Field(None, description="Seconds that requests may take to finish at shutdown")
