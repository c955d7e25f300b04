"""GET /v1/models and /v1/models/{id}."""

from typing import Any

import orjson

from penstock.frontend.call import RequestContext
from penstock.frontend.served import ServedModel


async def list_models(body: bytes, context: RequestContext) -> bytes:
    models = context.models
    found = [_fields(models.find(name).model, name) for name in models.names()]
    return orjson.dumps({"object": "list", "data": [*found, *map(_absent_fields, models.absent_names())]})


async def show_model(body: bytes, context: RequestContext) -> bytes:
    """A model under one of its names. Raises APIError 404 for another name."""
    name = context.path["id"]
    if context.models.absent(name) is not None:
        return orjson.dumps(_absent_fields(name))
    context = await context.for_model(name)
    return orjson.dumps(_fields(context.model, name))


def _absent_fields(name: str) -> dict[str, Any]:
    """A model that is loaded by its first request: little is known before."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "penstock", "root": name, "parent": None}


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
