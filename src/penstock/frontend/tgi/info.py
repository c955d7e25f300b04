"""GET /info."""

import orjson

from penstock.frontend.call import RequestContext
from penstock.version import __version__


async def show_info(body: bytes, context: RequestContext) -> bytes:
    """Returns the facts about the default model, and the limits."""
    model, limits = (await context.for_model(None)).model, context.limits
    info = model.client.info
    return orjson.dumps(
        {
            "model_id": model.name,
            "model_sha": info.revision,
            "model_dtype": info.dtype,
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": limits.max_in_flight,
            "max_best_of": 1,
            "max_stop_sequences": limits.max_stop_strings,
            "max_input_tokens": model.max_model_len - 1,
            "max_total_tokens": model.max_model_len,
            "max_client_batch_size": 1,
            "router": "penstock",
            "version": __version__,
        }
    )
