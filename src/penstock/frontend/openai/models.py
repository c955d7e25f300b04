"""GET /v1/models and /v1/models/{id}."""

from typing import Any

import orjson

from penstock.frontend.call import RequestContext
from penstock.frontend.served import ServedModel


async def list_models(body: bytes, context: RequestContext) -> bytes:
    models = context.models
    return orjson.dumps({"object": "list", "data": [_fields(models.find(name).model, name) for name in models.names()]})


async def show_model(body: bytes, context: RequestContext) -> bytes:
    """A model under one of its names. Raises APIError 404 for another name."""
    name = context.path["id"]
    context = await context.for_model(name)
    return orjson.dumps(_fields(context.model, name))


def _fields(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "penstock",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
        "fingerprint": model.fingerprint,
    }
