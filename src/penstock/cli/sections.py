"""Headings for the flags of settings in a command's help."""

from collections.abc import Mapping
from typing import Any

from penstock.cli.usage import PlainUsage

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "Model": (
        "config",
        "revision",
        "generation_config",
        "device",
        "dtype",
        "quantization",
        "quantization_group",
        "served_model_name",
    ),
    "Memory and batches": (
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_cache_memory",
        "kv_cache_dtype",
        "gpu_memory_utilization",
        "enable_prefix_caching",
        "block_size",
    ),
    "Execution": (
        "threads",
        "speculation",
        "num_speculative_tokens",
        "attention_backend",
        "enforce_eager",
        "deterministic",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "expert_parallel",
        "distributed_executor",
    ),
    "Server": ("host", "port", "api_processes", "grpc_port", "wires", "state_dir", "manage_models"),
    "Access": (
        "api_key",
        "admin_key",
        "allowed_host",
        "allow_insecure_bind",
        "tls_certificate",
        "tls_key",
        "cors_origin",
    ),
    "Answers": ("tool_format", "reasoning_format", "thinking_budget", "watermark", "watermark_key"),
    "Queue and deadlines": (
        "max_in_flight",
        "max_waiting",
        "max_waiting_tokens",
        "max_priority",
        "request_timeout",
        "first_token_timeout",
        "target_itl",
        "step_deadline",
        "drain_timeout",
        "sleep_after",
    ),
    "Limits of a request": (
        "max_body_size",
        "max_answer_size",
        "max_prompts",
        "max_choices",
        "max_sequences",
        "max_logprobs",
        "max_stop_strings",
    ),
    "Logs and traces": ("log_format", "otlp_endpoint", "event_log"),
}
_PLACES = {name: (heading, place) for heading, names in SECTIONS.items() for place, name in enumerate(names)}


class SectionedHelp(PlainUsage):
    """A command that takes settings: its help has its own flags first, then those of settings below headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        rows: dict[str, list[tuple[int, Any]]] = {
            "Arguments": [],
            "Options": [],
            **{heading: [] for heading in SECTIONS},
        }
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                own = ("Arguments" if parameter.param_type_name == "argument" else "Options", 0)
                heading, place = _PLACES.get(parameter.name or "", own)
                rows[heading].append((place, record))
        for heading, found in rows.items():
            if found:
                with formatter.section(heading):
                    formatter.write_dl([record for _, record in sorted(found, key=lambda row: row[0])])
