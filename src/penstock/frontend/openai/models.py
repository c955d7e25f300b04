"""GET /v1/models."""

from typing import Any

import orjson

from penstock.frontend.served import ServedModel


def encode_models(model: ServedModel) -> bytes:
    """The list of the model's names."""
    names = (model.name, *model.aliases)
    return orjson.dumps({"object": "list", "data": [_fields(model, name) for name in names]})


def encode_model(model: ServedModel, name: str) -> bytes:
    """The model under one of its names. Raises APIError 404 for another name."""
    model.check_name(name)
    return orjson.dumps(_fields(model, name))


def _fields(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "penstock",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
    }
