"""The series of a model: names, texts and where their values come from."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from penstock.messages import EngineStats
from penstock.observe.histogram import Histogram
from penstock.observe.model_metrics import EngineView, Latencies, ModelMetrics


def counter_of(name: str, text: str, labels: Sequence[str], counts: Mapping[Any, float]) -> Metric:
    """Returns a counter with these counts by their label, or by the tuple of their labels."""
    family = CounterMetricFamily(name, text, labels=labels)
    for key, count in counts.items():
        family.add_metric([key] if isinstance(key, str) else key, count)
    return family


def serves(engine: EngineView) -> bool:
    """True while the engine answers requests."""
    return engine.state.status in ("ready", "asleep")


def sleeps(engine: EngineView) -> bool:
    return engine.state.status == "asleep"


GAUGES: tuple[tuple[str, str, Callable[[EngineView, EngineStats], float]], ...] = (
    ("num_requests_running", "Requests in the running batch.", lambda _, stats: stats.running),
    ("num_requests_waiting", "Requests waiting to run.", lambda _, stats: stats.waiting),
    ("num_tokens_waiting", "Prompt tokens of requests waiting to run.", lambda engine, _: engine.queue.tokens),
    ("max_num_seqs", "Most requests in the running batch.", lambda engine, _: engine.info.max_num_seqs),
    ("kv_cache_usage_perc", "Share of KV blocks held by requests, 1 = all.", lambda _, stats: stats.kv_usage),
    ("kv_disk_blocks", "KV blocks that the disk tier has.", lambda _, stats: stats.disk_blocks),
    ("kv_disk_bytes", "Bytes of their files.", lambda _, stats: stats.disk_bytes),
    ("engine_asleep", "1 while the engine is asleep: a request starts it.", lambda engine, _: float(sleeps(engine))),
    ("engine_healthy", "1 while the engine can serve.", lambda engine, _: float(serves(engine))),
)
COUNTERS: tuple[tuple[str, str, Callable[[ModelMetrics, EngineStats], float]], ...] = (
    ("prompt_tokens", "Prompt tokens prefilled.", lambda model, _: model.prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda model, _: model.generation_tokens),
    ("num_preemptions", "Requests preempted because KV blocks ran out.", lambda _, stats: stats.preemptions),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda _, stats: stats.prefix_queries),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda _, stats: stats.prefix_hits),
    ("kv_disk_reads", "KV blocks read from the disk tier.", lambda _, stats: stats.disk_reads),
    ("kv_disk_writes", "KV blocks written to the disk tier.", lambda _, stats: stats.disk_writes),
    ("kv_disk_failures", "KV blocks that the disk tier could not read or write.", lambda _, stats: stats.disk_failures),
    ("kv_disk_dropped", "KV blocks evicted before the disk tier had them.", lambda _, stats: stats.disk_dropped),
    ("kv_peer_reads", "KV blocks read from other engines.", lambda _, stats: stats.peer_reads),
    ("kv_peer_sends", "KV blocks sent to other engines.", lambda _, stats: stats.peer_sends),
    ("kv_peer_failures", "Requests whose KV blocks did not all come.", lambda _, stats: stats.peer_failures),
    ("spec_decode_num_drafts", "Steps of sequences with drafts.", lambda _, stats: stats.drafts),
    ("spec_decode_num_draft_tokens", "Draft tokens verified.", lambda _, stats: stats.draft_tokens),
    ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", lambda _, stats: stats.accepted_tokens),
    ("requests_refused", "Requests refused because the queue was full.", lambda model, _: model.engine.queue.refused),
    ("requests_late", "Requests dropped or ended because of their deadline.", lambda model, _: model.engine.queue.late),
    ("engine_restarts", "Engines started after one had ended.", lambda model, _: model.engine.state.restarts),
    ("engine_steps", "Engine steps.", lambda _, stats: stats.steps),
    ("engine_computed_tokens", "Tokens computed, recomputation included.", lambda _, stats: stats.computed_tokens),
    ("engine_prefill_tokens", "Of these, tokens of prompts.", lambda _, stats: stats.prefill_tokens),
    ("engine_decode_tokens", "Of these, one for each sequence that decodes.", lambda _, stats: stats.decode_tokens),
    ("engine_step_seconds", "Time spent in steps.", lambda _, stats: stats.step_seconds),
    ("engine_forward_seconds", "Time spent in the model's forward.", lambda _, stats: stats.forward_seconds),
    ("engine_sample_seconds", "Time spent sampling.", lambda _, stats: stats.sample_seconds),
    (
        "engine_read_bytes",
        "Bytes of weights and KV cache that steps read, estimated.",
        lambda model, _: 0.0 if model.work is None else model.work.read_bytes,
    ),
    (
        "engine_flops",
        "Operations of products with weights, estimated.",
        lambda model, _: 0.0 if model.work is None else model.work.flops,
    ),
)
HISTOGRAMS: tuple[tuple[str, str, Callable[[ModelMetrics], Histogram]], ...] = (
    ("time_to_first_token_seconds", "Time from a request to its first token.", lambda model: model.time_to_first_token),
    ("inter_token_latency_seconds", "Time between tokens of a choice.", lambda model: model.inter_token_latency),
    (
        "request_time_per_output_token_seconds",
        "Mean time per output token of a choice, after the first.",
        lambda model: model.time_per_output_token,
    ),
    ("e2e_request_latency_seconds", "Time from a request to its end.", lambda model: model.e2e_latency),
    ("request_queue_time_seconds", "Time a choice waits for its first step.", lambda model: model.queue_time),
    ("request_prefill_time_seconds", "Time from the first step to the first token.", lambda model: model.prefill_time),
    ("request_decode_time_seconds", "Time from the first token to the last.", lambda model: model.decode_time),
    ("request_inference_time_seconds", "Time from the first step to the end.", lambda model: model.inference_time),
    ("request_prompt_tokens", "Prompt tokens of a request.", lambda model: model.prompt_sizes),
    ("request_generation_tokens", "Tokens of a choice.", lambda model: model.generation_sizes),
    ("iteration_tokens_total", "Tokens computed in a step.", lambda model: model.step_sizes),
)
# Names of earlier versions of vLLM, and our series that have their values; None: Penstock has nothing of the kind.
OLDER: dict[str, str | None] = {
    "time_per_output_token_seconds": "inter_token_latency_seconds",
    "request_max_num_generation_tokens": "request_generation_tokens",
    "gpu_cache_usage_perc": "kv_cache_usage_perc",
    "gpu_prefix_cache_queries": "prefix_cache_queries",
    "gpu_prefix_cache_hits": "prefix_cache_hits",
    "cpu_cache_usage_perc": None,
    "num_requests_swapped": None,
}
GENAI: tuple[tuple[str, Callable[[Latencies], Histogram]], ...] = (
    ("request.duration", lambda latencies: latencies.request),
    ("time_to_first_token", lambda latencies: latencies.first_token),
    ("time_per_output_token", lambda latencies: latencies.per_output_token),
)
