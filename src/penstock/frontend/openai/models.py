"""GET /v1/models, and the name every request gives."""

from typing import Any

import orjson

from penstock.frontend.errors import APIError
from penstock.frontend.served import ServedModel


def check_model(model: ServedModel, name: str | None) -> None:
    """Raises APIError 404 for a model that is not served. No name means the one that is."""
    if name is not None and not model.answers_to(name):
        shown = name if len(name) <= 100 else name[:100] + "..."
        raise APIError(
            404,
            f"model {shown!r} is not served here; this server has {model.name!r}",
            param="model",
            code="model_not_found",
        )


def encode_models(model: ServedModel) -> bytes:
    names = (model.name, *model.aliases)
    return orjson.dumps({"object": "list", "data": [_fields(model, name) for name in names]})


def encode_model(model: ServedModel, name: str) -> bytes:
    """Raises APIError 404."""
    check_model(model, name)
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
