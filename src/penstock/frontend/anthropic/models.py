"""GET /v1/models and /v1/models/{id} of clients that name a version of Anthropic's API."""

from datetime import UTC, datetime
from typing import Any

import orjson

from penstock.frontend.call import RequestContext
from penstock.frontend.served import ServedModel


async def list_models(body: bytes, context: RequestContext) -> bytes:
    names = context.models.names()
    fields = {"data": [_fields(context.models.find(name).model, name) for name in names], "has_more": False}
    first, last = (names[0], names[-1]) if names else (None, None)
    return orjson.dumps({**fields, "first_id": first, "last_id": last})


async def show_model(body: bytes, context: RequestContext) -> bytes:
    """A model under one of its names. Raises APIError 404 for another name."""
    name = context.path["id"]
    context = await context.for_model(name)
    return orjson.dumps(_fields(context.model, name))


def _fields(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": model.max_model_len,
        "max_tokens": model.max_model_len,
    }
