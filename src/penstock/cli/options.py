"""Defines the flags that several commands share. A flag that is not given keeps the configured value or the default.

Numbers stay text here: `Settings` checks them, as it does in a file and in the environment.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from penstock.cli.completion import one_of

Flags = Mapping[str, Any]

ENGINE: Flags = {
    "config": Annotated[
        str | None, typer.Option(metavar="FILE", help="YAML file with settings, named like these flags.")
    ],
    "generation_config": Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Sampling values of requests that do not set them: model, as it recommends, or none. Default: model.",
        ),
    ],
    "revision": Annotated[
        str | None, typer.Option(metavar="NAME", help="Branch, tag or commit of a Hugging Face model.")
    ],
    "device": Annotated[
        str | None, typer.Option(metavar="NAME", help="auto, cpu or cuda. Default: auto, a GPU if there is one.")
    ],
    "gpu_memory_utilization": Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Share of a GPU's memory that the engine may use. Default: 0.9."),
    ],
    "enforce_eager": Annotated[
        bool | None, typer.Option("--enforce-eager/--no-enforce-eager", help="GPU: do not capture CUDA graphs.")
    ],
    "deterministic": Annotated[
        bool | None,
        typer.Option(
            "--deterministic/--no-deterministic",
            help="GPU: tokens do not depend on the other requests in the batch; slower. A CPU's never do.",
        ),
    ],
    "attention_backend": Annotated[
        str | None, typer.Option(metavar="NAME", help="GPU: auto, triton or flashinfer. Default: auto, triton.")
    ],
    "dtype": Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="auto, float32 or bfloat16. Default: auto, the checkpoint's if it is one of these, else bfloat16.",
        ),
    ],
    "quantization": Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Quantise the weights while loading: int8, int4 or, on a GPU, fp8. Default: none."
        ),
    ],
    "quantization_group": Annotated[
        str | None, typer.Option(metavar="N", help="Values that share a scale in int4: 32, 64 or 128. Default: 32.")
    ],
    "max_model_len": Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Most tokens of a prompt and its output together. Default: the model's limit, if memory allows.",
        ),
    ],
    "max_num_seqs": Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Most sequences that run at a time. Default: 64 to 256, by the vocabulary's size."
        ),
    ],
    "max_num_batched_tokens": Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Most tokens in one step; longer prompts are prefilled in chunks. Default: 512, on a GPU 2048.",
        ),
    ],
    "block_size": Annotated[str | None, typer.Option(metavar="N", help="Tokens in a KV block. Default: 16.")],
    "kv_cache_memory": Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory for the KV cache of each rank: 4GiB, 500MB. Default: see penstock plan."
        ),
    ],
    "kv_cache_dtype": Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="auto, or half the size: int8 on a CPU, fp8 on a GPU. Default: auto, as --dtype."
        ),
    ],
    "enable_prefix_caching": Annotated[
        bool | None,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Reuse the KV cache of equal prefixes. Default: on.",
        ),
    ],
    "speculation": Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Verify several guessed tokens in a step: ngram (from the request), suffix (also from recent outputs "
            "of the same tenant), off, or auto: suffix on a CPU with one pipeline stage, else off. Default: auto.",
        ),
    ],
    "num_speculative_tokens": Annotated[
        str | None,
        typer.Option(metavar="N", help="Most guessed tokens of a sequence in a step. Default: 31 with speculation."),
    ],
    "threads": Annotated[
        str | None,
        typer.Option(
            metavar="N", help="CPU: threads that compute, for each rank. Default: all cores, divided among the ranks."
        ),
    ],
    "tensor_parallel_size": Annotated[
        str | None, typer.Option(metavar="N", help="Ranks that each layer is split over. Default: 1.")
    ],
    "pipeline_parallel_size": Annotated[
        str | None, typer.Option(metavar="N", help="Stages that the layers are divided into. Default: 1.")
    ],
    "expert_parallel": Annotated[
        bool | None, typer.Option("--expert-parallel/--no-expert-parallel", help="Give each tensor rank whole experts.")
    ],
    "distributed_executor": Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How ranks are started: auto, process or ray. Default: auto, processes on this machine.",
        ),
    ],
}
SERVER: Flags = {
    "host": Annotated[str | None, typer.Option(metavar="ADDRESS", help="Address to listen on. Default: 127.0.0.1.")],
    "port": Annotated[str | None, typer.Option(metavar="N", help="Port to listen on. Default: 8000.")],
    "api_processes": Annotated[
        str | None,
        typer.Option(metavar="N", help="Processes that speak HTTP; more for thousands of streams. Default: 1."),
    ],
    "grpc_port": Annotated[
        str | None, typer.Option(metavar="N", help="Port of KServe's gRPC service. Default: HTTP only.")
    ],
    "served_model_name": Annotated[
        str | None, typer.Option(metavar="NAME,...", help="The model's name in the API, and aliases of it.")
    ],
    "api_key": Annotated[
        str | None, typer.Option(metavar="KEY", help="Key that clients must send. Better set PENSTOCK_API_KEY.")
    ],
    "admin_key": Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Key of penstock reload, sleep and wake. Better set PENSTOCK_ADMIN_KEY."),
    ],
    "allowed_host": Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Name of this server in the Host header; repeatable. Default: any name."),
    ],
    "tls_certificate": Annotated[
        str | None, typer.Option(metavar="FILE", help="Certificate and its chain in PEM: serve HTTPS, and no HTTP.")
    ],
    "tls_key": Annotated[
        str | None, typer.Option(metavar="FILE", help="The certificate's key in PEM. Default: in the same file.")
    ],
    "allow_insecure_bind": Annotated[
        bool | None,
        typer.Option("--allow-insecure-bind", help="Allow other addresses than loopback without an API key."),
    ],
    "manage_models": Annotated[
        bool | None,
        typer.Option("--manage-models", help="Let clients of Ollama's API download and delete models."),
    ],
    "cors_origin": Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Web origin whose pages may use the server; repeatable. Default: none."),
    ],
    "wires": Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="APIs to speak: openai, anthropic, ollama, tgi, kserve, rerank, pages. Default: all."
        ),
    ],
    "state_dir": Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Folder for stored responses, files and batches, or none. Default: ~/.local/state/penstock/port-PORT.",
        ),
    ],
    "seed": Annotated[
        str | None, typer.Option(metavar="N", help="Seed for requests without one. Default: a random one for each.")
    ],
    "watermark": Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Mark outputs: green-list or gumbel (docs/watermarking.md). Default: none."),
    ],
    "watermark_key": Annotated[
        str | None, typer.Option(metavar="KEY", help="Secret of the watermark. Better set PENSTOCK_WATERMARK_KEY.")
    ],
    "max_waiting": Annotated[
        str | None, typer.Option(metavar="N", help="Most requests that wait; the next ones get 429. Default: 1024.")
    ],
    "max_waiting_tokens": Annotated[
        str | None,
        typer.Option(metavar="N", help="Most prompt tokens of waiting requests; more get 429. Default: 1048576."),
    ],
    "request_timeout": Annotated[
        str | None, typer.Option(metavar="SECONDS", help="Longest time of a request. Default: no limit.")
    ],
    "first_token_timeout": Annotated[
        str | None,
        typer.Option(metavar="SECONDS", help="Longest time until a request's first token. Default: no limit."),
    ],
    "target_itl": Annotated[
        str | None,
        typer.Option(
            metavar="MS",
            help="Target for the milliseconds between tokens, by smaller prompt chunks. Default: 0, none.",
        ),
    ],
    "max_in_flight": Annotated[
        str | None, typer.Option(metavar="N", help="Most requests in flight; the next ones get 429. Default: 2048.")
    ],
    "max_body_size": Annotated[
        str | None, typer.Option(metavar="SIZE", help="Largest body of a request. Default: 4MiB.")
    ],
    "max_answer_size": Annotated[
        str | None, typer.Option(metavar="SIZE", help="Largest answer that a request may ask for. Default: 32MiB.")
    ],
    "max_prompts": Annotated[
        str | None, typer.Option(metavar="N", help="Most prompts in a completions request. Default: 64.")
    ],
    "max_choices": Annotated[str | None, typer.Option(metavar="N", help="Most choices (n) of a request. Default: 32.")],
    "max_sequences": Annotated[
        str | None, typer.Option(metavar="N", help="Most prompts times choices of a request. Default: 256.")
    ],
    "max_logprobs": Annotated[
        str | None, typer.Option(metavar="N", help="Most alternatives per token in logprobs. Default: 20.")
    ],
    "max_stop_strings": Annotated[
        str | None, typer.Option(metavar="N", help="Most stop strings of a request. Default: 16.")
    ],
    "max_priority": Annotated[
        str | None, typer.Option(metavar="N", help="Requests' priorities are from -N to N seconds. Default: 10.")
    ],
    "tool_format": Annotated[
        str | None, typer.Option(metavar="NAME", help="Format of tool calls (docs/tools.md), or none. Default: auto.")
    ],
    "reasoning_format": Annotated[
        str | None, typer.Option(metavar="NAME", help="Format of reasoning (docs/tools.md), or none. Default: auto.")
    ],
    "thinking_budget": Annotated[
        str | None,
        typer.Option(metavar="N", help="Most tokens of reasoning in an answer; requests may ask for less."),
    ],
    "sleep_after": Annotated[
        str | None,
        typer.Option(
            metavar="SECONDS",
            help="End the engine after so long without a request, until the next. Default: never.",
        ),
    ],
    "drain_timeout": Annotated[
        str | None,
        typer.Option(metavar="SECONDS", help="Seconds for requests in flight to finish at shutdown. Default: 30."),
    ],
    "step_deadline": Annotated[
        str | None,
        typer.Option(
            metavar="SECONDS", help="Seconds without a step until a busy engine counts as hung. Default: 120."
        ),
    ],
    "log_format": Annotated[
        str | None,
        typer.Option(metavar="NAME", help="text, or json: one object a line, for log collectors. Default: text."),
    ],
    "otlp_endpoint": Annotated[
        str | None,
        typer.Option(metavar="URL", help="Send a trace of each request to this OpenTelemetry collector, over HTTP."),
    ],
    "event_log": Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the scheduler's events, with token ids, for penstock replay."),
    ],
}

# The values that Tab offers. A test compares them with the settings.
VALUES: Mapping[str, tuple[str, ...]] = {
    "generation_config": ("model", "none"),
    "device": ("auto", "cpu", "cuda"),
    "attention_backend": ("auto", "triton", "flashinfer"),
    "dtype": ("auto", "float32", "bfloat16"),
    "quantization": ("none", "int8", "int4", "fp8"),
    "quantization_group": ("32", "64", "128"),
    "kv_cache_dtype": ("auto", "int8", "fp8"),
    "speculation": ("auto", "off", "ngram", "suffix"),
    "log_format": ("text", "json"),
    "distributed_executor": ("auto", "process", "ray"),
    "watermark": ("none", "green-list", "gumbel"),
    "tool_format": (
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
    ),
    "reasoning_format": ("auto", "none", "harmony", "mistral", "seed", "think"),
}
for _name, _values in VALUES.items():
    (_option,) = {**ENGINE, **SERVER}[_name].__metadata__
    _option.autocompletion = one_of(*_values)


def takes(*groups: Flags) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that adds the flags of `groups` to a command.

    The command receives those that the user gave as its argument `flags`.
    """
    shared = {name: annotation for group in groups for name, annotation in group.items()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        own = [parameter for name, parameter in signature.parameters.items() if name != "flags"]
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in shared.items()
        ]

        @functools.wraps(command)
        def with_flags(**values: Any) -> None:
            flags = {name: value for name in shared if (value := values.pop(name)) not in (None, [])}
            command(**values, flags=flags)

        with_flags.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *added)}
        return with_flags

    return decorate
