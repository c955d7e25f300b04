"""GET /server_info, /server_load and /tenant_usage: what the pages show of the server."""

import time
from urllib.parse import parse_qsl

import orjson

from penstock.frontend.call import RequestContext
from penstock.frontend.errors import APIError
from penstock.frontend.requests.ranges import RANGES
from penstock.messages import NEUTRAL
from penstock.messages.limits import MAX_STOP_TOKENS
from penstock.observe.histogram import Histogram
from penstock.observe.model_metrics import ModelMetrics
from penstock.version import __version__

HOURS = 24  # of /tenant_usage
_DEFAULTS = {"min_tokens": 0, **NEUTRAL}
_LIMITS = (
    *("max_choices", "max_logprobs", "max_stop_strings", "max_stop_chars", "max_logit_bias", "max_tools"),
    *("max_tool_bytes", "max_body_bytes"),
)


async def show_server(body: bytes, context: RequestContext) -> bytes:
    """Answers with the names of a model, ?model= or the default one, its defaults of sampling parameters, and with
    ranges and limits."""
    model, limits = (await context.for_model(_named(context))).model, context.limits
    info = model.client.info
    return orjson.dumps(
        {
            "version": __version__,
            "model": model.name,
            "aliases": model.aliases,
            "max_model_len": model.max_model_len,
            "vocab_size": info.vocab_size,
            "dtype": info.dtype,
            "embeddings": model.pooling is not None,
            "chat": model.tokenizer.chat_template is not None,
            "tools": model.chat_format.tools is not None,
            "reasoning": model.chat_format.reasoning is not None,
            "defaults": {name: model.defaults.get(name, own) for name, own in _DEFAULTS.items()},
            "ranges": RANGES,
            "limits": {
                **{name: getattr(limits, name) for name in _LIMITS},
                "max_stop_token_ids": MAX_STOP_TOKENS,
                "max_num_seqs": info.max_num_seqs,
            },
        }
    )


async def show_load(body: bytes, context: RequestContext) -> bytes:
    """Answers with counters since the start, gauges and histograms. A reader takes differences of two answers."""
    metrics = (await context.for_model(_named(context))).metrics
    return load_of(metrics) if context.siblings is None else await context.siblings.load(metrics.name)


async def show_usage(body: bytes, context: RequestContext) -> bytes:
    """Answers with what each tenant has used in each of the last hours. A tenant's key shows its own tenant, and a key
    for the operator's routes all. Raises APIError 404 without tenants."""
    if context.account is None:
        raise APIError(404, "this server has no tenants; start it with --tenants", code="not_found")
    since = (time.time() // 3600 - HOURS + 1) * 3600
    rows = await context.account.usage(since)
    return orjson.dumps({"since": since, "currency": context.account.grant.file.currency, "rows": rows})


def _named(context: RequestContext) -> str | None:
    return dict(parse_qsl(context.query.decode("latin-1"))).get("model")


def load_of(metrics: ModelMetrics) -> bytes:
    """Returns the answer of `show_load` for these metrics."""
    engine = metrics.engine
    stats, info = engine.stats(), engine.info
    state = engine.state
    serves = state.status in ("ready", "asleep")
    return orjson.dumps(
        {
            "time": time.monotonic(),
            "state": state.status,
            "restarts": state.restarts,
            "block_size": info.block_size,
            "max_num_seqs": info.max_num_seqs,
            "running": stats.running if serves else 0,
            "waiting": stats.waiting if serves else 0,
            "blocks": [
                {"total": total, "held": held, "cached": cached}
                for total, held, cached in zip(stats.blocks_total, stats.blocks_held, stats.blocks_cached, strict=False)
            ],
            "counters": {
                "steps": stats.steps,
                "computed_tokens": stats.computed_tokens,
                "step_seconds": stats.step_seconds,
                "forward_seconds": stats.forward_seconds,
                "sample_seconds": stats.sample_seconds,
                "prefix_queries": stats.prefix_queries,
                "prefix_hits": stats.prefix_hits,
                "preemptions": stats.preemptions,
                "draft_tokens": stats.draft_tokens,
                "accepted_tokens": stats.accepted_tokens,
                "prompt_tokens": metrics.prompt_tokens,
                "generation_tokens": metrics.generation_tokens,
                "finished": metrics.finished,
            },
            "histograms": {
                "ttft": _buckets(metrics.time_to_first_token),
                "tpot": _buckets(metrics.time_per_output_token),
                "queue": _buckets(metrics.queue_time),
                "e2e": _buckets(metrics.e2e_latency),
            },
        }
    )


def _buckets(histogram: Histogram) -> list[tuple[float | None, float]]:
    """Upper bounds in seconds, None for the last one, with cumulative counts."""
    return [(None if bound == "+Inf" else float(bound), count) for bound, count in histogram.buckets()]
