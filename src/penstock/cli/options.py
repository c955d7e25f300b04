"""Flags that several commands share, declared once. A flag that is not given leaves the choice to configuration."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

Flags = Mapping[str, Any]

ENGINE: Flags = {
    "config": Annotated[str | None, typer.Option(metavar="FILE", help="YAML file of settings, named as these flags.")],
    "revision": Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")],
    "device": Annotated[str | None, typer.Option(help="auto, cpu or cuda. Default: auto, a GPU where there is one.")],
    "gpu_memory_utilization": Annotated[
        float | None, typer.Option(metavar="SHARE", help="Of a GPU's memory, for the engine. Default: 0.9.")
    ],
    "enforce_eager": Annotated[
        bool | None, typer.Option("--enforce-eager/--no-enforce-eager", help="On a GPU: capture no graphs.")
    ],
    "deterministic": Annotated[
        bool | None,
        typer.Option(
            "--deterministic/--no-deterministic",
            help="On a GPU, too, tokens do not depend on what else is in the batch; slower.",
        ),
    ],
    "attention_backend": Annotated[
        str | None, typer.Option(help="On a GPU: auto, triton or flashinfer. Default: auto, triton.")
    ],
    "dtype": Annotated[str | None, typer.Option(help="float32 or bfloat16. Default: as the checkpoint.")],
    "quantization": Annotated[
        str | None,
        typer.Option(help="int8, int4 or, on a GPU, fp8: quantise the weights while loading. Default: none."),
    ],
    "quantization_group": Annotated[
        int | None, typer.Option(metavar="N", help="int4: 32, 64 or 128 values share a scale. Default: 32.")
    ],
    "max_model_len": Annotated[int | None, typer.Option(help="Longest prompt and output together, in tokens.")],
    "max_num_seqs": Annotated[int | None, typer.Option(help="Sequences that run at a time.")],
    "max_num_batched_tokens": Annotated[
        int | None, typer.Option(help="Tokens computed in one step; longer prompts are prefilled in chunks.")
    ],
    "block_size": Annotated[int | None, typer.Option(help="Tokens in a KV block.")],
    "kv_cache_memory": Annotated[
        str | None, typer.Option(metavar="SIZE", help="For the KV cache, of each rank: 4GiB, 500MB.")
    ],
    "kv_cache_dtype": Annotated[
        str | None, typer.Option(help="auto, or what halves the KV cache: int8 on a CPU, fp8 on a GPU.")
    ],
    "enable_prefix_caching": Annotated[
        bool | None, typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="Share equal prefixes.")
    ],
    "threads": Annotated[
        int | None,
        typer.Option(help="On a CPU: threads that compute, of each rank. Default: every core, shared by the ranks."),
    ],
    "tensor_parallel_size": Annotated[int | None, typer.Option(help="Ranks that share every layer. Default: 1.")],
    "pipeline_parallel_size": Annotated[int | None, typer.Option(help="Stages that share the layers. Default: 1.")],
    "expert_parallel": Annotated[
        bool | None, typer.Option("--expert-parallel/--no-expert-parallel", help="Tensor ranks hold whole experts.")
    ],
    "distributed_executor": Annotated[
        str | None, typer.Option(help="Who starts the ranks: auto, process or ray. Default: auto, processes here.")
    ],
}
SERVER: Flags = {
    "host": Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")],
    "port": Annotated[int | None, typer.Option(help="Port to listen on. Default: 8000.")],
    "served_model_name": Annotated[
        str | None, typer.Option(metavar="NAME,...", help="The model's name in the API, and others it answers to.")
    ],
    "api_key": Annotated[str | None, typer.Option(help="Key that clients must send. Better: PENSTOCK_API_KEY.")],
    "allow_insecure_bind": Annotated[
        bool | None, typer.Option("--allow-insecure-bind", help="Listen beyond loopback without an API key.")
    ],
    "seed": Annotated[int | None, typer.Option(help="Seed of requests that name none. Default: each draws its own.")],
    "max_waiting": Annotated[int | None, typer.Option(help="Requests that may wait before new ones get 429.")],
    "max_in_flight": Annotated[int | None, typer.Option(help="Requests answered at once before new ones get 429.")],
    "max_body_size": Annotated[str | None, typer.Option(metavar="SIZE", help="Largest body of a request: 4MiB.")],
    "max_prompts": Annotated[int | None, typer.Option(help="Prompts in one completions request.")],
    "max_choices": Annotated[int | None, typer.Option(help="Choices (n) of one request.")],
    "max_sequences": Annotated[int | None, typer.Option(help="Prompts times choices of one request.")],
    "max_logprobs": Annotated[int | None, typer.Option(help="Alternatives per token that a request may ask for.")],
    "max_stop_strings": Annotated[int | None, typer.Option(help="Stop strings of one request.")],
    "drain_timeout": Annotated[
        float | None, typer.Option(help="Seconds that requests may take to finish at shutdown.")
    ],
    "step_deadline": Annotated[
        float | None, typer.Option(help="Seconds without a step before an engine counts as hung.")
    ],
    "event_log": Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the scheduler's events, with token ids, for penstock replay."),
    ],
}


def takes(*groups: Flags) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds the flags of `groups` to a command, which receives those that were given as its argument `flags`."""
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
            flags = {name: value for name in shared if (value := values.pop(name)) is not None}
            command(**values, flags=flags)

        with_flags.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *added)}
        return with_flags

    return decorate
